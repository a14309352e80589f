"""How does a ``KernelSpec`` run on CUDA? The fused kernel where it covers the call, grouped GEMMs elsewhere.

Which of the two is a function of shapes, dtypes and strides, never of values, so nothing waits for the device.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from . import fused_experts, fused_router, grouped, routing
from .errors import UnsupportedMoE
from .facts import KernelSpec, RoutingSpec


def _device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Makes the device of a tensor the current one, as launches and module loading need; free where it is already."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


class CudaExperts:
    """A spec, ready to run. Tensors are checked by the caller; the sizes other than T are those of the spec."""

    def __init__(self, spec: KernelSpec) -> None:
        self.experts = spec.experts

    def forward(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        gate_up: Tensor,
        gate_up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
    ) -> Tensor:
        """The output of ``perseus::experts``, [T, D], fresh and dense.

        Raises:
            UnsupportedMoE: neither the fused kernel nor the grouped GEMMs cover the call.
            PeerTimeout: an earlier launch on this device ran into its deadline.
            LaunchError: the driver refuses the launch, or the first call of a kernel comes inside a graph capture.
        """
        tensors = (x_TD, ids_TK, weights_TK, gate_up, gate_up_bias, down, down_bias)
        with _device_of(x_TD):
            fused = fused_experts.run_experts(*tensors, self.experts)
            if fused is not None:
                return fused
            self._check_plain(x_TD, gate_up, down)
            return grouped.forward(*tensors, self.experts)

    def backward(
        self,
        needs_grad: list[bool],
        grad_TD: Tensor,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        gate_up: Tensor,
        gate_up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
    ) -> list[Tensor]:
        """Gradients of those of x, weights, gate_up, gate_up_bias, down, down_bias that are asked for, in that order.

        Raises:
            UnsupportedMoE: the grouped GEMMs do not cover the call.
        """
        self._check_plain(x_TD, gate_up, down)
        tensors = (x_TD, ids_TK, weights_TK, gate_up, gate_up_bias, down, down_bias)
        with _device_of(x_TD):
            return grouped.backward(grad_TD, *tensors, self.experts, needs_grad)

    def _check_plain(self, x_TD: Tensor, gate_up: Tensor, down: Tensor) -> None:
        reason = grouped.unsupported_reason(x_TD, gate_up, down, self.experts)
        if reason is not None:
            raise UnsupportedMoE(f"{reason}; use another dtype or widths, or keep the layer's own code")


def run_router(
    spec: RoutingSpec, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, correction_bias_E: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Weights and ids [T, K] of the router of ``perseus::moe``: one launch after the logits where that is covered.

    Raises:
        LaunchError: the driver refuses the launch, or the first call of a kernel comes inside a graph capture.
    """
    with _device_of(x_TD):
        logits_TE = routing.logits(x_TD, weight_ED, bias_E, spec.router_dtype)
        routed = fused_router.route_logits(logits_TE, correction_bias_E, spec)
        if routed is not None:
            return routed
        numbers = spec.as_kwargs()
        del numbers["router_dtype"]
        return routing.choose(logits_TE, correction_bias_E, **numbers)
