"""Is this call legal, and how will it run? Values in, a frozen ``KernelSpec`` out, or ``UnsupportedMoE``.

Never looks at the token count T nor at the values inside a tensor, so one spec serves every T. The checks work on plain
values and hold for symbolic sizes too: the fake implementations run the very same ones.

Axes: T tokens, K choices per token, E experts (over all ranks), D model width, F expert width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from perseus_compile.errors import UnsupportedMoE
from perseus_compile.facts import (
    Activation,
    ExpertsSpec,
    GateLayout,
    KernelSpec,
    Routing,
    RoutingSpec,
    WeightLayout,
    WeightOn,
)

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ID_DTYPES = (torch.int64, torch.int32)
# Up to so many rows of an expert the few-row loops beat a GEMM: bfloat16 by 2.7x at 2 rows and 1.5x at 16, even at 32;
# float32 by 2.8x at 2 rows and 1.5x at 64, where larger counts may favour the GEMM of other CPUs.
# (D 1024, F 512, 64 experts; EPYC 9005 with AVX-512, torch 2.13.0+cpu, one core, measured 2026-11-30)
FEW_ROWS = {torch.bfloat16: 32, torch.float32: 64}
ACTIVATION_PARAMS: dict[str, tuple[str, ...]] = {
    "silu": (),
    "gelu": (),
    "gelu_tanh": (),
    "relu": (),
    "relu2": (),
    "clamped_swiglu": ("alpha", "limit"),
    "clamped_silu": ("limit",),
    "softcapped_silu": ("gate_cap", "up_cap"),
}
FEW_ROWS_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "clamped_swiglu")  # with a gate; the loops know no others


class Arg(NamedTuple):
    """What the checks see of a tensor argument; x, ids and weights come without their token axis."""

    device: torch.device
    dtype: torch.dtype
    shape: Sequence[int]


class ExpertsArgs(NamedTuple):
    """The tensor arguments of ``perseus::experts`` in schema order; hashable where every size is a plain int."""

    x: Arg
    ids: Arg
    weights: Arg
    gate_up: Arg
    gate_up_bias: Arg | None
    down: Arg
    down_bias: Arg | None


class RouterArgs(NamedTuple):
    """The tensor arguments of the router part of ``perseus::moe`` in schema order."""

    x: Arg
    weight: Arg
    bias: Arg | None
    correction_bias: Arg | None


def token_arg(tensor: Tensor) -> Arg:
    """The facts of a tensor whose first axis is T."""
    return Arg(tensor.device, tensor.dtype, tensor.shape[1:])


def whole_arg(tensor: Tensor) -> Arg:
    """The facts of a weight or a bias."""
    return Arg(tensor.device, tensor.dtype, tensor.shape)


def listed_args(tokens: Sequence[Arg], lists: Sequence[Sequence[Arg]], spec: ExpertsSpec) -> ExpertsArgs:
    """The arguments of ``perseus::experts_list`` as those of ``perseus::experts``: as if the lists were stacked.

    Args:
        tokens: x, ids and weights.
        lists: gate_up, gate_up_bias, down, down_bias. One tensor per expert each; two in the first two where gates and
            up halves are apart; no biases where there are none.

    Raises:
        UnsupportedMoE: the lists cannot be the weights of the same experts.
    """
    gate_up, gate_up_bias, down, down_bias = lists
    num_local = len(down)
    pieces = 2 if num_local and len(gate_up) == 2 * num_local else 1
    if pieces == 2 and spec.gate_layout != "concatenated":
        raise UnsupportedMoE(
            f"gates and up halves that are tensors of their own belong to gate_layout='concatenated', got "
            f"gate_layout='{spec.gate_layout}'; pass one gate_up tensor per expert"
        )
    output_axis = 0 if spec.weight_layout == "out_in" else 1
    x, ids, weights = tokens
    return ExpertsArgs(
        x,
        ids,
        weights,
        _stacked("gate_up", gate_up, pieces * num_local, pieces, output_axis),
        _stacked("gate_up_bias", gate_up_bias, pieces * num_local, pieces, 0) if gate_up_bias else None,
        _stacked("down", down, num_local, 1, output_axis),
        _stacked("down_bias", down_bias, num_local, 1, 0) if down_bias else None,
    )


def _stacked(name: str, tensors: Sequence[Arg], wanted: int, pieces: int, output_axis: int) -> Arg:
    """The facts of the stack of ``tensors``, ``pieces`` of which make one expert's along ``output_axis``."""
    if not tensors or len(tensors) != wanted:
        raise UnsupportedMoE(
            f"{name} must hold one tensor per expert, as down does, or one per gate and one per up half, got "
            f"{len(tensors)} for {wanted // pieces} experts; pass lists of one length"
        )
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor != first:
            raise UnsupportedMoE(
                f"all tensors of {name} must be alike, got {list(first.shape)} {_short(first.dtype)} on {first.device} "
                f"at 0 and {list(tensor.shape)} {_short(tensor.dtype)} on {tensor.device} at {index}; experts of "
                "different shapes need calls of their own"
            )
    if len(first.shape) <= output_axis:
        raise UnsupportedMoE(
            f"{name} must hold matrices, got tensors of {len(first.shape)} axes; pass [2F, D] or [D, F]"
        )
    shape = [size * pieces if axis == output_axis else size for axis, size in enumerate(first.shape)]
    return first._replace(shape=(wanted // pieces, *shape))


def lower(args: ExpertsArgs, spec: ExpertsSpec) -> KernelSpec:
    """How a ``perseus::experts`` call with these arguments runs.

    Raises:
        UnsupportedMoE: an argument or a number is not legal, or no kernel exists for the device.
    """
    check_experts(args, spec)
    if args.x.device.type not in ("cpu", "cuda"):
        raise no_kernel(args.x.device)
    on_cpu = args.x.device.type == "cpu"
    has_few_rows = on_cpu and spec.gate_layout != "none" and spec.activation in FEW_ROWS_ACTIVATIONS
    return KernelSpec(
        device="cpu" if on_cpu else "cuda",
        dtype=args.x.dtype,
        combine_dtype=torch.float64 if args.x.dtype == torch.float64 else torch.float32,
        num_local_experts=args.gate_up.shape[0],
        model_width=args.x.shape[0],
        expert_width=_expert_width(args, spec),
        few_rows=FEW_ROWS.get(args.x.dtype, 0) if has_few_rows else 0,
        experts=spec,
    )


def no_kernel(device: torch.device) -> UnsupportedMoE:
    """The error of a call on a device that perseus has no kernel for."""
    return UnsupportedMoE(
        f"perseus ops run on device types 'cpu' and 'cuda', got '{device.type}'; move the tensors to one of these, "
        "or leave options={'on_unsupported': 'keep'}, which keeps the layer's own code on other devices"
    )


def check_tokens(x_TD: Tensor, **others: Tensor) -> None:
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


def check_experts(args: ExpertsArgs, spec: ExpertsSpec) -> None:
    """The one statement of which ``perseus::experts`` calls are legal."""
    _check_word("weight_layout", spec.weight_layout, get_args(WeightLayout))
    _check_word("gate_layout", spec.gate_layout, get_args(GateLayout))
    _check_word("activation", spec.activation, get_args(Activation))
    _check_word("weight_on", spec.weight_on, get_args(WeightOn))
    wanted = ACTIVATION_PARAMS[spec.activation]
    if len(spec.activation_params) != len(wanted):
        raise UnsupportedMoE(
            f"activation_params of {spec.activation} must be [{', '.join(wanted)}], "
            f"got {list(spec.activation_params)}; pass one number for each name"
        )
    if spec.gate_layout == "none" and wanted:
        raise UnsupportedMoE(
            f"{spec.activation} needs a gate and an up half, got gate_layout='none'; "
            "pass gate_layout='concatenated' or 'interleaved'"
        )
    _check_placement(args)
    _check_axes(args, token_axis=("x", "ids", "weights"))
    _check_expert_dtypes(args)
    _check_expert_shapes(args, spec)


def check_routing(args: RouterArgs, spec: RoutingSpec, num_experts: int) -> None:
    """The one statement of which router arguments of ``perseus::moe`` are legal."""
    _check_word("routing", spec.routing, get_args(Routing))
    _check_placement(args)
    _check_axes(args, token_axis=("x",))
    for name, arg in _present(args):
        _check_dtype(name, arg.dtype, SUPPORTED_DTYPES)
    for name in ("router_dtype", "score_dtype", "weights_dtype"):
        _check_dtype(name, getattr(spec, name), SUPPORTED_DTYPES)
    _check_shape("router_weight", args.weight.shape, (num_experts, args.x.shape[0]), "[num_experts, D]")
    for name, bias in (("router_bias", args.bias), ("correction_bias", args.correction_bias)):
        if bias is not None:
            _check_shape(name, bias.shape, (num_experts,), "[num_experts]")
    if not 1 <= spec.top_k <= num_experts:
        raise UnsupportedMoE(
            f"top_k must lie in 1..num_experts={num_experts}, got top_k={spec.top_k}; "
            "choose at most as many experts as there are"
        )
    _check_router_groups(spec, num_experts)
    if args.correction_bias is not None and spec.routing != "sigmoid_topk":
        raise UnsupportedMoE(
            f"a correction bias belongs to routing='sigmoid_topk', got routing='{spec.routing}'; "
            "pass None for correction_bias"
        )


def _check_router_groups(spec: RoutingSpec, num_experts: int) -> None:
    if spec.num_groups == 1 and spec.topk_groups == 1:
        return
    if spec.routing != "sigmoid_topk":
        raise UnsupportedMoE(
            f"expert groups belong to routing='sigmoid_topk', got num_groups={spec.num_groups} "
            f"with routing='{spec.routing}'; pass num_groups=1 and topk_groups=1"
        )
    if spec.num_groups < 1 or num_experts % spec.num_groups or num_experts // spec.num_groups < 2:
        raise UnsupportedMoE(
            f"num_groups must divide num_experts={num_experts} into groups of at least 2 experts, "
            f"got num_groups={spec.num_groups}; pass num_groups=1 for a router without groups"
        )
    group_size = num_experts // spec.num_groups
    if not 1 <= spec.topk_groups <= spec.num_groups or spec.topk_groups * group_size < spec.top_k:
        raise UnsupportedMoE(
            f"topk_groups must lie in 1..num_groups={spec.num_groups} and leave at least top_k={spec.top_k} experts "
            f"in groups of {group_size}, got topk_groups={spec.topk_groups}; choose from more groups"
        )


def _check_word(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UnsupportedMoE(f"{name} must be one of {', '.join(allowed)}; got '{value}'; pass one of these words")


def _present(args: ExpertsArgs | RouterArgs) -> list[tuple[str, Arg]]:
    prefix = {"weight": "router_weight", "bias": "router_bias"} if isinstance(args, RouterArgs) else {}
    return [(prefix.get(name, name), arg) for name, arg in zip(args._fields, args, strict=True) if arg is not None]


def _check_placement(args: ExpertsArgs | RouterArgs) -> None:
    for name, arg in _present(args):
        if arg.device != args.x.device:
            raise UnsupportedMoE(
                f"all tensors must be on the device of x, {args.x.device}, got {name} on {arg.device}; "
                f"move {name} with .to('{args.x.device}')"
            )
    if args.x.device.type == "meta":
        raise UnsupportedMoE(
            "perseus ops need tensors with values, got device 'meta'; "
            "materialise the model with .to_empty(device='cpu'), or trace under FakeTensorMode"
        )


def _check_axes(args: ExpertsArgs | RouterArgs, token_axis: tuple[str, ...]) -> None:
    wanted = {"gate_up": 3, "down": 3, "correction_bias": 1, "router_bias": 1}
    for name, arg in _present(args):
        num_axes = len(arg.shape) + (name in token_axis)
        if num_axes != wanted.get(name, 2):
            raise UnsupportedMoE(
                f"{name} must have {wanted.get(name, 2)} axes, got {num_axes}; "
                "the shapes are x [T, D], ids and weights [T, K], gate_up and down [E, ., .], biases [E, .]"
            )


def _check_dtype(name: str, dtype: torch.dtype, allowed: tuple[torch.dtype, ...]) -> None:
    if dtype not in allowed:
        names = ", ".join(_short(one) for one in allowed)
        raise UnsupportedMoE(f"{name} must be one of {names}; got {_short(dtype)}; cast it with .to() first")


def _check_expert_dtypes(args: ExpertsArgs) -> None:
    _check_dtype("x", args.x.dtype, SUPPORTED_DTYPES)
    _check_dtype("ids", args.ids.dtype, ID_DTYPES)
    _check_dtype("weights", args.weights.dtype, SUPPORTED_DTYPES)
    for name, arg in _present(args)[3:]:
        if arg.dtype != args.x.dtype:
            raise UnsupportedMoE(
                f"{name} must have the dtype of x, {_short(args.x.dtype)}, got {_short(arg.dtype)}; "
                f"cast x to {_short(arg.dtype)}, or the model to {_short(args.x.dtype)}"
            )


def _expert_width(args: ExpertsArgs, spec: ExpertsSpec) -> int:
    return args.down.shape[2] if spec.weight_layout == "out_in" else args.down.shape[1]


def _check_expert_shapes(args: ExpertsArgs, spec: ExpertsSpec) -> None:
    num_local, width, inner = args.gate_up.shape[0], args.x.shape[0], _expert_width(args, spec)
    hidden, name = (inner, "F") if spec.gate_layout == "none" else (2 * inner, "2F")
    if spec.weight_layout == "out_in":
        _check_shape("gate_up", args.gate_up.shape, (num_local, hidden, width), f"[E, {name}, D] (out_in)")
        _check_shape("down", args.down.shape, (num_local, width, inner), "[E, D, F] (out_in)")
    else:
        _check_shape("gate_up", args.gate_up.shape, (num_local, width, hidden), f"[E, D, {name}] (in_out)")
        _check_shape("down", args.down.shape, (num_local, inner, width), "[E, F, D] (in_out)")
    if args.gate_up_bias is not None:
        _check_shape("gate_up_bias", args.gate_up_bias.shape, (num_local, hidden), f"[E, {name}]")
    if args.down_bias is not None:
        _check_shape("down_bias", args.down_bias.shape, (num_local, width), "[E, D]")
    num_choices = args.ids.shape[0]
    _check_shape("weights", args.weights.shape, (num_choices,), "[T, K], as ids,")
    if num_choices > spec.num_experts:
        raise UnsupportedMoE(
            f"a token can choose at most num_experts={spec.num_experts} experts, got K={num_choices} columns in ids; "
            "pass ids and weights as [T, K]"
        )
    if not 0 <= spec.expert_offset <= spec.num_experts - num_local:
        raise UnsupportedMoE(
            f"the local experts must lie in 0..num_experts={spec.num_experts}, got expert_offset={spec.expert_offset} "
            f"with {num_local} local experts; pass the id of the first local expert and the count over all ranks"
        )


def _check_shape(name: str, shape: Sequence[int], wanted: tuple[int, ...], meaning: str) -> None:
    if tuple(shape) != wanted:
        raise UnsupportedMoE(
            f"{name} must be {meaning} = {list(wanted)}, got {list(shape)}; check weight_layout and the other shapes"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
