"""How will the experts of a rewritten layer run on a GPU? Rows for ``explain``, from fake tensors; launches nothing.

Axes: T tokens, K choices per token, D model width.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import Node

from perseus_compile import cuda_plan, fused_experts, grouped
from perseus_compile.cuda_cost import PLAIN, CallShape, predicted_ms
from perseus_compile.facts import MoEMatch
from perseus_compile.jit import abi
from perseus_compile.jit.spec import TILE_CONFIGS

TOKENS = (1, 16, 128, 1024, 8192)  # a bucket each


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketReport:
    """How the experts of a layer run for one token bucket."""

    num_tokens: int
    path: Literal["fused", "plain"]
    kernel: str | None  # None on the plain path
    column_groups: int
    predicted_ms: float  # of the experts, without the router; the measured median where ``source`` is "tuned"
    source: Literal["model", "tuned"]
    workspace_bytes: int | None  # of the one allocation beside the output; None on the plain path, which makes many
    workspace_bound_bytes: int | None  # what that allocation never exceeds
    reason: str  # why this path and these tiles


def describe(match: MoEMatch) -> tuple[BucketReport, ...]:
    """A row per token bucket; none where the layer is not on a GPU. The layer must be one that ``plan`` rewrites."""
    x = _value(match.x_TD)
    if x.device.type != "cuda":
        return ()
    return tuple(_row(match, x, num_tokens) for num_tokens in TOKENS)


def _row(match: MoEMatch, x: Tensor, num_tokens: int) -> BucketReport:
    gate_up, down = _value(match.gate_up), _value(match.down)
    gate_up_bias = None if match.gate_up_bias is None else _value(match.gate_up_bias)
    down_bias = None if match.down_bias is None else _value(match.down_bias)
    top_k = _value(match.ids_TK).shape[1]
    mode = detect_fake_mode(x)
    assert mode is not None, "the values of a graph are fake tensors"
    with mode:  # as the layer's own, but dense and with so many tokens
        x_TD = torch.empty(num_tokens, x.shape[1], dtype=x.dtype, device=x.device)
        ids_TK = torch.empty(num_tokens, top_k, dtype=_value(match.ids_TK).dtype, device=x.device)
        weights_TK = torch.empty(num_tokens, top_k, dtype=_value(match.weights_TK).dtype, device=x.device)
    shape = cuda_plan.call_shape(x_TD, ids_TK, gate_up, gate_up_bias, down, match.spec)
    reason = fused_experts.why_not(x_TD, ids_TK, weights_TK, gate_up, gate_up_bias, down, down_bias, match.spec)
    if reason is not None:
        milliseconds = predicted_ms(PLAIN, shape, cuda_plan.gpu_numbers(x.device.index))
        return _report(shape, None, 1, milliseconds, "model", reason)
    plain_covers = grouped.unsupported_reason(x_TD, gate_up, down, match.spec) is None
    plan = cuda_plan.plan_for(shape, x.device.index, plain_covers=plain_covers)
    return _report(shape, plan.tiles, plan.column_groups, plan.predicted_ms, plan.source, plan.reason)


def _report(
    shape: CallShape,
    tiles: str | None,
    column_groups: int,
    milliseconds: float,
    source: Literal["model", "tuned"],
    reason: str,
) -> BucketReport:
    workspace = bound = None
    sizes = {
        "num_tokens": shape.num_tokens,
        "top_k": shape.top_k,
        "model_width": shape.model_width,
        "expert_width": shape.expert_width,
    }
    if tiles is not None:
        max_tokens = TILE_CONFIGS[tiles].max_tokens
        layout = abi.workspace_layout(
            **sizes, num_local_experts=shape.num_local_experts, max_tokens_per_tile=max_tokens
        )
        workspace, bound = layout.total_bytes, abi.workspace_bound_bytes(**sizes)
    return BucketReport(
        num_tokens=shape.num_tokens,
        path="plain" if tiles is None else "fused",
        kernel=None if tiles is None else f"perseus_moe_fwd {tiles} {shape.weight_layout} {shape.activation}",
        column_groups=column_groups,
        predicted_ms=milliseconds,
        source=source,
        workspace_bytes=workspace,
        workspace_bound_bytes=bound,
        reason=reason,
    )


def _value(node: Node) -> Tensor:
    value = node.meta["example_value"]
    assert isinstance(value, Tensor), "a match names tensors"
    return value
