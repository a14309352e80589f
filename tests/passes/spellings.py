"""MoE layers for the tests of the matcher: each step is a method, so that a test can replace one and leave the rest.

Axes: T tokens, K choices per token, E experts, D model width, F expert width, R routed rows (T*K).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (registers the grouped GEMM for float32)
from torch import Tensor, nn


class Experts(nn.Module):
    """The steps that the spellings share. Weights are [E, 2F, D] and [E, D, F], or the transposed with ``in_out``."""

    def __init__(
        self,
        *,
        num_experts: int = 4,
        top_k: int = 2,
        width: int = 8,
        expert_width: int = 12,
        layout: Literal["out_in", "in_out"] = "out_in",
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.width, self.layout = num_experts, top_k, width, layout
        self.router = nn.Parameter(torch.randn(num_experts, width))
        self.gate_up = nn.Parameter(self._stack(2 * expert_width, width))
        self.down = nn.Parameter(self._stack(width, expert_width))
        self.gate_up_bias = nn.Parameter(torch.randn(num_experts, 2 * expert_width)) if bias else None
        self.down_bias = nn.Parameter(torch.randn(num_experts, width)) if bias else None
        self.prepare()

    def _stack(self, num_out: int, num_in: int) -> Tensor:
        shape = (num_out, num_in) if self.layout == "out_in" else (num_in, num_out)
        return torch.randn(self.num_experts, *shape) * num_in**-0.5

    def prepare(self) -> None:
        """Adds what a changed step needs (a second weight, a number)."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.softmax(F.linear(x, self.router), dim=-1)
        weights, ids = torch.topk(scores, self.top_k, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), ids

    def tokens(self, x: Tensor) -> Tensor:
        """What the experts see of the layer's input."""
        return x

    def gate(self, hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return F.silu(gate) * up

    def first(self, rows: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        return self.add_bias(self.linear(rows, self.gate_up, ids, ends), self.gate_up_bias, ids)

    def second(self, rows: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        return self.add_bias(self.linear(rows, self.down, ids, ends), self.down_bias, ids)

    def add_bias(self, rows: Tensor, bias: Tensor | None, ids: Tensor) -> Tensor:
        return rows if bias is None else rows + bias[ids]

    def linear(self, rows: Tensor, weight: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        raise NotImplementedError

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        raise NotImplementedError

    def weigh(self, rows: Tensor, weights: Tensor) -> Tensor:
        return rows * weights.unsqueeze(-1)

    def combine(self, rows: Tensor, x: Tensor) -> Tensor:
        return rows.view(x.shape[0], self.top_k, x.shape[1]).sum(dim=1).to(x.dtype)

    def forward(self, x: Tensor) -> Any:
        weights, ids = self.route(x)
        return self.experts(self.tokens(x), ids, weights)


class GroupedMM(Experts):
    """Rows sorted by expert, two grouped GEMMs, rows back in choice order."""

    def sort(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sort(ids)

    def row_tokens(self, permutation: Tensor) -> Tensor:
        return permutation // self.top_k

    def ends(self, sorted_ids: Tensor) -> Tensor:
        counts = torch.histc(sorted_ids.float(), bins=self.num_experts, min=0, max=self.num_experts - 1)
        return torch.cumsum(counts, dim=0, dtype=torch.int32)

    def linear(self, rows: Tensor, weight: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        matrix = weight.transpose(-2, -1) if self.layout == "out_in" else weight
        # torch._grouped_mm cannot be compiled in other dtypes than bfloat16.
        if rows.dtype == torch.bfloat16:
            return torch._grouped_mm(rows, matrix, offs=ends)
        return torch.ops.transformers.grouped_mm_fallback(rows, matrix, ends)

    def invert(self, permutation: Tensor) -> Tensor:
        inverse = torch.empty_like(permutation)
        inverse[permutation] = torch.arange(permutation.size(0))
        return inverse

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        sorted_ids, permutation = self.sort(ids.reshape(-1))
        rows = x[self.row_tokens(permutation)]
        ends = self.ends(sorted_ids)
        hidden = self.first(rows, sorted_ids, ends)
        out = self.second(self.gate(hidden), sorted_ids, ends)
        out = self.weigh(out, weights.reshape(-1)[permutation])
        return self.combine(out[self.invert(permutation)], x)


class BatchedMM(Experts):
    """Rows in choice order, each multiplied by a copy of its own expert's matrices."""

    def repeat(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.top_k, dim=0)

    def linear(self, rows: Tensor, weight: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        if self.layout == "out_in":
            return torch.bmm(weight[ids], rows.unsqueeze(-1)).squeeze(-1)
        return torch.bmm(rows.unsqueeze(1), weight[ids]).squeeze(1)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        hidden = self.first(self.repeat(x), flat, flat)
        out = self.second(self.gate(hidden), flat, flat)
        return self.combine(self.weigh(out, weights.reshape(-1)), x)


def softmax_router(layer: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over all experts, then top-k, not renormalised."""
    weights, ids = torch.topk(F.softmax(F.linear(x, layer.router), dim=-1, dtype=torch.float32), layer.top_k, dim=-1)
    return weights.to(x.dtype), ids


def chosen_softmax_router(layer: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
    """Top-k of the logits, then softmax over the chosen."""
    logits, ids = torch.topk(F.linear(x, layer.router), layer.top_k, dim=-1)
    return F.softmax(logits, dim=-1), ids


def grouped_sigmoid_router(
    layer: Experts,
    x: Tensor,
    *,
    num_groups: int = 2,
    topk_groups: int = 1,
    fill: float = float("-inf"),
    **sum_options: Any,
) -> tuple[Tensor, Tensor]:
    """Sigmoid, a correction bias for the choice, experts of the best groups, renormalised and scaled."""
    scores = F.linear(x.float(), layer.router.float()).sigmoid()
    choice = scores + layer.correction
    group_scores = (
        choice.view(-1, num_groups, layer.num_experts // num_groups).topk(2, dim=-1)[0].sum(dim=-1, **sum_options)
    )
    best = torch.topk(group_scores, k=topk_groups, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(group_scores).scatter_(1, best, 1)
    mask = mask.unsqueeze(-1).expand(-1, num_groups, layer.num_experts // num_groups).reshape(-1, layer.num_experts)
    choice = choice.masked_fill(~mask.bool(), fill)
    ids = torch.topk(choice, k=layer.top_k, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * 2.5, ids


def changed(spelling: type[Experts], **steps: Any) -> type[Experts]:
    """``spelling`` with the methods in ``steps`` instead of its own."""
    return type(spelling.__name__, (spelling,), steps)
