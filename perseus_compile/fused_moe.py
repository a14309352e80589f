"""Which calls of ``perseus::moe`` are one launch? Those whose router the fused kernel computes before its experts.

``why_not`` is the one statement of which routers the kernel covers; ``router_in_launch`` says where it pays. Both read
numbers, shapes and strides, never values.

Axes: T tokens, K choices per token, E experts, D model width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from perseus_compile import fused_experts, fused_router, grouped
from perseus_compile.facts import ExpertsSpec, RoutingSpec
from perseus_compile.jit.moe_kernel import LaunchRouter


class Router(NamedTuple):
    """What ``perseus::moe`` gets for its router, in schema order."""

    weight_ED: Tensor
    bias_E: Tensor | None
    correction_bias_E: Tensor | None
    spec: RoutingSpec


def router_in_launch(num_tokens: int, num_experts: int, model_width: int) -> bool:
    """Whether a router that is covered belongs into the launch of the experts, rather than in two of its own.

    Up to 8 tokens every CTA chooses for itself: 0 to 2 % faster on the GPU, and a call costs the host half. For more it
    lost, and so it did where a row is so long that reading it takes several rounds (H200, docs/measured.md, step 8).
    """
    return num_tokens <= 8 and num_experts <= 256 and model_width <= 4096


def why_not(router: Router, x_TD: Tensor) -> str | None:
    """Why the fused kernel cannot compute this router; None: it can. What x must be is in ``fused_experts.why_not``."""
    weight_ED, bias_E, correction_bias_E, spec = router
    dtypes = {"router_dtype": spec.router_dtype, "x": x_TD.dtype, "router_weight": weight_ED.dtype}
    if bias_E is not None:
        dtypes["router_bias"] = bias_E.dtype
    for name, dtype in dtypes.items():
        if dtype != torch.bfloat16:
            return f"a router in the launch needs bfloat16, got {name} of {dtype}"
    steps = weight_ED.stride()
    if steps[1] != 1 or steps[0] % 8 or grouped.address_of(weight_ED) % grouped.ROW_BYTES:
        return f"router_weight needs a contiguous last axis and rows on 16-byte boundaries, got strides {steps}"
    if weight_ED.shape[0] * steps[0] >= fused_experts.MAX_SPAN_ELEMENTS:
        return f"router_weight must span fewer than {fused_experts.MAX_SPAN_ELEMENTS} elements, got strides {steps}"
    if bias_E is not None and not bias_E.is_contiguous():
        return f"router_bias must be contiguous, got strides {bias_E.stride()}"
    logits_TE = x_TD.new_empty((x_TD.shape[0], weight_ED.shape[0]))
    return fused_router.why_not(logits_TE, correction_bias_E, spec)


def why_apart(router: Router, x_TD: Tensor) -> str | None:
    """Why a router has launches of its own before that of the experts; None: it has not, if the tiles allow."""
    (num_tokens, model_width), num_experts = x_TD.shape, router.weight_ED.shape[0]
    if not router_in_launch(num_tokens, num_experts, model_width):
        return f"launches of its own are faster for a router of {num_tokens} tokens and {num_experts} experts"
    return why_not(router, x_TD)


def make_plan(router: Router, x_TD: Tensor, expert_tensors: tuple[Any, ...], spec: ExpertsSpec) -> fused_experts.Plan:
    """The plan of calls with such tensors as one launch; its ``reason`` says why they are not.

    ``expert_tensors`` are gate_up and what follows it in the schema. The device of the tensors must be the current one.

    Raises:
        LaunchError: the first call of a kernel comes inside a graph capture, or the driver refuses a weight.
    """
    reason = why_apart(router, x_TD)
    if reason is not None:
        return fused_experts.Plan(None, reason)
    num_tokens, num_experts = x_TD.shape[0], router.weight_ED.shape[0]
    params = fused_router.route_params(router.spec, num_tokens, num_experts, torch.bfloat16, router.correction_bias_E)
    weights_TK = torch.empty((num_tokens, router.spec.top_k), dtype=torch.float32, device="meta")
    tensors = (x_TD, weights_TK.to(torch.int32), weights_TK, *expert_tensors)
    return fused_experts.make_plan(tensors, spec, LaunchRouter(router.weight_ED, router.bias_E, params))


def run_moe(router: Router, x_TD: Tensor, expert_tensors: tuple[Any, ...], spec: ExpertsSpec) -> Tensor | None:
    """Plans one call and runs it; None where it is not one launch (``why_not``). The ops keep their plans."""
    return make_plan(router, x_TD, expert_tensors, spec).run(x_TD, None, None)
