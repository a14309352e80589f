"""Which road does a ``perseus::experts`` call take on a CUDA device? The fused kernel, or a reason why not.

``why_not`` is the one statement of what the kernel covers; ``cuda_plan`` picks tiles, and the path where both cover.

Axes: T tokens, K choices per token, E experts, D model width, F expert width.
"""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import torch
from torch import Tensor

from perseus_compile import cuda_plan, grouped
from perseus_compile.facts import ExpertsSpec
from perseus_compile.jit import compiler, driver
from perseus_compile.jit.moe_kernel import LaunchRouter, MoeKernel, Prepared
from perseus_compile.jit.spec import TILE_CONFIGS, VariantSpec, spec_for, why_no_variant

_log = logging.getLogger(__name__)
MAX_EXPERTS = 1024  # the sort's counters are in shared memory
MAX_TOP_K = 32  # a lane per choice in the combine
MAX_TOKENS = 131072
MAX_SPAN_ELEMENTS = 2**35  # the gather counts 16-byte chunks in 32 bits


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
    """Why the fused kernel cannot run this call; None: it can. Reads shapes and strides, never values, so
    fake tensors with plain sizes will do."""
    if x_TD.device.type != "cuda":
        return f"the fused kernel needs tensors on a CUDA device, got {x_TD.device}"
    if not _is_hopper(x_TD.device.index):
        return f"the fused kernel needs compute capability 9.0, got {torch.cuda.get_device_capability(x_TD.device)}"
    reason = why_no_variant(spec.gate_layout, spec.activation)
    if reason is not None:
        return reason
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
    if x_TD.shape[0] * x_TD.stride(0) >= MAX_SPAN_ELEMENTS:
        return f"x must span fewer than {MAX_SPAN_ELEMENTS} elements, got strides {x_TD.stride()}"
    for name, tensor in (("x", x_TD), ("gate_up", gate_up), ("down", down)):
        steps = tensor.stride()[:-1]
        if tensor.stride(-1) != 1 or any(step % 8 for step in steps) or grouped.address_of(tensor) % grouped.ROW_BYTES:
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
    """The loaded kernel; None, with a warning, where it cannot be built or loaded (``driver.load_once``).

    Raises:
        LaunchError: it is not loaded and the current stream is being captured.
    """

    def load() -> MoeKernel:
        return MoeKernel(compiler.build(spec), device_index)

    return driver.load_once(_kernels, (spec, device_index), load, "layers that need it run on the plain path")


_Tensors = tuple[Tensor, Tensor, Tensor, Tensor, "Tensor | None", Tensor, "Tensor | None"]  # in schema order


class Plan(NamedTuple):
    """What was found out about a call site: a launch of the fused kernel, or why there is none.

    Good for as long as the expert weights and biases that it was made from stay where they are.
    """

    prepared: Prepared | None  # None, and no reason: there is no row for any expert
    reason: str | None

    def run(self, x_TD: Tensor, ids_TK: Tensor | None, weights_TK: Tensor | None) -> Tensor:
        """The output [T, D], fresh and contiguous; only where there is no ``reason``.

        Ids and weights are None where the launch has a router. The device of the tensors must be the current one.

        Raises:
            PeerTimeout: an earlier launch on this device ran into its deadline.
            LaunchError: the driver refuses the launch.
        """
        if self.prepared is not None:
            return self.prepared.run(x_TD, ids_TK, weights_TK)
        return x_TD.new_zeros(x_TD.shape)


def make_plan(tensors: _Tensors, spec: ExpertsSpec, router: LaunchRouter | None = None) -> Plan:
    """The plan of calls with such tensors, given in schema order. Their device must be the current one.

    With a ``router`` the launch computes ids and weights; those in ``tensors`` say their shape and dtype.

    Raises:
        LaunchError: the first call of a kernel comes inside a graph capture, or the driver refuses a weight.
    """
    x_TD, ids_TK, _, gate_up, gate_up_bias, down, _ = tensors
    if ids_TK.numel() == 0 or gate_up.shape[0] == 0:  # no row for any expert: a launch has nothing to cut into tiles
        return Plan(None, None)
    reason = why_not(*tensors, spec)
    if reason is not None:
        return Plan(None, reason)
    plain_covers = grouped.unsupported_reason(x_TD, gate_up, down, spec) is None
    plan = cuda_plan.plan_of_call(x_TD, ids_TK, gate_up, gate_up_bias, down, spec, plain_covers=plain_covers)
    _log.debug("%s", plan)
    if plan.tiles is None:
        return Plan(None, f"the plain path is {plan.reason}")
    if router is not None and not TILE_CONFIGS[plan.tiles].may_route:
        return Plan(None, f"a launch with tiles for many rows has no router, got {x_TD.shape[0]} tokens")
    variant = spec_for(
        plan.tiles,
        weight_layout=spec.weight_layout,
        gate_layout=spec.gate_layout,
        activation=spec.activation,
        routes=router is not None,
    )
    kernel = kernel_for(variant, x_TD.device.index)
    if kernel is None:
        return Plan(None, f"the kernel for {variant} could not be built or loaded; see the log")
    prepared = kernel.prepare(*tensors, spec, num_column_groups=plan.column_groups, router=router)
    return Plan(prepared, None)


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
    """Plans one call and runs it; None where the fused kernel cannot (``why_not``). The ops keep their plans."""
    plan = make_plan((x_TD, ids_TK, weights_TK, gate_up, gate_up_bias, down, down_bias), spec)
    return plan.run(x_TD, ids_TK, weights_TK) if plan.reason is None else None
