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
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from perseus_compile import launch, launch_cuda, lower
from perseus_compile.call_sites import CallSites, call_site
from perseus_compile.errors import UnsupportedMoE
from perseus_compile.facts import ExpertsSpec, RoutingSpec
from perseus_compile.lower import Arg, ExpertsArgs, RouterArgs, token_arg, whole_arg
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
_KERNEL_KEYS = {"cpu": torch._C.DispatchKey.CPU, "cuda": torch._C.DispatchKey.CUDA}
_BELOW_AUTOGRAD = torch._C._after_autograd_keyset.remove(torch._C.DispatchKey.ADInplaceOrView)


_Experts: TypeAlias = Any  # launch.CpuExperts, or launch_cuda.CudaExperts: by the device of x
_Kernels: TypeAlias = Mapping[str, Callable[[Any, dict[str, Any]], Tensor]]  # of tensors and numbers, by device type
_experts_sites: CallSites[launch_cuda.CudaCall] = CallSites()
_moe_sites: CallSites[launch_cuda.CudaMoe] = CallSites()


def _weight_args(
    gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None
) -> tuple[Arg, Arg | None, Arg, Arg | None]:
    return (
        whole_arg(gate_up),
        None if gate_up_bias is None else whole_arg(gate_up_bias),
        whole_arg(down),
        None if down_bias is None else whole_arg(down_bias),
    )


def _experts_args(x: Tensor, ids: Tensor, weights: Tensor, *expert_tensors: Any) -> ExpertsArgs:
    return ExpertsArgs(token_arg(x), token_arg(ids), token_arg(weights), *_weight_args(*expert_tensors))


def _router_args(x: Tensor, weight: Tensor, bias: Tensor | None, correction_bias: Tensor | None) -> RouterArgs:
    return RouterArgs(
        token_arg(x),
        whole_arg(weight),
        None if bias is None else whole_arg(bias),
        None if correction_bias is None else whole_arg(correction_bias),
    )


def _experts_spec(*, activation_params: Any, **numbers: Any) -> ExpertsSpec:
    return ExpertsSpec(activation_params=tuple(activation_params), **numbers)


@functools.lru_cache(maxsize=4096)
def _prepared(args: ExpertsArgs, numbers: tuple[tuple[str, Any], ...]) -> _Experts:
    """The experts of such a call, checked and ready to run; cached by value."""
    spec = lower.lower(args, _experts_spec(**dict(numbers)))
    return launch.CpuExperts(spec) if spec.device == "cpu" else launch_cuda.CudaExperts(spec)


def _hashable(numbers: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    numbers["activation_params"] = tuple(numbers["activation_params"])
    return tuple(numbers.items())


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


# ---- Between autograd and the kernels


def _wants_grad(tensors: Any) -> bool:
    if torch.is_grad_enabled():
        for one in tensors:
            if one is not None and one.requires_grad:
                return True
    return False


_device_of_keyset: dict[int, str | None] = {}  # reading a set costs more than a look-up


def _device_below(keyset: Any) -> str | None:
    """The device whose kernel the dispatcher would call after autograd; None: something is between, such as tracing."""
    raw = keyset.raw_repr()
    if raw not in _device_of_keyset:
        following = (keyset & _BELOW_AUTOGRAD).highestPriorityTypeId()
        _device_of_keyset[raw] = next((device for device, key in _KERNEL_KEYS.items() if key == following), None)
    return _device_of_keyset[raw]


def _below_autograd(name: str, kernels: _Kernels, keyset: Any, tensors: Any, numbers: dict[str, Any]) -> Tensor:
    """Calls an op without autograd: one node where it is traced, its kernel where it runs."""
    device = _device_below(keyset)
    if device == "cuda":
        # What the dispatcher would call next, without packing and unpacking some 20 arguments once more. Unlike the
        # CPU's, this kernel calls next to no torch ops, and none is recorded where no gradient is wanted: the guard
        # would cost .4 us and save nothing.
        return kernels[device](tensors, numbers)
    with torch._C._AutoDispatchBelowAutograd():
        if device is not None:
            return kernels[device](tensors, numbers)
        op = getattr(torch.ops.perseus, name).default
        return op.redispatch(keyset & _BELOW_AUTOGRAD, *tensors, **numbers)


# ---- perseus::experts


def _experts_on_cpu(tensors: Any, numbers: dict[str, Any]) -> Tensor:
    return _checked_experts(tensors, _hashable(numbers)).forward(*tensors)


def _checked_experts(tensors: Any, numbers: tuple[tuple[str, Any], ...]) -> _Experts:
    experts = _prepared(_experts_args(*tensors), numbers)
    x_TD, ids_TK, weights_TK = tensors[:3]
    _check_tokens(x_TD, ids=ids_TK, weights=weights_TK)
    return experts


def _experts_on_cuda(tensors: Any, numbers: dict[str, Any]) -> Tensor:
    numbers["activation_params"] = tuple(numbers["activation_params"])
    site = call_site(tensors[:3], tensors[3:], numbers)
    call = _experts_sites.find(site)
    if call is None:
        call = _experts_sites.add(site, _checked_experts(tensors, _hashable(numbers)).plan(*tensors))
    return call.forward(*tensors)


_EXPERTS_KERNELS = {"cpu": _experts_on_cpu, "cuda": _experts_on_cuda}


def _experts_fake(*tensors: Any, **numbers: Any) -> Tensor:
    lower.check_experts(_experts_args(*tensors), _experts_spec(**numbers))
    x_TD, ids_TK, weights_TK = tensors[:3]
    _check_tokens(x_TD, ids=ids_TK, weights=weights_TK)
    return x_TD.new_empty(x_TD.shape)


class _ExpertsFunction(torch.autograd.Function):
    """``perseus::experts`` with its derivative. Saves only inputs."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, numbers: dict[str, Any], *tensors: Any) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.numbers = numbers
        return _below_autograd("experts", _EXPERTS_KERNELS, keyset, tensors, numbers)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        need_x, _, *need_rest = ctx.needs_input_grad[2:]
        needs_grad = [need_x, *need_rest]
        grads = iter(
            torch.ops.perseus.experts_backward(grad_TD, *ctx.saved_tensors, **ctx.numbers, needs_grad=needs_grad)
        )
        grad_x, *grad_rest = [next(grads) if needed else None for needed in needs_grad]
        return None, None, grad_x, None, *grad_rest


def _experts_autograd(keyset: Any, *tensors: Any, **numbers: Any) -> Tensor:
    if _wants_grad(tensors):
        return _ExpertsFunction.apply(keyset, numbers, *tensors)
    return _below_autograd("experts", _EXPERTS_KERNELS, keyset, tensors, numbers)


# ---- perseus::experts_backward


def _experts_backward_kernel(grad_TD: Tensor, *tensors: Any, needs_grad: list[bool], **numbers: Any) -> list[Tensor]:
    experts = _prepared(_experts_args(*tensors), _hashable(numbers))
    x_TD, ids_TK, weights_TK = tensors[:3]
    _check_tokens(x_TD, ids=ids_TK, weights=weights_TK, grad=grad_TD)
    return experts.backward(needs_grad, grad_TD, *tensors)


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


@functools.lru_cache(maxsize=4096)
def _prepared_moe(
    router_args: RouterArgs,
    expert_args: tuple[Arg, Arg | None, Arg, Arg | None],
    numbers: tuple[tuple[str, Any], ...],
) -> tuple[RoutingSpec, _Experts]:
    """The router and the experts of such a call, checked and ready to run; cached by value."""
    rest = dict(numbers)
    routing = RoutingSpec(**_take_routing(rest))
    lower.check_routing(router_args, routing, rest["num_experts"])
    x = router_args.x
    ids = Arg(x.device, torch.int64, (routing.top_k,))
    args = ExpertsArgs(x, ids, ids._replace(dtype=routing.weights_dtype), *expert_args)
    return routing, _prepared(args, tuple(rest.items()))


@functools.lru_cache(maxsize=1024)
def _kwargs_of(routing: RoutingSpec) -> dict[str, Any]:
    return routing.as_kwargs()


def _moe_on_cpu(tensors: Any, numbers: dict[str, Any]) -> Tensor:
    router_tensors, expert_tensors = tensors[:4], tensors[4:]
    routing, experts = _prepared_moe(_router_args(*router_tensors), _weight_args(*expert_tensors), _hashable(numbers))
    weights_TK, ids_TK = route(*router_tensors, **_kwargs_of(routing))
    return experts.forward(tensors[0], ids_TK, weights_TK, *expert_tensors)


def _moe_on_cuda(tensors: Any, numbers: dict[str, Any]) -> Tensor:
    numbers["activation_params"] = tuple(numbers["activation_params"])
    site = call_site(tensors[:1], tensors[1:], numbers)
    call = _moe_sites.find(site)
    if call is None:
        args = (_router_args(*tensors[:4]), _weight_args(*tensors[4:]), _hashable(numbers))
        call = _moe_sites.add(site, launch_cuda.CudaMoe.plan(*_prepared_moe(*args), *tensors))
    return call.forward(*tensors)


_MOE_KERNELS = {"cpu": _moe_on_cpu, "cuda": _moe_on_cuda}


def _moe_fake(*tensors: Any, **numbers: Any) -> Tensor:
    routing = RoutingSpec(**_take_routing(numbers))
    lower.check_routing(_router_args(*tensors[:4]), routing, numbers["num_experts"])
    x_TD = tensors[0]
    ids_TK = x_TD.new_empty((x_TD.shape[0], routing.top_k), dtype=torch.int64)
    return _experts_fake(x_TD, ids_TK, ids_TK.to(routing.weights_dtype), *tensors[4:], **numbers)


def route_and_experts(*tensors: Any, **numbers: Any) -> Tensor:
    """``perseus::moe`` taken apart: the router as plain differentiable torch ops, then ``perseus::experts``."""
    routing = RoutingSpec(**_take_routing(numbers))
    lower.check_routing(_router_args(*tensors[:4]), routing, numbers["num_experts"])
    weights_TK, ids_TK = route(*tensors[:4], **routing.as_kwargs())
    return torch.ops.perseus.experts(tensors[0], ids_TK, weights_TK, *tensors[4:], **numbers)


def _moe_autograd(keyset: Any, *tensors: Any, **numbers: Any) -> Tensor:
    if _wants_grad(tensors):
        return route_and_experts(*tensors, **numbers)
    return _below_autograd("moe", _MOE_KERNELS, keyset, tensors, numbers)


# ---- registration


def _other_device(tensor: Tensor, *_: Any, **__: Any) -> Any:
    raise lower.no_kernel(tensor.device)


def _as_kernel(run: Callable[[Any, dict[str, Any]], Tensor]) -> Callable[..., Tensor]:
    """As the dispatcher calls kernels."""
    return lambda *tensors, **numbers: run(tensors, numbers)


def _register() -> None:
    for schema in SCHEMAS:
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    fakes: dict[str, Callable[..., Any]] = {
        "experts": _experts_fake,
        "experts_backward": _experts_backward_fake,
        "moe": _moe_fake,
    }
    for device in _KERNEL_KEYS:
        _LIBRARY.impl("experts", _as_kernel(_EXPERTS_KERNELS[device]), device.upper())
        _LIBRARY.impl("experts_backward", _experts_backward_kernel, device.upper())
        _LIBRARY.impl("moe", _as_kernel(_MOE_KERNELS[device]), device.upper())
    for name, fake in fakes.items():
        _LIBRARY.impl(name, _other_device, "CompositeExplicitAutograd")
        torch.library.register_fake(f"perseus::{name}", fake, lib=_LIBRARY)
    torch.library.register_autograd("perseus::experts_backward", _no_second_derivative, lib=_LIBRARY)
    _LIBRARY.impl("experts", _experts_autograd, "Autograd", with_keyset=True)
    _LIBRARY.impl("moe", _moe_autograd, "Autograd", with_keyset=True)


_register()
