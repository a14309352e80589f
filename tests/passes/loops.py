"""Layers that run their experts one by one: each step is a method, so that a test can replace one and leave the rest.

Axes: T tokens, K choices per token, E experts, D model width, F expert width, N rows of one expert.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from spellings import Experts
from torch import Tensor, nn

Hits: TypeAlias = Any  # what a layer knows of the choices of one expert


class GatedMLP(nn.Module):
    def __init__(self, width: int, expert_width: int, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(width, expert_width, bias=bias)
        self.up = nn.Linear(width, expert_width, bias=bias)
        self.down = nn.Linear(expert_width, width, bias=bias)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(rows)) * self.up(rows))


class ExpertLoop(nn.Module):
    """For every expert: the tokens that chose it, its outputs for them, weighted, and added to the sums."""

    def __init__(
        self, *, num_experts: int = 4, top_k: int = 2, width: int = 8, expert_width: int = 12, bias: bool = False
    ) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.width, self.expert_width = num_experts, top_k, width, expert_width
        self.router = nn.Parameter(torch.randn(num_experts, width))
        self.make_experts(bias)
        self.prepare()

    def make_experts(self, bias: bool) -> None:
        self.experts = nn.ModuleList(GatedMLP(self.width, self.expert_width, bias) for _ in range(self.num_experts))

    def prepare(self) -> None:
        """Adds what a changed step needs."""

    route = Experts.route

    def expert(self, expert: int, rows: Tensor) -> Tensor:
        return self.experts[expert](rows)

    def begin(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def hits(self, ids: Tensor, expert: int) -> Hits:
        """Token and choice of each hit."""
        return torch.where(ids == expert)

    def rows(self, x: Tensor, hits: Hits) -> Tensor:
        return x[hits[0]]

    def weigh(self, rows: Tensor, weights: Tensor, hits: Hits) -> Tensor:
        return rows * weights[hits[0], hits[1], None]

    def add(self, total: Tensor, rows: Tensor, hits: Hits) -> Tensor:
        return total.index_add_(0, hits[0], rows)

    def loop(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = self.begin(x)
        for expert in range(self.num_experts):
            hits = self.hits(ids, expert)
            rows = self.expert(expert, self.rows(x, hits))
            total = self.add(total, self.weigh(rows, weights, hits), hits)
        return total

    def forward(self, x: Tensor) -> Any:
        weights, ids = self.route(x)
        return self.loop(x, ids, weights)


class StackedLoop(ExpertLoop):
    """The weights of all experts are entries of [E, 2F, D] and [E, D, F] parameters."""

    def make_experts(self, bias: bool) -> None:
        num_experts, width, inner = self.num_experts, self.width, self.expert_width
        self.gate_up = nn.Parameter(torch.randn(num_experts, 2 * inner, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, width, inner) * inner**-0.5)
        self.gate_up_bias = nn.Parameter(torch.randn(num_experts, 2 * inner)) if bias else None
        self.down_bias = nn.Parameter(torch.randn(num_experts, width)) if bias else None

    def expert(self, expert: int, rows: Tensor) -> Tensor:
        biases = [None if bias is None else bias[expert] for bias in (self.gate_up_bias, self.down_bias)]
        gate, up = F.linear(rows, self.gate_up[expert], biases[0]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down[expert], biases[1])


class DenseLoop(ExpertLoop):
    """Every expert on all tokens; its weight is 0 where it was not chosen."""

    def begin(self, x: Tensor) -> Any:
        return 0

    def hits(self, ids: Tensor, expert: int) -> Hits:
        return ids == expert

    def rows(self, x: Tensor, hits: Hits) -> Tensor:
        return x

    def weigh(self, rows: Tensor, weights: Tensor, hits: Hits) -> Tensor:
        return rows * (weights * hits).sum(dim=-1, keepdim=True)

    def add(self, total: Any, rows: Tensor, hits: Hits) -> Tensor:
        return total + rows


class MaskLoop(ExpertLoop):
    """One choice per token, ids and weights [T], and the tokens of an expert by a mask."""

    def hits(self, ids: Tensor, expert: int) -> Hits:
        return ids == expert

    def rows(self, x: Tensor, hits: Hits) -> Tensor:
        return x[hits]

    def weigh(self, rows: Tensor, weights: Tensor, hits: Hits) -> Tensor:
        return rows * weights[hits].unsqueeze(-1)


class SwitchLoop(MaskLoop):
    """One expert per token, chosen by the largest probability."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = F.softmax(F.linear(x, self.router), dim=-1).max(dim=-1)
        return weights, ids

    def add(self, total: Tensor, rows: Tensor, hits: Hits) -> Tensor:
        total[hits] = rows
        return total


class FlatLoop(ExpertLoop):
    """One row per choice, written where it came from, weighted and summed after the loop."""

    def loop(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        flat, rows = ids.view(-1), x.repeat_interleave(self.top_k, dim=0)
        total = self.begin(rows)
        for expert in range(self.num_experts):
            total[flat == expert] = self.expert(expert, rows[flat == expert])
        return (total.view(*weights.shape, self.width) * weights.unsqueeze(-1)).sum(dim=1)

    def begin(self, x: Tensor) -> Tensor:
        return torch.empty_like(x)


class ChoiceLoop(MaskLoop):
    """For every choice of a token, and every expert: the tokens whose choice it is."""

    def add(self, total: Tensor, rows: Tensor, hits: Hits) -> Tensor:
        total[hits] += rows
        return total

    def add_choice(self, total: Tensor, x: Tensor, ids: Tensor, weights: Tensor, expert: int) -> Tensor:
        """What one expert adds for one choice, ``ids`` [T] and ``weights`` [T]."""
        hits = self.hits(ids, expert)
        rows = self.expert(expert, self.rows(x, hits))
        return self.add(total, self.weigh(rows, weights, hits), hits)

    def loop(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = self.begin(x)
        for choice in range(self.top_k):
            for expert in range(self.num_experts):
                total = self.add_choice(total, x, ids[:, choice], weights[:, choice], expert)
        return total


class StackedChoiceLoop(ChoiceLoop, StackedLoop):
    """Every choice takes its entries of the stacks for itself."""


class DenseStack(StackedLoop):
    """All experts on all tokens by einsum, and a sum by the weights [T, E]."""

    def first(self, x: Tensor) -> Tensor:
        return torch.einsum("td,efd->tef", x, self.gate_up)

    def gate(self, hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return F.silu(gate) * up

    def second(self, hidden: Tensor) -> Tensor:
        return torch.einsum("tef,edf->ted", hidden, self.down)

    def dense(self, ids: Tensor, weights: Tensor) -> Tensor:
        return weights.new_zeros(ids.shape[0], self.num_experts).scatter(1, ids, weights)

    def combine(self, outputs: Tensor, dense: Tensor) -> Tensor:
        return torch.einsum("ted,te->td", outputs, dense)

    def loop(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.combine(self.second(self.gate(self.first(x))), self.dense(ids, weights))


class BatchedStack(DenseStack):
    """The same by bmm, with the experts as the first axis."""

    def first(self, x: Tensor) -> Tensor:
        hidden = torch.bmm(x.unsqueeze(0).expand(self.num_experts, -1, -1), self.gate_up.transpose(1, 2))
        return hidden if self.gate_up_bias is None else hidden + self.gate_up_bias.unsqueeze(1)

    def second(self, hidden: Tensor) -> Tensor:
        outputs = torch.bmm(hidden, self.down.transpose(1, 2))
        return outputs if self.down_bias is None else outputs + self.down_bias.unsqueeze(1)

    def combine(self, outputs: Tensor, dense: Tensor) -> Tensor:
        return (outputs * dense.t().unsqueeze(-1)).sum(dim=0)


# ---- other steps


def one_hot(layer: ExpertLoop, ids: Tensor, expert: int) -> Hits:
    """For ``hits``."""
    choice, token = torch.where(F.one_hot(ids, num_classes=layer.num_experts).permute(2, 1, 0)[expert])
    return token, choice


def add_by_index(layer: ExpertLoop, total: Tensor, rows: Tensor, hits: Hits) -> Tensor:
    """For ``add``."""
    total[hits[0]] += rows
    return total


def any_choice(layer: ExpertLoop, ids: Tensor, expert: int) -> Hits:
    """For ``hits``: the tokens alone, and the mask of their choices."""
    return (ids == expert).any(dim=-1), ids == expert


def sum_of_choices(layer: ExpertLoop, rows: Tensor, weights: Tensor, hits: Hits) -> Tensor:
    """For ``weigh``, after ``any_choice``."""
    return (weights * hits[1]).sum(dim=-1)[hits[0]].unsqueeze(1) * rows


def scattered(layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """For ``loop``: every expert on all tokens."""
    dense = weights.new_zeros(x.shape[0], layer.num_experts).scatter_(1, ids, weights)
    total = torch.zeros_like(x)
    for expert in range(layer.num_experts):
        total += dense[:, expert : expert + 1] * layer.expert(expert, x)
    return total
