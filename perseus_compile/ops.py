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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from perseus_compile import launch, launch_cuda, lower, tuned
from perseus_compile.call_sites import CallSites, experts_site, moe_site
from perseus_compile.errors import UnsupportedMoE
from perseus_compile.facts import ExpertsSpec, RoutingSpec, default_dtypes
from perseus_compile.lower import Arg, ExpertsArgs, RouterArgs, check_tokens, token_arg, whole_arg
from perseus_compile.routing import route

EXPERT_TENSORS = "Tensor gate_up, Tensor? gate_up_bias, Tensor down, Tensor? down_bias"
EXPERT_DEFAULTS = (
    "str weight_layout='out_in', str gate_layout='concatenated', str activation='silu', float[] activation_params=[], "
    "str weight_on='output', int expert_offset=0"
)
_ROUTING_DEFAULTS = (
    "bool renormalize=False, str routing='softmax_topk', ScalarType? router_dtype=None, ScalarType? score_dtype=None, "
    "ScalarType? weights_dtype=None, float renormalize_eps=0.0, float routing_scale=1.0, int num_groups=1, "
    "int topk_groups=1"
)
# The dispatcher takes .15 us for each number that it passes, .5 us for a dtype, and .4 us more for one that is
# keyword-only. It passes no defaults after the last argument that has another value.
SCHEMAS = (
    f"experts(Tensor x_TD, Tensor ids_TK, Tensor weights_TK, {EXPERT_TENSORS}, int num_experts, {EXPERT_DEFAULTS}) "
    "-> Tensor",
    f"experts_backward(Tensor grad_TD, Tensor x_TD, Tensor ids_TK, Tensor weights_TK, {EXPERT_TENSORS}, "
    f"bool[] needs_grad, int num_experts, {EXPERT_DEFAULTS}) -> Tensor[]",
    "moe(Tensor x_TD, Tensor router_weight_ED, Tensor? router_bias_E, Tensor? correction_bias_E, "
    f"{EXPERT_TENSORS}, int top_k, int num_experts, {_ROUTING_DEFAULTS}, {EXPERT_DEFAULTS}) -> Tensor",
)

_LIBRARY = torch.library.Library("perseus", "FRAGMENT")
_NUM_EXPERT_TENSORS = 7  # x, ids, weights, gate_up, gate_up_bias, down, down_bias
_NUM_MOE_TENSORS = 8  # x, router weight, router bias, correction bias, then the last four of these
# The numbers of an op are fields of the specs.
_EXPERTS_NUMBERS, _, _MOE_NUMBERS = (
    tuple(one.name for one in torch._C.parse_schema(schema).arguments if "Tensor" not in str(one.type))
    for schema in SCHEMAS
)
_EXPERTS_PARAMS_AT, _MOE_PARAMS_AT = (names.index("activation_params") for names in (_EXPERTS_NUMBERS, _MOE_NUMBERS))
_ROUTING_FIELDS = frozenset(RoutingSpec.__dataclass_fields__)
_KERNEL_KEYS = {"cpu": torch._C.DispatchKey.CPU, "cuda": torch._C.DispatchKey.CUDA}
# Nothing is registered for ADInplaceOrView, so the dispatcher falls through it.
_BELOW_AUTOGRAD = torch._C._after_autograd_keyset.remove(torch._C.DispatchKey.ADInplaceOrView)

_Experts: TypeAlias = Any  # launch.CpuExperts, or launch_cuda.CudaExperts: by the device of x
# In the order of the schema, without those defaults that the dispatcher leaves out.
_Numbers: TypeAlias = tuple[Any, ...]
_Kernels: TypeAlias = Mapping[str, Callable[..., Tensor]]  # by device type

_experts_sites: CallSites[launch_cuda.CudaCall] = CallSites()
_moe_sites: CallSites[launch_cuda.CudaMoe] = CallSites()
for _sites in (_experts_sites, _moe_sites):
    tuned.when_recorded(_sites.forget)


def _weight_args(
    gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None
) -> tuple[Arg, Arg | None, Arg, Arg | None]:
    return (
        whole_arg(gate_up),
        None if gate_up_bias is None else whole_arg(gate_up_bias),
        whole_arg(down),
        None if down_bias is None else whole_arg(down_bias),
    )


def experts_args(x: Tensor, ids: Tensor, weights: Tensor, *expert_tensors: Any) -> ExpertsArgs:
    """The facts of the tensors of ``perseus::experts``, in schema order."""
    return ExpertsArgs(token_arg(x), token_arg(ids), token_arg(weights), *_weight_args(*expert_tensors))


def _router_args(x: Tensor, weight: Tensor, bias: Tensor | None, correction_bias: Tensor | None) -> RouterArgs:
    return RouterArgs(
        token_arg(x),
        whole_arg(weight),
        None if bias is None else whole_arg(bias),
        None if correction_bias is None else whole_arg(correction_bias),
    )


def experts_spec(numbers: _Numbers) -> ExpertsSpec:
    """What the numbers of ``perseus::experts`` say, in the order of its schema; defaults at the end may be missing."""
    return ExpertsSpec.from_kwargs(dict(zip(_EXPERTS_NUMBERS, numbers, strict=False)))


@functools.lru_cache(maxsize=4096)
def _prepared(args: ExpertsArgs, numbers: _Numbers) -> _Experts:
    """The experts of such a call, checked and ready to run; cached by value."""
    spec = lower.lower(args, experts_spec(numbers))
    return launch.CpuExperts(spec) if spec.device == "cpu" else launch_cuda.CudaExperts(spec)


def _hashable(numbers: _Numbers, params_at: int) -> _Numbers:
    """With the parameters of the activation, which the dispatcher passes as a list, as a tuple."""
    if len(numbers) <= params_at:
        return numbers
    return (*numbers[:params_at], tuple(numbers[params_at]), *numbers[params_at + 1 :])


# ---- Between autograd and the kernels


def _wants_grad(args: tuple[Any, ...], num_tensors: int) -> bool:
    if torch.is_grad_enabled():
        for one in args[:num_tensors]:
            if one is not None and one.requires_grad:
                return True
    return False


_device_of_keyset: dict[int, str] = {}  # reading a set costs more than a look-up


def _device_below(keyset: Any) -> str:
    """The device whose kernel the dispatcher would call after autograd; "": something is between, such as tracing."""
    device = _device_of_keyset.get(keyset.raw_repr())
    if device is None:
        following = (keyset & _BELOW_AUTOGRAD).highestPriorityTypeId()
        device = next((device for device, key in _KERNEL_KEYS.items() if key == following), "")
        _device_of_keyset[keyset.raw_repr()] = device
    return device


def _below_autograd(name: str, kernels: _Kernels, keyset: Any, args: tuple[Any, ...]) -> Tensor:
    """Calls an op without autograd: one node where it is traced, its kernel where it runs."""
    device = _device_below(keyset)
    if device == "cuda":
        # What the dispatcher would call next, without packing and unpacking some 20 arguments once more. Unlike the
        # CPU's, this kernel calls next to no torch ops, and none is recorded where no gradient is wanted: the guard
        # would cost .4 us and save nothing.
        return kernels[device](*args)
    with torch._C._AutoDispatchBelowAutograd():
        if device:
            return kernels[device](*args)
        return getattr(torch.ops.perseus, name).default.redispatch(keyset & _BELOW_AUTOGRAD, *args)


# ---- perseus::experts


def _experts_on_cpu(*args: Any) -> Tensor:
    return _checked_experts(args).forward(*args[:_NUM_EXPERT_TENSORS])


def _checked_experts(args: tuple[Any, ...]) -> _Experts:
    tensors, numbers = args[:_NUM_EXPERT_TENSORS], args[_NUM_EXPERT_TENSORS:]
    experts = _prepared(experts_args(*tensors), _hashable(numbers, _EXPERTS_PARAMS_AT))
    x_TD, ids_TK, weights_TK = tensors[:3]
    check_tokens(x_TD, ids=ids_TK, weights=weights_TK)
    return experts


def _experts_on_cuda(*args: Any) -> Tensor:
    tensors, numbers = args[:_NUM_EXPERT_TENSORS], args[_NUM_EXPERT_TENSORS:]
    site = experts_site(_hashable(numbers, _EXPERTS_PARAMS_AT), *tensors)
    call = _experts_sites.find(site)
    if call is None:
        call = _experts_sites.add(site, lambda: _checked_experts(args).plan(*tensors))
    return call.forward(*tensors)


_EXPERTS_KERNELS = {"cpu": _experts_on_cpu, "cuda": _experts_on_cuda}


def _experts_fake(*args: Any) -> Tensor:
    tensors, numbers = args[:_NUM_EXPERT_TENSORS], args[_NUM_EXPERT_TENSORS:]
    lower.check_experts(experts_args(*tensors), experts_spec(numbers))
    x_TD, ids_TK, weights_TK = tensors[:3]
    check_tokens(x_TD, ids=ids_TK, weights=weights_TK)
    return x_TD.new_empty(x_TD.shape)


class _ExpertsFunction(torch.autograd.Function):
    """``perseus::experts`` with its derivative. Saves only inputs."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> Tensor:
        ctx.save_for_backward(*args[:_NUM_EXPERT_TENSORS])
        ctx.numbers = args[_NUM_EXPERT_TENSORS:]
        return _below_autograd("experts", _EXPERTS_KERNELS, keyset, args)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        need_x, _, *need_rest = ctx.needs_input_grad[1 : 1 + _NUM_EXPERT_TENSORS]
        needs_grad = [need_x, *need_rest]
        grads = torch.ops.perseus.experts_backward(grad_TD, *ctx.saved_tensors, needs_grad, *ctx.numbers)
        grad_x, *grad_rest = grads_by_input(grads, needs_grad)
        return None, grad_x, None, *grad_rest, *(None for _ in ctx.numbers)


def _refuse_forward_mode(args: tuple[Any, ...]) -> None:
    if any(isinstance(one, Tensor) and forward_ad.unpack_dual(one).tangent is not None for one in args):
        raise UnsupportedMoE(
            "perseus ops have derivatives in reverse mode only, got a tensor with a tangent; do not use the perseus "
            "backend under torch.func.jvp or torch.autograd.forward_ad"
        )


def _experts_autograd(keyset: Any, *args: Any) -> Tensor:
    if forward_ad._current_level >= 0:
        _refuse_forward_mode(args)
    if _wants_grad(args, _NUM_EXPERT_TENSORS):
        return _ExpertsFunction.apply(keyset, *args)
    return _below_autograd("experts", _EXPERTS_KERNELS, keyset, args)


# ---- perseus::experts_backward


def _split_backward(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[bool], _Numbers]:
    return args[:_NUM_EXPERT_TENSORS], args[_NUM_EXPERT_TENSORS], args[_NUM_EXPERT_TENSORS + 1 :]


def _experts_backward_kernel(grad_TD: Tensor, *args: Any) -> list[Tensor]:
    tensors, needs_grad, numbers = _split_backward(args)
    experts = _checked_experts((*tensors, *numbers))
    check_tokens(tensors[0], grad=grad_TD)
    return experts.backward(needs_grad, grad_TD, *tensors)


def _experts_backward_fake(grad_TD: Tensor, *args: Any) -> list[Tensor]:
    tensors, needs_grad, numbers = _split_backward(args)
    _experts_fake(*tensors, *numbers)
    x_TD, _, *rest = tensors
    check_tokens(x_TD, grad=grad_TD)
    return empty_grads((x_TD, *rest), needs_grad)


# ---- what the backward of every op of experts does


def grads_by_input(grads: Iterable[Tensor], needs_grad: Sequence[bool]) -> list[Tensor | None]:
    """An entry per differentiable input: the next of ``grads``, or None where no gradient was asked for."""
    following = iter(grads)
    return [next(following) if needed else None for needed in needs_grad]


def empty_grads(tensors: Iterable[Any], needs_grad: Sequence[bool]) -> list[Tensor]:
    """What a fake backward returns: a new tensor for each of ``tensors`` whose gradient was asked for."""
    return [tensor.new_empty(tensor.shape) for tensor, needed in zip(tensors, needs_grad, strict=True) if needed]


def no_second_derivative(op: str) -> Callable[..., Any]:
    """What to register as the derivative of the backward of ``op``: it raises ``UnsupportedMoE``."""

    def refuse(ctx: Any, *grads: Any) -> None:
        raise UnsupportedMoE(
            f"perseus::{op} can be differentiated once, got a request for a second derivative; "
            "do not use the perseus backend where gradients are differentiated again"
        )

    return refuse


# ---- perseus::moe


def _split_moe(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...], RoutingSpec, _Numbers]:
    """Tensors of the router, tensors of the experts, the router's numbers and those of the experts."""
    routing, numbers = _split_numbers(args[_NUM_MOE_TENSORS:], args[0].dtype)
    return args[:4], args[4:_NUM_MOE_TENSORS], routing, numbers


def _split_numbers(numbers: _Numbers, x_dtype: torch.dtype) -> tuple[RoutingSpec, _Numbers]:
    named = dict(zip(_MOE_NUMBERS, numbers, strict=False))
    of_router = {name: value for name, value in named.items() if name in _ROUTING_FIELDS and value is not None}
    # Both schemas have the numbers of the experts in one order.
    of_experts = tuple(value for name, value in named.items() if name not in _ROUTING_FIELDS)
    return RoutingSpec(**{**default_dtypes(x_dtype), **of_router}), of_experts


@functools.lru_cache(maxsize=4096)
def _prepared_moe(
    router_args: RouterArgs, expert_args: tuple[Arg, Arg | None, Arg, Arg | None], numbers: _Numbers
) -> tuple[RoutingSpec, _Experts]:
    """The router and the experts of such a call, checked and ready to run; cached by value."""
    routing, of_experts = _split_numbers(numbers, router_args.x.dtype)
    lower.check_routing(router_args, routing, experts_spec(of_experts).num_experts)
    x = router_args.x
    ids = Arg(x.device, torch.int64, (routing.top_k,))
    args = ExpertsArgs(x, ids, ids._replace(dtype=routing.weights_dtype), *expert_args)
    return routing, _prepared(args, of_experts)


@functools.lru_cache(maxsize=1024)
def _kwargs_of(routing: RoutingSpec) -> dict[str, Any]:
    return routing.as_kwargs()


def _moe_on_cpu(*args: Any) -> Tensor:
    router_tensors, expert_tensors = args[:4], args[4:_NUM_MOE_TENSORS]
    numbers = _hashable(args[_NUM_MOE_TENSORS:], _MOE_PARAMS_AT)
    routing, experts = _prepared_moe(_router_args(*router_tensors), _weight_args(*expert_tensors), numbers)
    weights_TK, ids_TK = route(*router_tensors, **_kwargs_of(routing))
    return experts.forward(args[0], ids_TK, weights_TK, *expert_tensors)


def _moe_on_cuda(*args: Any) -> Tensor:
    tensors, numbers = args[:_NUM_MOE_TENSORS], _hashable(args[_NUM_MOE_TENSORS:], _MOE_PARAMS_AT)
    site = moe_site(numbers, *tensors)
    call = _moe_sites.find(site)
    if call is None:
        prepared = _prepared_moe(_router_args(*tensors[:4]), _weight_args(*tensors[4:]), numbers)
        call = _moe_sites.add(site, lambda: launch_cuda.CudaMoe.plan(*prepared, *tensors))
    return call.forward(*tensors)


_MOE_KERNELS = {"cpu": _moe_on_cpu, "cuda": _moe_on_cuda}


def _moe_fake(*args: Any) -> Tensor:
    router_tensors, expert_tensors, routing, numbers = _split_moe(args)
    lower.check_routing(_router_args(*router_tensors), routing, experts_spec(numbers).num_experts)
    x_TD = args[0]
    ids_TK = x_TD.new_empty((x_TD.shape[0], routing.top_k), dtype=torch.int64)
    return _experts_fake(x_TD, ids_TK, ids_TK.to(routing.weights_dtype), *expert_tensors, *numbers)


def route_and_experts(*args: Any) -> Tensor:
    """``perseus::moe`` taken apart: the router as plain differentiable torch ops, then ``perseus::experts``."""
    router_tensors, expert_tensors, routing, numbers = _split_moe(args)
    lower.check_routing(_router_args(*router_tensors), routing, experts_spec(numbers).num_experts)
    weights_TK, ids_TK = route(*router_tensors, **routing.as_kwargs())
    return torch.ops.perseus.experts(args[0], ids_TK, weights_TK, *expert_tensors, *numbers)


def _moe_autograd(keyset: Any, *args: Any) -> Tensor:
    if forward_ad._current_level >= 0:
        _refuse_forward_mode(args)
    if _wants_grad(args, _NUM_MOE_TENSORS):
        return route_and_experts(*args)
    return _below_autograd("moe", _MOE_KERNELS, keyset, args)


# ---- registration


def _other_device(tensor: Tensor, *_: Any, **__: Any) -> Any:
    raise lower.no_kernel(tensor.device)


def _register() -> None:
    for schema in SCHEMAS:
        # Compilers pass tensors with the strides they were traced with: weights are never copied into another layout.
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    fakes: dict[str, Callable[..., Any]] = {
        "experts": _experts_fake,
        "experts_backward": _experts_backward_fake,
        "moe": _moe_fake,
    }
    for device in _KERNEL_KEYS:
        _LIBRARY.impl("experts", _EXPERTS_KERNELS[device], device.upper())
        _LIBRARY.impl("experts_backward", _experts_backward_kernel, device.upper())
        _LIBRARY.impl("moe", _MOE_KERNELS[device], device.upper())
    for name, fake in fakes.items():
        _LIBRARY.impl(name, _other_device, "CompositeExplicitAutograd")
        torch.library.register_fake(f"perseus::{name}", fake, lib=_LIBRARY)
    torch.library.register_autograd("perseus::experts_backward", no_second_derivative("experts"), lib=_LIBRARY)
    _LIBRARY.impl("experts", _experts_autograd, "Autograd", with_keyset=True)
    _LIBRARY.impl("moe", _moe_autograd, "Autograd", with_keyset=True)


_register()
