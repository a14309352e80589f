"""The perseus ops: schemas, fakes, autograd, and the road from a call to ``lower`` and ``launch``.

``perseus::experts``: given x, ids and weights, the weighted sum of the chosen experts of each token.
``perseus::experts_backward``: its gradients. ``perseus::moe``: the router, then the experts, as one node.

Meaning: for token t, the sum over its choices k, in choice order and in float32 (float64 for float64 input), of
``weights[t, k] * down_e(act(gate_up_e(x[t])))`` with ``e = ids[t, k]``. Ids outside
``[expert_offset, expert_offset + local experts)`` are skipped, duplicated ids add, zero tokens are ordinary. The GEMMs
and the activation are in the dtype of x. Same bits from run to run.

Configuration is by value only, so graphs that hold these ops can be cached and shared.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from perseus_compile import launch, lower
from perseus_compile.errors import UnsupportedMoE
from perseus_compile.facts import ExpertsSpec, RoutingSpec
from perseus_compile.lower import ExpertsArgs, RouterArgs
from perseus_compile.routing import route

_EXPERT_TENSORS = "Tensor gate_up, Tensor? gate_up_bias, Tensor down, Tensor? down_bias"
_EXPERT_NUMBERS = (
    "str weight_layout, str gate_layout, str activation, float[] activation_params, str weight_on, "
    "int num_experts, int expert_offset"
)
_ROUTING_NUMBERS = (
    "str routing, int top_k, bool renormalize, float renormalize_eps, float routing_scale, int num_groups, "
    "int topk_groups, ScalarType router_dtype, ScalarType score_dtype, ScalarType weights_dtype"
)
SCHEMAS = (
    f"experts(Tensor x_TD, Tensor ids_TK, Tensor weights_TK, {_EXPERT_TENSORS}, *, {_EXPERT_NUMBERS}) -> Tensor",
    f"experts_backward(Tensor grad_TD, Tensor x_TD, Tensor ids_TK, Tensor weights_TK, {_EXPERT_TENSORS}, *, "
    f"{_EXPERT_NUMBERS}, bool[] needs_grad) -> Tensor[]",
    f"moe(Tensor x_TD, Tensor router_weight_ED, Tensor? router_bias_E, Tensor? correction_bias_E, {_EXPERT_TENSORS}, *, "
    f"{_ROUTING_NUMBERS}, {_EXPERT_NUMBERS}) -> Tensor",
)

_LIBRARY = torch.library.Library("perseus", "FRAGMENT")
for _schema in SCHEMAS:
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

_ROUTING_FIELDS = tuple(RoutingSpec.__dataclass_fields__)


@functools.lru_cache(maxsize=1024)
def _experts_spec(
    weight_layout: Any,
    gate_layout: Any,
    activation: Any,
    activation_params: tuple[float, ...],
    weight_on: Any,
    num_experts: int,
    expert_offset: int,
) -> ExpertsSpec:
    return ExpertsSpec(
        weight_layout=weight_layout,
        gate_layout=gate_layout,
        activation=activation,
        activation_params=activation_params,
        weight_on=weight_on,
        num_experts=num_experts,
        expert_offset=expert_offset,
    )


def _spec(*, activation_params: list[float], **numbers: Any) -> ExpertsSpec:
    return _experts_spec(activation_params=tuple(activation_params), **numbers)


def _check_tokens(x_TD: Tensor, **others: Tensor) -> None:
    """All have x's number of rows. Never a guard that fixes T: for symbolic sizes equality becomes a runtime check."""
    for name, other in others.items():
        if isinstance(x_TD.shape[0], int) and isinstance(other.shape[0], int):
            if other.shape[0] != x_TD.shape[0]:
                raise UnsupportedMoE(
                    f"{name} must have one row per token, T={x_TD.shape[0]} as x has, got {other.shape[0]}; "
                    f"pass {name} as [T, ...] of the same tokens"
                )
        else:
            torch._check(other.shape[0] == x_TD.shape[0])


def _args(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
) -> ExpertsArgs:
    token, whole = lower.token_arg, lower.whole_arg
    return ExpertsArgs(
        token(x), token(ids), token(weights), whole(gate_up), whole(gate_up_bias), whole(down), whole(down_bias)
    )


# perseus::experts


def _experts_cpu(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, *expert_tensors: Any, **numbers: Any) -> Tensor:
    spec = lower.lower(_args(x_TD, ids_TK, weights_TK, *expert_tensors), _spec(**numbers))
    _check_tokens(x_TD, ids=ids_TK, weights=weights_TK)
    return launch.run_experts(spec, x_TD, ids_TK, weights_TK, *expert_tensors)


def _experts_fake(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, *expert_tensors: Any, **numbers: Any) -> Tensor:
    lower.check_experts(_args(x_TD, ids_TK, weights_TK, *expert_tensors), _spec(**numbers))
    _check_tokens(x_TD, ids=ids_TK, weights=weights_TK)
    return x_TD.new_empty(x_TD.shape)


def _experts_setup_context(ctx: Any, inputs: Any, keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.numbers = keyword_only_inputs


def _experts_backward_formula(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
    need_x, _, *need_rest = ctx.needs_input_grad
    needs_grad = [need_x, *need_rest]
    grads = iter(
        torch.ops.perseus.experts_backward(grad_TD, *ctx.saved_tensors, **ctx.numbers, needs_grad=needs_grad)
    )
    grad_x, *grad_rest = [next(grads) if needed else None for needed in needs_grad]
    return grad_x, None, *grad_rest


# perseus::experts_backward


def _experts_backward_cpu(
    grad_TD: Tensor,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *expert_tensors: Any,
    needs_grad: list[bool],
    **numbers: Any,
) -> list[Tensor]:
    spec = lower.lower(_args(x_TD, ids_TK, weights_TK, *expert_tensors), _spec(**numbers))
    _check_tokens(x_TD, ids=ids_TK, weights=weights_TK, grad=grad_TD)
    return launch.run_experts_backward(
        spec, grad_TD, x_TD, ids_TK, weights_TK, *expert_tensors, needs_grad=tuple(needs_grad)
    )


def _experts_backward_fake(
    grad_TD: Tensor,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *expert_tensors: Any,
    needs_grad: list[bool],
    **numbers: Any,
) -> list[Tensor]:
    lower.check_experts(_args(x_TD, ids_TK, weights_TK, *expert_tensors), _spec(**numbers))
    _check_tokens(x_TD, ids=ids_TK, weights=weights_TK, grad=grad_TD)
    wanted = zip((x_TD, weights_TK, *expert_tensors), needs_grad, strict=True)
    return [tensor.new_empty(tensor.shape) for tensor, needed in wanted if needed]


def _no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise UnsupportedMoE(
        "perseus::experts can be differentiated once, got a request for second derivatives; "
        "compile this model without the perseus backend"
    )


# perseus::moe


def _split(numbers: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    routing = {name: numbers[name] for name in _ROUTING_FIELDS}
    return routing, {name: value for name, value in numbers.items() if name not in routing}


def _check_router(
    x_TD: Tensor,
    router_weight_ED: Tensor,
    router_bias_E: Tensor | None,
    correction_bias_E: Tensor | None,
    routing: dict[str, Any],
    num_experts: int,
) -> None:
    whole = lower.whole_arg
    args = RouterArgs(lower.token_arg(x_TD), whole(router_weight_ED), whole(router_bias_E), whole(correction_bias_E))
    lower.check_routing(args, RoutingSpec(**routing), num_experts)


def _moe_cpu(
    x_TD: Tensor,
    router_weight_ED: Tensor,
    router_bias_E: Tensor | None,
    correction_bias_E: Tensor | None,
    *expert_tensors: Any,
    **numbers: Any,
) -> Tensor:
    routing, rest = _split(numbers)
    _check_router(x_TD, router_weight_ED, router_bias_E, correction_bias_E, routing, rest["num_experts"])
    weights_TK, ids_TK = route(x_TD, router_weight_ED, router_bias_E, correction_bias_E, **routing)
    return _experts_cpu(x_TD, ids_TK, weights_TK, *expert_tensors, **rest)


def _moe_fake(
    x_TD: Tensor,
    router_weight_ED: Tensor,
    router_bias_E: Tensor | None,
    correction_bias_E: Tensor | None,
    *expert_tensors: Any,
    **numbers: Any,
) -> Tensor:
    routing, rest = _split(numbers)
    _check_router(x_TD, router_weight_ED, router_bias_E, correction_bias_E, routing, rest["num_experts"])
    ids_TK = x_TD.new_empty((x_TD.shape[0], routing["top_k"]), dtype=torch.int64)
    weights_TK = ids_TK.to(routing["weights_dtype"])
    return _experts_fake(x_TD, ids_TK, weights_TK, *expert_tensors, **rest)


def _moe_autograd(
    keyset: Any,
    x_TD: Tensor,
    router_weight_ED: Tensor,
    router_bias_E: Tensor | None,
    correction_bias_E: Tensor | None,
    *expert_tensors: Any,
    **numbers: Any,
) -> Tensor:
    """With gradients: the router as plain torch ops and ``perseus::experts``. Without: one node, below autograd."""
    tensors = (x_TD, router_weight_ED, router_bias_E, correction_bias_E, *expert_tensors)
    if not (torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.perseus.moe.default.redispatch(
                keyset & torch._C._after_autograd_keyset, *tensors, **numbers
            )
    routing, rest = _split(numbers)
    _check_router(x_TD, router_weight_ED, router_bias_E, correction_bias_E, routing, rest["num_experts"])
    weights_TK, ids_TK = route(x_TD, router_weight_ED, router_bias_E, correction_bias_E, **routing)
    return torch.ops.perseus.experts(x_TD, ids_TK, weights_TK, *expert_tensors, **rest)


def _other_device(tensor: Tensor, *_: Any, **__: Any) -> Any:
    raise lower.no_kernel(tensor.device)


def _register() -> None:
    kernels = {"experts": _experts_cpu, "experts_backward": _experts_backward_cpu, "moe": _moe_cpu}
    fakes = {"experts": _experts_fake, "experts_backward": _experts_backward_fake, "moe": _moe_fake}
    for name, kernel in kernels.items():
        _LIBRARY.impl(name, kernel, "CPU")
        _LIBRARY.impl(name, _other_device, "CompositeExplicitAutograd")
        torch.library.register_fake(f"perseus::{name}", fakes[name], lib=_LIBRARY)
    torch.library.register_autograd(
        "perseus::experts", _experts_backward_formula, setup_context=_experts_setup_context, lib=_LIBRARY
    )
    torch.library.register_autograd("perseus::experts_backward", _no_second_derivative, lib=_LIBRARY)
    _LIBRARY.impl("moe", _moe_autograd, "Autograd", with_keyset=True)


_register()
