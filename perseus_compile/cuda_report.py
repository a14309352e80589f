"""How will a rewritten layer run on a GPU? Rows for ``explain``, from fake tensors; launches nothing.

Axes: T tokens, K choices per token, D model width.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import Node

from perseus_compile import cuda_plan, fused_experts, fused_moe, grouped
from perseus_compile.cuda_cost import PLAIN, CallShape, predicted_ms
from perseus_compile.facts import MoEMatch, RouterMatch
from perseus_compile.jit import abi
from perseus_compile.jit.spec import TILE_CONFIGS

TOKENS = (1, 16, 128, 1024, 8192)  # a bucket each


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketReport:
    """How a layer runs for one token bucket."""

    num_tokens: int  # routed rows, where the layer's experts are called on those
    path: Literal["fused", "plain"]
    kernel: str | None  # None on the plain path
    column_groups: int
    predicted_ms: float  # of the experts, without the router; the measured median where ``source`` is "tuned"
    source: Literal["model", "tuned"]
    workspace_bytes: int | None  # of the one allocation beside the output; None on the plain path, which makes many
    workspace_bound_bytes: int | None  # what that allocation never exceeds
    reason: str  # why this path and these tiles
    router: str  # where it runs, and why not in the launch of the experts


def describe(match: MoEMatch) -> tuple[BucketReport, ...]:
    """A row per token bucket; none where the layer is not on a GPU, or has a tensor of weights for each expert.

    The layer must be one that ``plan`` rewrites.
    """
    x = _value(match.x_TD)
    if x.device.type != "cuda" or not isinstance(match.gate_up, Node):
        return ()
    return tuple(_row(match, x, num_tokens) for num_tokens in TOKENS)


def _row(match: MoEMatch, x: Tensor, num_tokens: int) -> BucketReport:
    gate_up, down = _value(match.gate_up), _value(match.down)
    gate_up_bias = None if match.gate_up_bias is None else _value(match.gate_up_bias)
    down_bias = None if match.down_bias is None else _value(match.down_bias)
    # Without routing weights the layer's tokens are rows of one choice.
    top_k = 1 if match.weights_TK is None else _value(match.ids_TK).shape[1]
    weights_dtype = x.dtype if match.weights_TK is None else _value(match.weights_TK).dtype
    mode = detect_fake_mode(x)
    assert mode is not None, "the values of a graph are fake tensors"
    with mode:  # as the layer's own, but dense and with so many tokens
        x_TD = torch.empty(num_tokens, x.shape[1], dtype=x.dtype, device=x.device)
        ids_TK = torch.empty(num_tokens, top_k, dtype=_value(match.ids_TK).dtype, device=x.device)
        weights_TK = torch.empty(num_tokens, top_k, dtype=weights_dtype, device=x.device)
        router = _router(match.router, x_TD)
    shape = cuda_plan.call_shape(x_TD, ids_TK, gate_up, gate_up_bias, down, match.spec)
    reason = fused_experts.why_not(x_TD, ids_TK, weights_TK, gate_up, gate_up_bias, down, down_bias, match.spec)
    if reason is not None:
        return BucketReport(
            num_tokens=num_tokens,
            path="plain",
            kernel=None,
            column_groups=1,
            predicted_ms=predicted_ms(PLAIN, shape, cuda_plan.gpu_numbers(x.device.index)),
            source="model",
            workspace_bytes=None,
            workspace_bound_bytes=None,
            reason=reason,
            router=router or "apart: the plain path has none",
        )
    plain_covers = grouped.unsupported_reason(x_TD, gate_up, down, match.spec) is None
    plan = cuda_plan.plan_for(shape, x.device.index, plain_covers=plain_covers)
    return _report_of_plan(shape, plan, router)


def _router(match: RouterMatch | None, x_TD: Tensor) -> str | None:
    """None: in the launch of the experts, if the path and the tiles allow."""
    if match is None:
        return "the model's own code"
    bias, correction_bias = (None if one is None else _value(one) for one in (match.bias_E, match.correction_bias_E))
    reason = fused_moe.why_apart(fused_moe.Router(_value(match.weight_ED), bias, correction_bias, match.spec), x_TD)
    return None if reason is None else f"apart: {reason}"


def _report_of_plan(shape: CallShape, plan: cuda_plan.CudaPlan, router: str | None) -> BucketReport:
    workspace = bound = kernel = None
    if plan.tiles is None:
        router = router or "apart: the plain path has none"
    else:
        tiles = TILE_CONFIGS[plan.tiles]
        if router is None and not tiles.may_route:
            router = "apart: a launch with tiles for many rows has none"
        sizes = {
            "num_tokens": shape.num_tokens,
            "top_k": shape.top_k,
            "model_width": shape.model_width,
            "expert_width": shape.expert_width,
        }
        workspace = abi.workspace_layout(
            **sizes,
            num_local_experts=shape.num_local_experts,
            max_tokens_per_tile=tiles.max_tokens,
            num_router_experts=shape.num_experts if router is None else 0,
        ).total_bytes
        bound = abi.workspace_bound_bytes(**sizes)
        kernel = f"perseus_moe_fwd {plan.tiles} {shape.weight_layout} {shape.activation}"
    return BucketReport(
        num_tokens=shape.num_tokens,
        path=plan.path,
        kernel=kernel,
        column_groups=plan.column_groups,
        predicted_ms=plan.predicted_ms,
        source=plan.source,
        workspace_bytes=workspace,
        workspace_bound_bytes=bound,
        reason=plan.reason,
        router=router or "in the launch",
    )


def _value(node: Node) -> Tensor:
    value = node.meta["example_value"]
    assert isinstance(value, Tensor), "a match names tensors"
    return value
