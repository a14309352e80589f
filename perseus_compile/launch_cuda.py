"""How does a ``KernelSpec`` run on CUDA? The fused kernel where it covers the call, grouped GEMMs elsewhere.

Which of the two is a function of shapes, dtypes, strides and addresses, never of values, so nothing waits for the
device; it is decided once per call site and kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import fused_experts, fused_moe, fused_router, grouped, routing
from .errors import UnsupportedMoE
from .facts import ExpertsSpec, KernelSpec, RoutingSpec
from .jit import driver


def _is_current(tensor: Tensor) -> bool:
    """Whether a tensor's device is the current one, as launches and module loading need."""
    return tensor.get_device() == driver.current_device()


class CudaCall(NamedTuple):
    """A call site of the experts, checked and ready to run."""

    plan: fused_experts.Plan
    spec: ExpertsSpec

    def forward(
        self,
        x_TD: Tensor,
        ids_TK: Tensor | None,
        weights_TK: Tensor | None,
        gate_up: Tensor,
        gate_up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
    ) -> Tensor:
        """The output, [T, D], fresh and dense. Ids and weights are None where the launch has a router.

        Raises:
            PeerTimeout: an earlier launch on this device ran into its deadline.
            LaunchError: the driver refuses the launch.
        """
        if not _is_current(x_TD):
            with torch.cuda.device(x_TD.device):
                return self.forward(x_TD, ids_TK, weights_TK, gate_up, gate_up_bias, down, down_bias)
        plan = self.plan
        if plan.reason is None:
            return plan.run(x_TD, ids_TK, weights_TK)
        assert ids_TK is not None and weights_TK is not None, "a plan with a router has no reason"
        return grouped.forward(x_TD, ids_TK, weights_TK, gate_up, gate_up_bias, down, down_bias, self.spec)


class CudaExperts:
    """A spec, ready to be planned. Tensors are checked by the caller; the sizes other than T are those of the spec."""

    def __init__(self, spec: KernelSpec) -> None:
        self.experts = spec.experts

    def plan(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        gate_up: Tensor,
        gate_up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
    ) -> CudaCall:
        """How calls with such tensors run.

        Raises:
            UnsupportedMoE: neither the fused kernel nor the grouped GEMMs cover the call.
            LaunchError: the first call of a kernel comes inside a graph capture, or the driver refuses a weight.
        """
        tensors = (x_TD, ids_TK, weights_TK, gate_up, gate_up_bias, down, down_bias)
        with torch.cuda.device(x_TD.device):
            plan = fused_experts.make_plan(tensors, self.experts)
        if plan.reason is not None:
            self._check_plain(x_TD, gate_up, down)
        return CudaCall(plan, self.experts)

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
        with torch.cuda.device(x_TD.device):
            return grouped.backward(grad_TD, *tensors, self.experts, needs_grad)

    def _check_plain(self, x_TD: Tensor, gate_up: Tensor, down: Tensor) -> None:
        reason = grouped.unsupported_reason(x_TD, gate_up, down, self.experts)
        if reason is not None:
            raise UnsupportedMoE(f"{reason}; use another dtype or widths, or keep the layer's own code")


class CudaRouter(NamedTuple):
    """A call site of the router of ``perseus::moe``, ready to run."""

    spec: RoutingSpec
    route: fused_router.Route | None  # None: torch ops follow the logits
    choose_numbers: dict[str, Any]

    @staticmethod
    def plan(
        spec: RoutingSpec, x_TD: Tensor, weight_ED: Tensor, correction_bias_E: Tensor | None
    ) -> tuple[CudaRouter, Tensor, Tensor]:
        """The router of such tensors, and stand-ins for the weights and ids [T, K] that it will give: no values.

        The device of the tensors must be the current one.

        Raises:
            LaunchError: the first call of a kernel comes inside a graph capture.
        """
        logits_TE = x_TD.new_empty((x_TD.shape[0], weight_ED.shape[0]), dtype=spec.router_dtype)
        numbers = spec.as_kwargs()
        del numbers["router_dtype"]
        router = CudaRouter(spec, fused_router.plan_route(logits_TE, correction_bias_E, spec), numbers)
        if router.route is not None:
            return router, *router.route.empty()
        weights_TK = x_TD.new_empty((x_TD.shape[0], spec.top_k), dtype=spec.weights_dtype)
        return router, weights_TK, weights_TK.new_empty(weights_TK.shape, dtype=torch.int64)

    def run(
        self, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, correction_bias_E: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Weights and ids [T, K]: a GEMM, then one launch where that is covered.

        The device of the tensors must be the current one.

        Raises:
            LaunchError: the driver refuses the launch.
        """
        logits_TE = routing.logits(x_TD, weight_ED, bias_E, self.spec.router_dtype)
        if self.route is not None:
            return self.route.run(logits_TE)
        return routing.choose(logits_TE, correction_bias_E, **self.choose_numbers)


class CudaMoe(NamedTuple):
    """A call site of ``perseus::moe``, checked and ready to run."""

    router: CudaRouter | None  # None: the launch of the experts has it
    experts: CudaCall

    @staticmethod
    def plan(
        routing: RoutingSpec,
        experts: CudaExperts,
        x_TD: Tensor,
        router_weight_ED: Tensor,
        router_bias_E: Tensor | None,
        correction_bias_E: Tensor | None,
        *expert_tensors: Any,
    ) -> CudaMoe:
        """How calls with such tensors run.

        Raises:
            UnsupportedMoE: neither the fused kernel nor the grouped GEMMs cover the experts.
            LaunchError: the first call of a kernel comes inside a graph capture, or the driver refuses a weight.
        """
        router = fused_moe.Router(router_weight_ED, router_bias_E, correction_bias_E, routing)
        with torch.cuda.device(x_TD.device):
            whole = fused_moe.make_plan(router, x_TD, expert_tensors, experts.experts)
            if whole.reason is None:
                return CudaMoe(None, CudaCall(whole, experts.experts))
            apart, weights_TK, ids_TK = CudaRouter.plan(routing, x_TD, router_weight_ED, correction_bias_E)
        return CudaMoe(apart, experts.plan(x_TD, ids_TK, weights_TK, *expert_tensors))

    def forward(
        self,
        x_TD: Tensor,
        router_weight_ED: Tensor,
        router_bias_E: Tensor | None,
        correction_bias_E: Tensor | None,
        *expert_tensors: Any,
    ) -> Tensor:
        """The output of ``perseus::moe``, [T, D], fresh and dense.

        Raises:
            PeerTimeout: an earlier launch on this device ran into its deadline.
            LaunchError: the driver refuses a launch.
        """
        if not _is_current(x_TD):
            with torch.cuda.device(x_TD.device):
                return self.forward(x_TD, router_weight_ED, router_bias_E, correction_bias_E, *expert_tensors)
        if self.router is None:
            return self.experts.plan.run(x_TD, None, None)
        weights_TK, ids_TK = self.router.run(x_TD, router_weight_ED, router_bias_E, correction_bias_E)
        return self.experts.forward(x_TD, ids_TK, weights_TK, *expert_tensors)
