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

from typing import Any

import torch
from torch import Tensor

from perseus_compile import launch, lower
from perseus_compile.errors import UnsupportedMoE
from perseus_compile.facts import ExpertsSpec, RoutingSpec
from perseus_compile.lower import ExpertsArgs, RouterArgs, token_arg, whole_arg
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
    "moe(Tensor x_TD, Tensor router_weight_ED, Tensor? router_bias_E, Tensor? correction_bias_E, "
    f"{_EXPERT_TENSORS}, *, {_ROUTING_NUMBERS}, {_EXPERT_NUMBERS}) -> Tensor",
)

_LIBRARY = torch.library.Library("perseus", "FRAGMENT")
_ROUTING_FIELDS = tuple(RoutingSpec.__dataclass_fields__)
# Nothing is registered for ADInplaceOrView, so the dispatcher falls through it.
_BELOW_AUTOGRAD = torch._C._after_autograd_keyset.remove(torch._C.DispatchKey.ADInplaceOrView)


def _experts_args(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
) -> ExpertsArgs:
    return ExpertsArgs(
        token_arg(x),
        token_arg(ids),
        token_arg(weights),
        whole_arg(gate_up),
        None if gate_up_bias is None else whole_arg(gate_up_bias),
        whole_arg(down),
        None if down_bias is None else whole_arg(down_bias),
    )


def _router_args(x: Tensor, weight: Tensor, bias: Tensor | None, correction_bias: Tensor | None) -> RouterArgs:
    return RouterArgs(
        token_arg(x),
        whole_arg(weight),
        None if bias is None else whole_arg(bias),
        None if correction_bias is None else whole_arg(correction_bias),
    )


def _check_tokens(x_TD: Tensor, **others: Tensor) -> None:
    """All have x's number of rows. Never fixes T: between symbolic sizes, equality becomes a runtime check."""
    num_tokens = x_TD.shape[0]
    for name, other in others.items():
        if not (isinstance(num_tokens, int) and isinstance(other.shape[0], int)):
            torch._check(other.shape[0] == num_tokens)
        elif other.shape[0] != num_tokens:
            raise UnsupportedMoE(
                f"{name} must have one row per token, T={num_tokens} as x has, got {other.shape[0]}; "
                f"pass x and {name} of the same tokens"
            )


# ---- perseus::experts


def _experts_cpu(
    *tensors: Any,
    weight_layout: Any,
    gate_layout: Any,
    activation: Any,
    activation_params: list[float],
    weight_on: Any,
    num_experts: int,
    expert_offset: int,
) -> Tensor:
    spec = lower.lower(
        _experts_args(*tensors),
        weight_layout,
        gate_layout,
        activation,
        tuple(activation_params),
        weight_on,
        num_experts,
        expert_offset,
    )
    x_TD, ids_TK, weights_TK = tensors[:3]
    _check_tokens(x_TD, ids=ids_TK, weights=weights_TK)
    return launch.run_experts(spec, *tensors)


def _experts_fake(*tensors: Any, activation_params: list[float], **numbers: Any) -> Tensor:
    spec = ExpertsSpec(activation_params=tuple(activation_params), **numbers)
    lower.check_experts(_experts_args(*tensors), spec)
    x_TD, ids_TK, weights_TK = tensors[:3]
    _check_tokens(x_TD, ids=ids_TK, weights=weights_TK)
    return x_TD.new_empty(x_TD.shape)


def _experts_setup_context(ctx: Any, inputs: Any, keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.numbers = keyword_only_inputs


def _experts_derivative(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
    need_x, _, *need_rest = ctx.needs_input_grad
    needs_grad = [need_x, *need_rest]
    grads = iter(torch.ops.perseus.experts_backward(grad_TD, *ctx.saved_tensors, **ctx.numbers, needs_grad=needs_grad))
    grad_x, *grad_rest = [next(grads) if needed else None for needed in needs_grad]
    return grad_x, None, *grad_rest


# ---- perseus::experts_backward


def _experts_backward_cpu(
    grad_TD: Tensor,
    *tensors: Any,
    weight_layout: Any,
    gate_layout: Any,
    activation: Any,
    activation_params: list[float],
    weight_on: Any,
    num_experts: int,
    expert_offset: int,
    needs_grad: list[bool],
) -> list[Tensor]:
    spec = lower.lower(
        _experts_args(*tensors),
        weight_layout,
        gate_layout,
        activation,
        tuple(activation_params),
        weight_on,
        num_experts,
        expert_offset,
    )
    x_TD, ids_TK, weights_TK = tensors[:3]
    _check_tokens(x_TD, ids=ids_TK, weights=weights_TK, grad=grad_TD)
    return launch.run_experts_backward(spec, grad_TD, *tensors, needs_grad=needs_grad)


def _experts_backward_fake(grad_TD: Tensor, *tensors: Any, needs_grad: list[bool], **numbers: Any) -> list[Tensor]:
    _experts_fake(*tensors, **numbers)
    x_TD, _, *rest = tensors
    _check_tokens(x_TD, grad=grad_TD)
    return [tensor.new_empty(tensor.shape) for tensor, needed in zip((x_TD, *rest), needs_grad, strict=True) if needed]


def _no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise UnsupportedMoE(
        "perseus::experts can be differentiated once, got a request for a second derivative; "
        "do not use the perseus backend where gradients are differentiated again"
    )


# ---- perseus::moe


def _take_routing(numbers: dict[str, Any]) -> dict[str, Any]:
    """Moves the router's numbers out of ``numbers``, which keeps those of the experts."""
    return {name: numbers.pop(name) for name in _ROUTING_FIELDS}


def _moe_cpu(*tensors: Any, **numbers: Any) -> Tensor:
    routing = _take_routing(numbers)
    lower.lower_routing(_router_args(*tensors[:4]), numbers["num_experts"], **routing)
    weights_TK, ids_TK = route(*tensors[:4], **routing)
    return _experts_cpu(tensors[0], ids_TK, weights_TK, *tensors[4:], **numbers)


def _moe_fake(*tensors: Any, **numbers: Any) -> Tensor:
    routing = RoutingSpec(**_take_routing(numbers))
    lower.check_routing(_router_args(*tensors[:4]), routing, numbers["num_experts"])
    x_TD = tensors[0]
    ids_TK = x_TD.new_empty((x_TD.shape[0], routing.top_k), dtype=torch.int64)
    return _experts_fake(x_TD, ids_TK, ids_TK.to(routing.weights_dtype), *tensors[4:], **numbers)


def _moe_autograd(keyset: Any, *tensors: Any, **numbers: Any) -> Tensor:
    """With gradients: the router as plain torch ops, then ``perseus::experts``. Without: one node, below autograd."""
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors):
        routing = RoutingSpec(**_take_routing(numbers))
        lower.check_routing(_router_args(*tensors[:4]), routing, numbers["num_experts"])
        weights_TK, ids_TK = route(*tensors[:4], **routing.as_kwargs())
        return torch.ops.perseus.experts(tensors[0], ids_TK, weights_TK, *tensors[4:], **numbers)
    below = keyset & _BELOW_AUTOGRAD
    with torch._C._AutoDispatchBelowAutograd():
        if below.highestPriorityTypeId() == torch._C.DispatchKey.CPU:
            # What the dispatcher would call next, without packing 25 arguments once more.
            return _moe_cpu(*tensors, **numbers)
        return torch.ops.perseus.moe.default.redispatch(below, *tensors, **numbers)


# ---- registration


def _other_device(tensor: Tensor, *_: Any, **__: Any) -> Any:
    raise lower.no_kernel(tensor.device)


def _register() -> None:
    for schema in SCHEMAS:
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    kernels = {"experts": _experts_cpu, "experts_backward": _experts_backward_cpu, "moe": _moe_cpu}
    fakes = {"experts": _experts_fake, "experts_backward": _experts_backward_fake, "moe": _moe_fake}
    for name, kernel in kernels.items():
        _LIBRARY.impl(name, kernel, "CPU")
        _LIBRARY.impl(name, _other_device, "CompositeExplicitAutograd")
        torch.library.register_fake(f"perseus::{name}", fakes[name], lib=_LIBRARY)
    torch.library.register_autograd(
        "perseus::experts", _experts_derivative, setup_context=_experts_setup_context, lib=_LIBRARY
    )
    torch.library.register_autograd("perseus::experts_backward", _no_second_derivative, lib=_LIBRARY)
    _LIBRARY.impl("moe", _moe_autograd, "Autograd", with_keyset=True)


_register()
