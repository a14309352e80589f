"""How does a ``KernelSpec`` run on CUDA? The fused kernel where it covers the call, grouped GEMMs elsewhere.

Which of the two is a function of shapes, dtypes and strides, never of values, so nothing waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import fused_experts, fused_router, grouped
from .errors import UnsupportedMoE
from .facts import KernelSpec, RoutingSpec
from .routing import route


class CudaExperts:
    """A spec, ready to run. Tensors are checked by the caller; the sizes other than T are those of the spec."""

    def __init__(self, spec: KernelSpec) -> None:
        self.experts = spec.experts

    def forward(self, *tensors: Any) -> Tensor:
        """The output of ``perseus::experts``, [T, D], fresh and dense; the tensors are those of the schema.

        Raises:
            UnsupportedMoE: neither the fused kernel nor the grouped GEMMs cover the call.
            PeerTimeout: an earlier launch on this device ran into its deadline.
            LaunchError: the driver refuses the launch.
        """
        fused = fused_experts.run_experts(*tensors, spec=self.experts)
        if fused is not None:
            return fused
        self._check_plain(tensors)
        return grouped.forward(*tensors, spec=self.experts)

    def backward(self, needs_grad: list[bool], grad_TD: Tensor, *tensors: Any) -> list[Tensor]:
        """Gradients of those of x, weights, gate_up, gate_up_bias, down, down_bias that are asked for, in that order.

        Raises:
            UnsupportedMoE: the grouped GEMMs do not cover the call.
        """
        self._check_plain(tensors)
        return grouped.backward(grad_TD, *tensors, spec=self.experts, needs_grad=needs_grad)

    def _check_plain(self, tensors: tuple[Any, ...]) -> None:
        x_TD, _, _, gate_up, _, down, _ = tensors
        reason = grouped.unsupported_reason(x_TD, gate_up, down, self.experts)
        if reason is not None:
            raise UnsupportedMoE(f"{reason}; use another dtype or widths, or keep the layer's own code")


def run_router(
    spec: RoutingSpec, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, correction_bias_E: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Weights and ids [T, K] of the router of ``perseus::moe``: one launch after the logits where that is covered."""
    dtype = spec.router_dtype
    logits_TE = torch.nn.functional.linear(x_TD.to(dtype), weight_ED.to(dtype), bias_E)
    routed = fused_router.route_logits(logits_TE, correction_bias_E, spec)
    if routed is not None:
        return routed
    return route(x_TD, weight_ED, bias_E, correction_bias_E, **spec.as_kwargs())
