"""Experts in a loop, as people write it: one node, the numbers and gradients of eager code, at every token count."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import (
    ChoiceLoop,
    DenseLoop,
    ExpertLoop,
    FlatLoop,
    Hits,
    StackedChoiceLoop,
    StackedLoop,
    SwitchLoop,
    add_by_index,
    any_choice,
    one_hot,
    scattered,
    sum_of_choices,
)
from near_miss import run
from spellings import changed
from torch import Tensor, nn

import perseus_compile
from perseus_compile import observe


def matched(layer: nn.Module, *, tokens: tuple[int, ...] = (5, 3, 17, 1, 0), tolerance: float = 1e-4) -> list[str]:
    """Checks numbers and gradients at each token count, and that those from 2 on share a graph: its ops."""
    torch._dynamo.reset()
    reference = copy.deepcopy(layer)
    compiled = perseus_compile.compile(layer, inner="eager", dynamic=True, verify=True)
    with observe.collect() as reports:
        for num_tokens in tokens:
            x = torch.randn(num_tokens, 8, generator=torch.Generator().manual_seed(num_tokens))
            x = x.to(next(layer.parameters()).dtype)
            for network in (compiled, reference):
                network.zero_grad()
            torch.testing.assert_close(run(compiled, x, True), run(reference, x, True), rtol=tolerance, atol=tolerance)
    assert [refusal.reason for report in reports for refusal in report.refusals] == []
    assert len(reports) <= 1 + len({count for count in tokens if count < 2})
    return [found.op for report in reports for found in report.layers]


# ---- which tokens chose an expert


def nonzero_tuple(layer: ExpertLoop, ids: Tensor, expert: int) -> Hits:
    return (ids == expert).nonzero(as_tuple=True)


def nonzero_table(layer: ExpertLoop, ids: Tensor, expert: int) -> Hits:
    table = torch.nonzero(ids == expert)
    return table[:, 0], table[:, 1]


def equal_to_range(layer: ExpertLoop, ids: Tensor, expert: int) -> Hits:
    return torch.where((ids.unsqueeze(-1) == torch.arange(layer.num_experts))[:, :, expert])


SELECTIONS = {
    "where": ExpertLoop.hits,
    "nonzero, tuple": nonzero_tuple,
    "nonzero, table": nonzero_table,
    "one-hot": one_hot,
    "equal to a range": equal_to_range,
}

# ---- how outputs are added


def add_by_put(layer: ExpertLoop, total: Tensor, rows: Tensor, hits: Hits) -> Tensor:
    return total.index_put((hits[0],), rows, accumulate=True)


def add_functional(layer: ExpertLoop, total: Tensor, rows: Tensor, hits: Hits) -> Tensor:
    return total.index_add(0, hits[0], rows.to(total.dtype))


SUMS = {
    "index_add_": ExpertLoop.add,
    "index_add": add_functional,
    "+=": add_by_index,
    "index_put": add_by_put,
}


@pytest.mark.parametrize("add", SUMS.values(), ids=SUMS)
@pytest.mark.parametrize("hits", SELECTIONS.values(), ids=SELECTIONS)
def test_hits_and_sums(hits: Any, add: Any) -> None:
    assert matched(changed(ExpertLoop, hits=hits, add=add)(), tokens=(5, 3)) == ["experts_list"]


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("spelling", (ExpertLoop, StackedLoop, DenseLoop, SwitchLoop, FlatLoop, ChoiceLoop))
def test_token_counts(spelling: type[ExpertLoop], bias: bool) -> None:
    """A graph for all token counts from 2 on, one for 1 and one for 0."""
    op = "moe" if spelling is StackedLoop else "experts_list"
    assert matched(spelling(bias=bias)) == [op] * 3


# ---- how weights are read


def by_mask(layer: ExpertLoop, rows: Tensor, weights: Tensor, hits: Hits) -> Tensor:
    return rows * weights[hits].unsqueeze(-1)


def leading_axis(layer: ExpertLoop, x: Tensor, hits: Hits) -> Tensor:
    return x[None, hits[0]].reshape(-1, layer.width)


def selected(layer: ExpertLoop, x: Tensor, hits: Hits) -> Tensor:
    return x.index_select(0, hits[0])


READS: dict[str, dict[str, Any]] = {
    "weights at the hits, as a column": {"weigh": by_mask},
    "the sum of a token's weights": {"hits": any_choice, "weigh": sum_of_choices, "add": add_by_index},
    "rows with a leading axis": {"rows": leading_axis},
    "index_select": {"rows": selected},
    "no weights": {"weigh": lambda m, rows, weights, hits: rows},
}


@pytest.mark.parametrize("steps", READS.values(), ids=READS)
def test_rows_and_weights(steps: dict[str, Any]) -> None:
    assert matched(changed(ExpertLoop, **steps)(), tokens=(5, 3)) == ["experts_list"]


# ---- every choice for itself


def choices_inside(layer: ChoiceLoop, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    total = layer.begin(x)
    for expert in range(layer.num_experts):
        for choice in reversed(range(layer.top_k)):
            total = layer.add_choice(total, x, ids[:, choice], weights[:, choice], expert)
    return total


def add_at_tokens(layer: ChoiceLoop, total: Tensor, x: Tensor, ids: Tensor, weights: Tensor, expert: int) -> Tensor:
    tokens = (ids == expert).nonzero().squeeze(-1)
    return total.index_add(0, tokens, weights.unsqueeze(-1)[tokens] * layer.expert(expert, x[tokens]))


CHOICES: dict[str, dict[str, Any]] = {
    "a loop over the choices inside": {"loop": choices_inside},
    "index_add": {"add_choice": add_at_tokens},
    "no weights": {"weigh": lambda m, rows, weights, hits: rows},
}


@pytest.mark.parametrize("steps", CHOICES.values(), ids=CHOICES)
def test_choices(steps: dict[str, Any]) -> None:
    assert matched(changed(ChoiceLoop, **steps)(), tokens=(5, 3)) == ["experts_list"]


def test_the_only_choice() -> None:
    assert matched(ChoiceLoop(top_k=1), tokens=(5, 3)) == ["experts_list"]


class SeparateStacks(StackedChoiceLoop):
    """Gates and up halves are entries of two stacks."""

    def prepare(self) -> None:
        self.gates, self.ups = (nn.Parameter(half.clone()) for half in self.gate_up.detach().chunk(2, dim=1))
        del self.gate_up

    def expert(self, expert: int, rows: Tensor) -> Tensor:
        hidden = F.silu(F.linear(rows, self.gates[expert])) * F.linear(rows, self.ups[expert])
        return F.linear(hidden, self.down[expert])


@pytest.mark.parametrize(("spelling", "op"), ((StackedChoiceLoop, "moe"), (SeparateStacks, "experts_list")))
def test_choices_of_stacked_experts(spelling: type[ChoiceLoop], op: str) -> None:
    assert matched(spelling(), tokens=(5, 3)) == [op]


# ---- every expert on all tokens


def one_hot_weights(layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    dense = (F.one_hot(ids, layer.num_experts) * weights.unsqueeze(-1)).sum(dim=1)
    return sum(layer.expert(expert, x) * dense[:, expert, None] for expert in range(layer.num_experts))


def by_expert(layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    dense = torch.zeros(x.shape[0], layer.num_experts).scatter_add(1, ids, weights).t()
    outputs = [layer.expert(expert, x) * dense[expert].unsqueeze(-1) for expert in range(layer.num_experts)]
    return outputs[0] + outputs[1] + outputs[2] + outputs[3]


@pytest.mark.parametrize("loop", (scattered, one_hot_weights, by_expert))
def test_dense_weights(loop: Any) -> None:
    assert matched(changed(DenseLoop, loop=loop)(), tokens=(5, 3)) == ["experts_list"]


# ---- how experts are written


def joined_mlp(layer: Any, expert: int, rows: Tensor) -> Tensor:
    hidden = rows @ layer.gate_up[expert].t()
    return (F.gelu(hidden[:, :12], approximate="tanh") * hidden[:, 12:]) @ layer.down[expert].T


def up_first(layer: Any, expert: int, rows: Tensor) -> Tensor:
    mlp = layer.experts[expert]
    return mlp.down(mlp.up(rows) * F.silu(mlp.gate(rows)))


def clamped(layer: Any, expert: int, rows: Tensor) -> Tensor:
    mlp = layer.experts[expert]
    gate, up = mlp.gate(rows).clamp(max=0.7), mlp.up(rows).clamp(min=-0.7, max=0.7)
    return mlp.down((up + 1) * (gate * torch.sigmoid(gate * 1.702)))


def without_gate(layer: Any, expert: int, rows: Tensor) -> Tensor:
    mlp = layer.experts[expert]
    return mlp.down(F.relu(mlp.up(rows)).square())


def in_place(layer: Any, expert: int, rows: Tensor) -> Tensor:
    mlp = layer.experts[expert]
    return mlp.down(F.silu(mlp.gate(rows), inplace=True).mul_(mlp.up(rows)))


def with_wide_gate(layer: Any, expert: int, rows: Tensor) -> Tensor:
    mlp = layer.experts[expert]
    return mlp.down(F.silu(mlp.gate(rows).double()).to(rows.dtype) * mlp.up(rows))


def bias_by_hand(layer: Any, expert: int, rows: Tensor) -> Tensor:
    mlp = layer.experts[expert]
    return torch.addmm(
        mlp.down.bias, F.silu(rows @ mlp.gate.weight.t() + mlp.gate.bias) * mlp.up(rows), mlp.down.weight.t()
    )


def apart_stacks(layer: Any, expert: int, rows: Tensor) -> Tensor:
    """The gates are one parameter, the up halves another."""
    gate, up = layer.gate_up.unbind()[expert].chunk(2)
    return F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), layer.down.unbind()[expert])


EXPERTS: dict[str, tuple[type[ExpertLoop], Any]] = {
    "matrix products": (StackedLoop, joined_mlp),
    "up first": (ExpertLoop, up_first),
    "clamped": (ExpertLoop, clamped),
    "without a gate": (ExpertLoop, without_gate),
    "in place": (ExpertLoop, in_place),
    "a gate in a wider dtype": (ExpertLoop, with_wide_gate),
    "bias by hand": (changed(ExpertLoop, __init__=lambda m: ExpertLoop.__init__(m, bias=True)), bias_by_hand),
    "halves of stacks": (StackedLoop, apart_stacks),
}


@pytest.mark.parametrize(("spelling", "expert"), EXPERTS.values(), ids=EXPERTS)
def test_experts(spelling: type[ExpertLoop], expert: Any) -> None:
    op = "moe" if expert is joined_mlp else "experts_list"
    assert matched(changed(spelling, expert=expert)(), tokens=(5, 3)) == [op]


def test_local_experts() -> None:
    """A loop over some of the experts: what other experts would add is left out, as in the loop."""

    def loop(layer: ExpertLoop, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = layer.begin(x)
        for expert in (1, 2):
            hits = layer.hits(ids, expert)
            rows = layer.expert(expert, layer.rows(x, hits))
            total = layer.add(total, layer.weigh(rows, weights, hits), hits)
        return total

    assert matched(changed(ExpertLoop, loop=loop)(), tokens=(5, 3)) == ["experts_list"]


def test_duplicated_ids() -> None:
    """Where the ids are not known to differ, what adds every hit is matched, and adds every hit."""

    def route(layer: ExpertLoop, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = ExpertLoop.route(layer, x)
        return weights, ids // 2

    assert matched(changed(ExpertLoop, route=route)(), tokens=(5, 3)) == ["experts_list"]


def test_bfloat16() -> None:
    """The loop adds in bfloat16, the op in float32: they differ by the roundings of the sum."""
    assert matched(ExpertLoop().bfloat16(), tokens=(5,), tolerance=0.1) == ["experts_list"]


def test_a_count_of_hits_may_be_read() -> None:
    """A count is computed as before; the experts are one node all the same."""

    class Counting(ExpertLoop):
        def forward(self, x: Tensor) -> Any:
            weights, ids = self.route(x)
            counts = [(ids == expert).sum() for expert in range(self.num_experts)]
            return self.loop(x, ids, weights), torch.stack(counts).float()

    assert matched(Counting(), tokens=(5, 3)) == ["experts_list"]


def test_what_surrounds_the_loop() -> None:
    """The tokens are a view of [B, S, D], a shared expert is added, and another layer follows."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.shared = (
                ExpertLoop(),
                changed(ExpertLoop, add=add_by_index)(),
                nn.Linear(8, 8),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = x.unsqueeze(0)
            flat = x.reshape(-1, 8)
            x = x + self.first(flat).view_as(x) + self.shared(x)
            return self.second(x.view(-1, 8)).view_as(x).squeeze(0)

    assert matched(Block(), tokens=(5, 3)) == ["experts_list", "experts_list"]


def test_layers_in_a_row() -> None:
    """The sums of one layer, written in place, are the tokens of the next."""

    class InARow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([ExpertLoop(), StackedLoop()])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    assert matched(InARow(), tokens=(5, 3)) == ["experts_list", "moe"]


def test_frozen_experts_and_no_grad() -> None:
    layer = ExpertLoop()
    layer.experts.requires_grad_(False)
    assert matched(layer, tokens=(5,)) == ["experts_list"]
    compiled = perseus_compile.compile(copy.deepcopy(layer), inner="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(torch.ones(3, 8)), layer(torch.ones(3, 8)))


def test_inductor() -> None:
    torch._dynamo.reset()
    layer = ExpertLoop()
    compiled = perseus_compile.compile(copy.deepcopy(layer), dynamic=True)
    for num_tokens in (5, 3):
        x = torch.randn(num_tokens, 8)
        torch.testing.assert_close(run(compiled, x, True), run(layer, x, True), rtol=1e-4, atol=1e-5)
        for network in (compiled, layer):
            network.zero_grad()
