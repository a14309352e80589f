"""Which road does a ``perseus::experts`` call take on a CUDA device? The fused kernel, or a reason why not.

``why_not`` is the one statement of what the kernel covers; ``choose_tiles`` picks the tile shape from numbers alone.

Axes: T tokens, K choices per token, E experts, D model width, F expert width.
"""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import torch
from torch import Tensor

from perseus_compile.errors import BuildError, LaunchError
from perseus_compile.facts import ExpertsSpec
from perseus_compile.jit import compiler, driver
from perseus_compile.jit.moe_kernel import MoeKernel, Prepared
from perseus_compile.jit.spec import ACTIVATIONS, VariantSpec, spec_for

_log = logging.getLogger(__name__)
MAX_EXPERTS = 1024  # the sort's counters are in shared memory
MAX_TOP_K = 32  # a lane per choice in the combine
MAX_TOKENS = 131072
_ALIGN_BYTES = 16
_MAX_PLANS = 4096
_MAX_X_ELEMENTS = 2**35  # the gather counts 16-byte chunks in 32 bits


def choose_tiles(num_tokens: int, top_k: int, num_experts: int) -> str:
    """Name of the tile configuration (jit/spec.py) for a call, from the mean number of rows per expert.

    The limits are where the measured times of neighbours cross (H200, BF16, uniform routing, five model shapes,
    T = 1 .. 8192, docs/measured.md). A tile that is too small reads weights twice; one that is too large leaves
    fewer stages for the stream.
    """
    assert num_experts > 0
    rows_per_expert = num_tokens * top_k / num_experts
    for limit, name in ((1, "few8"), (8, "few16"), (16, "few32"), (32, "few64")):
        if rows_per_expert <= limit:
            return name
    return "many128"


def why_not(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    spec: ExpertsSpec,
) -> str | None:
    """Why the fused kernel cannot run this call; None: it can. Reads shapes and strides, never values."""
    if x_TD.device.type != "cuda":
        return f"the fused kernel needs tensors on a CUDA device, got {x_TD.device}"
    if not _is_hopper(x_TD.device.index):
        return f"the fused kernel needs compute capability 9.0, got {torch.cuda.get_device_capability(x_TD.device)}"
    if spec.gate_layout == "none" or spec.activation not in ACTIVATIONS:
        return (
            f"the fused kernel computes {', '.join(ACTIVATIONS)} with a gate, got {spec.activation} with gate_layout "
            f"'{spec.gate_layout}'"
        )
    named = {"x": x_TD, "gate_up": gate_up, "down": down, "gate_up_bias": gate_up_bias, "down_bias": down_bias}
    for name, tensor in named.items():
        if tensor is not None and tensor.dtype != torch.bfloat16:
            return f"the fused kernel needs bfloat16, got {name} of {tensor.dtype}"
    if weights_TK.dtype not in (torch.float32, torch.bfloat16) or ids_TK.dtype not in (torch.int64, torch.int32):
        return f"weights must be float32 or bfloat16 and ids int64 or int32, got {weights_TK.dtype} and {ids_TK.dtype}"
    model_width, expert_width = x_TD.shape[1], down.shape[2 if spec.weight_layout == "out_in" else 1]
    if model_width % 8 or expert_width % 8 or not model_width or not expert_width:
        return f"widths must be multiples of 8, got model width {model_width} and expert width {expert_width}"
    if gate_up.shape[0] > MAX_EXPERTS or ids_TK.shape[1] > MAX_TOP_K or x_TD.shape[0] > MAX_TOKENS:
        return (
            f"at most {MAX_EXPERTS} experts, {MAX_TOP_K} choices and {MAX_TOKENS} tokens, got {gate_up.shape[0]}, "
            f"{ids_TK.shape[1]} and {x_TD.shape[0]}"
        )
    if x_TD.shape[0] * x_TD.stride(0) >= _MAX_X_ELEMENTS:
        return f"x must span fewer than {_MAX_X_ELEMENTS} elements, got strides {x_TD.stride()}"
    for name, tensor in (("x", x_TD), ("gate_up", gate_up), ("down", down)):
        steps = tensor.stride()[:-1]
        if tensor.stride(-1) != 1 or any(step % 8 for step in steps) or tensor.data_ptr() % _ALIGN_BYTES:
            return f"{name} needs a contiguous last axis and rows on 16-byte boundaries, got strides {tensor.stride()}"
    for name, small in (
        ("ids", ids_TK),
        ("weights", weights_TK),
        ("gate_up_bias", gate_up_bias),
        ("down_bias", down_bias),
    ):
        if small is not None and not small.is_contiguous():
            return f"{name} must be contiguous, got strides {small.stride()}"
    return None


@functools.cache
def _is_hopper(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index) == (9, 0)


_kernels: dict[tuple[VariantSpec, int], MoeKernel | None] = {}


def kernel_for(spec: VariantSpec, device_index: int) -> MoeKernel | None:
    """The loaded kernel; None, with one warning, where it cannot be built or loaded.

    Raises:
        LaunchError: it is not loaded and the current stream is being captured.
    """
    key = (spec, device_index)
    if key not in _kernels:
        driver.refuse_in_capture()
        _kernels[key] = _load(spec, device_index)
    return _kernels[key]


def _load(spec: VariantSpec, device_index: int) -> MoeKernel | None:
    try:
        return MoeKernel(compiler.build(spec), device_index)
    except (BuildError, LaunchError) as error:
        _log.warning("%s; this layer runs on the plain path", error)
        return None


class _Plan(NamedTuple):
    """What was found out about a call site: a kernel and its parameters, or why there is none."""

    kernel: MoeKernel | None
    prepared: Prepared | None
    reason: str | None


_plans: dict[tuple[object, ...], _Plan] = {}


_Tensors = tuple[Tensor, Tensor, Tensor, Tensor, "Tensor | None", Tensor, "Tensor | None"]  # in schema order


def _make_plan(tensors: _Tensors, spec: ExpertsSpec) -> _Plan:
    reason = why_not(*tensors, spec)
    if reason is not None:
        return _Plan(None, None, reason)
    x_TD, ids_TK, gate_up = tensors[0], tensors[1], tensors[3]
    tiles = choose_tiles(x_TD.shape[0], ids_TK.shape[1], gate_up.shape[0])
    variant = spec_for(
        tiles, weight_layout=spec.weight_layout, gate_layout=spec.gate_layout, activation=spec.activation
    )
    kernel = kernel_for(variant, x_TD.device.index)
    if kernel is None:
        return _Plan(None, None, f"the kernel for {variant} could not be built or loaded; see the log")
    return _Plan(kernel, kernel.prepare(*tensors, spec), None)


def run_experts(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    spec: ExpertsSpec,
) -> Tensor | None:
    """The output [T, D], fresh and contiguous; None where the fused kernel cannot run the call (``why_not``).

    The device of the tensors must be the current one.

    Raises:
        PeerTimeout: an earlier launch on this device ran into its deadline.
        LaunchError: the driver refuses the launch, or the first call of a kernel comes inside a graph capture.
    """
    if ids_TK.numel() == 0 or gate_up.shape[0] == 0:  # no row for any expert: a launch has nothing to cut into tiles
        return x_TD.new_zeros(x_TD.shape)
    key = (
        *(x_TD.shape, x_TD.stride(), x_TD.dtype, x_TD.device, x_TD.data_ptr() % _ALIGN_BYTES),
        *(ids_TK.shape, ids_TK.stride(), ids_TK.dtype, weights_TK.stride(), weights_TK.dtype),
        *(
            gate_up.data_ptr(),
            gate_up.shape,
            gate_up.stride(),
            gate_up.dtype,
            down.data_ptr(),
            down.stride(),
            down.dtype,
        ),
        None if gate_up_bias is None else (gate_up_bias.data_ptr(), gate_up_bias.stride(), gate_up_bias.dtype),
        None if down_bias is None else (down_bias.data_ptr(), down_bias.stride(), down_bias.dtype),
        spec,
    )
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) == _MAX_PLANS:
            _plans.clear()
        plan = _make_plan((x_TD, ids_TK, weights_TK, gate_up, gate_up_bias, down, down_bias), spec)
        _plans[key] = plan
    if plan.kernel is None or plan.prepared is None:
        return None
    return plan.kernel.run(plan.prepared, x_TD, ids_TK, weights_TK)
