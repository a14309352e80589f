"""Loops that are nearly a loop over experts: refused with a sentence, or rewritten and right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import DenseLoop, ExpertLoop, Hits, StackedLoop, SwitchLoop, add_by_index, any_choice
from near_miss import Case, check
from spellings import changed
from torch import Tensor, nn

from perseus_compile.backend import CAPTURE_SETTINGS

LISTED = "experts: the weights of the experts are separate tensors"
NO_RULE = "refused: outputs of experts are weighted by the choice of aten.topk.default in a way that no rule knows"


def loop_of(spelling: type[ExpertLoop], **steps: Any) -> Any:
    return lambda: changed(spelling, **steps)()


# ---- which expert, which tokens


def skips(*experts: int) -> Any:
    def loop(layer: ExpertLoop, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = layer.begin(x)
        for expert in experts:
            hits = layer.hits(ids, expert)
            rows = layer.weigh(layer.expert(expert, layer.rows(x, hits)), weights, hits)
            total = layer.add(total, rows, hits)
        return total

    return loop


def same_outputs_twice(layer: ExpertLoop, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    total = layer.begin(x)
    for expert in range(layer.num_experts):
        hits = layer.hits(ids, expert)
        rows = layer.weigh(layer.expert(expert, layer.rows(x, hits)), weights, hits)
        for _ in range(2 if expert == 1 else 1):
            total = layer.add(total, rows, hits)
    return total


def other_ids(layer: ExpertLoop, ids: Tensor, expert: int) -> Hits:
    return torch.where((ids.flip(1) if expert == 2 else ids) == expert)


def reversed_rows(layer: ExpertLoop, x: Tensor, hits: Hits) -> Tensor:
    return x[hits[0]].flip(0)


def duplicated(layer: ExpertLoop, x: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = ExpertLoop.route(layer, x)
    return weights, ids // 2


def overwrite(layer: ExpertLoop, total: Tensor, rows: Tensor, hits: Hits) -> Tensor:
    total[hits[0]] = rows
    return total


def subtract(layer: ExpertLoop, total: Tensor, rows: Tensor, hits: Hits) -> Tensor:
    return total.index_add_(0, hits[0], rows, alpha=-1)


def at_choices(layer: ExpertLoop, total: Tensor, rows: Tensor, hits: Hits) -> Tensor:
    return total.index_add_(0, hits[1], rows)


# ---- weights


def transposed_weights(layer: ExpertLoop, rows: Tensor, weights: Tensor, hits: Hits) -> Tensor:
    return rows * weights.flip(0).t()[hits[1], hits[0], None]


def swapped_indices(layer: ExpertLoop, rows: Tensor, weights: Tensor, hits: Hits) -> Tensor:
    square = weights[: layer.top_k]
    return rows * square[hits[1], hits[1], None]


def rounded_weights(layer: ExpertLoop, rows: Tensor, weights: Tensor, hits: Hits) -> Tensor:
    return rows * weights[hits[0], hits[1], None].bfloat16()


def weights_twice(layer: ExpertLoop, rows: Tensor, weights: Tensor, hits: Hits) -> Tensor:
    return ExpertLoop.weigh(layer, ExpertLoop.weigh(layer, rows, weights, hits), weights, hits)


def other_weights(layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    total = layer.begin(x)
    for expert in range(layer.num_experts):
        hits = layer.hits(ids, expert)
        own = weights * 2 if expert == 1 else weights
        total = layer.add(total, layer.weigh(layer.expert(expert, layer.rows(x, hits)), own, hits), hits)
    return total


def weight_of_other_expert(layer: Any, rows: Tensor, weights: Tensor, hits: Hits) -> Tensor:
    return rows * (weights * ~hits).sum(dim=-1, keepdim=True)


def unweighted(layer: ExpertLoop, rows: Tensor, weights: Tensor, hits: Hits) -> Tensor:
    return rows


# ---- inside an expert


def without_activation(layer: Any, expert: int, rows: Tensor) -> Tensor:
    mlp = layer.experts[expert]
    return mlp.down(mlp.gate(rows) * mlp.up(rows))


def normed(layer: Any, expert: int, rows: Tensor) -> Tensor:
    return F.layer_norm(layer.experts[expert](rows), (8,))


def normed_inside(layer: Any, expert: int, rows: Tensor) -> Tensor:
    mlp = layer.experts[expert]
    return mlp.down(F.layer_norm(F.silu(mlp.gate(rows)) * mlp.up(rows), (12,)))


def another_gate(layer: Any, expert: int, rows: Tensor) -> Tensor:
    mlp = layer.experts[expert]
    act = F.gelu if expert == 3 else F.silu
    return mlp.down(act(mlp.gate(rows)) * mlp.up(rows))


def three_products(layer: Any, expert: int, rows: Tensor) -> Tensor:
    mlp = layer.experts[expert]
    return mlp.down(F.silu(mlp.gate(rows)) * mlp.up(rows) * layer.experts[0].up(rows))


def one_linear(layer: Any, expert: int, rows: Tensor) -> Tensor:
    return rows @ layer.square


def square(layer: Any) -> None:
    layer.square = nn.Parameter(torch.randn(8, 8))


def remember(layer: Any, expert: int, rows: Tensor) -> Tensor:
    layer.seen = layer.experts[expert].gate(rows)
    return layer.experts[expert].down(F.silu(layer.seen) * layer.experts[expert].up(rows))


def seen_too(layer: Any, x: Tensor) -> Tensor:
    return ExpertLoop.forward(layer, x) + layer.seen.mean()


def different_width(layer: Any) -> None:
    layer.experts[1] = type(layer.experts[0])(8, 16, False)


def one_with_bias(layer: Any) -> None:
    layer.experts[1] = type(layer.experts[0])(8, 12, True)


def in_no_grad(layer: Any, expert: int, rows: Tensor) -> Tensor:
    if expert != 1:
        return layer.experts[expert](rows)
    with torch.no_grad():
        return layer.experts[expert](rows)


def with_dropout(layer: Any, expert: int, rows: Tensor) -> Tensor:
    mlp = layer.experts[expert]
    return mlp.down(F.dropout(F.silu(mlp.gate(rows)), 0.0) * mlp.up(rows))


# ---- sums


def begin_with_tokens(layer: ExpertLoop, x: Tensor) -> Tensor:
    return x.clone()


def begin_empty(layer: ExpertLoop, x: Tensor) -> Tensor:
    return torch.empty_like(x)


def narrower(layer: ExpertLoop, x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=torch.bfloat16)


def add_narrower(layer: ExpertLoop, total: Tensor, rows: Tensor, hits: Hits) -> Tensor:
    return total.index_add_(0, hits[0], rows.bfloat16())


def wider(layer: ExpertLoop, x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=torch.float64)


def add_wider(layer: ExpertLoop, total: Tensor, rows: Tensor, hits: Hits) -> Tensor:
    return total.index_add_(0, hits[0], rows.double())


def partial_sum_is_read(layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    total, seen = layer.begin(x), []
    for expert in range(layer.num_experts):
        hits = layer.hits(ids, expert)
        total = layer.add(total, layer.weigh(layer.expert(expert, layer.rows(x, hits)), weights, hits), hits)
        seen.append(total.sum())
    return total + seen[1]


def tokens_are_written(layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    total = layer.begin(x)
    for expert in range(layer.num_experts):
        hits = layer.hits(ids, expert)
        total = layer.add(total, layer.weigh(layer.expert(expert, layer.rows(x, hits)), weights, hits), hits)
        x.mul_(1.5)
    return total


def chained(layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Each expert reads what the experts before it have added."""
    total = layer.begin(x)
    for expert in range(layer.num_experts):
        hits = layer.hits(ids, expert)
        rows = layer.rows(x + total, hits)
        total = layer.add(total, layer.weigh(layer.expert(expert, rows), weights, hits), hits)
    return total


def some_ids(layer: ExpertLoop, x: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = SwitchLoop.route(layer, x)
    return weights, ids * 1


def functional_add(layer: ExpertLoop, total: Tensor, rows: Tensor, hits: Hits) -> Tensor:
    return total.index_add(0, hits[0], rows)


NEAR_MISSES = (
    Case(
        "an expert is left out",
        loop_of(ExpertLoop, loop=skips(0, 1, 3)),
        "refused: the experts of a sum must be two or more with consecutive ids, none below 0, got [0, 1, 3]",
    ),
    Case(
        "the same outputs are added twice",
        loop_of(ExpertLoop, loop=same_outputs_twice),
        "refused: expert 1 is added twice to one sum",
    ),
    Case(
        "the same outputs are added twice, on all tokens",
        loop_of(DenseLoop, loop=same_outputs_twice),
        "refused: expert 1 is added twice to one sum",
    ),
    Case(
        "an expert is added twice",
        loop_of(ExpertLoop, loop=skips(0, 1, 2, 1, 3)),
        "refused: expert 1 is added twice to one sum",
    ),
    Case("experts in another order", loop_of(ExpertLoop, loop=skips(3, 1, 0, 2)), LISTED),
    Case(
        "one expert alone",
        loop_of(ExpertLoop, loop=skips(1)),
        "refused: the experts of a sum must be two or more with consecutive ids, none below 0, got [1]",
    ),
    Case(
        "other ids for one expert",
        loop_of(ExpertLoop, hits=other_ids),
        "refused: expert 2 is chosen by other ids than expert 0",
    ),
    Case(
        "rows in another order",
        loop_of(ExpertLoop, rows=reversed_rows),
        "refused: the rows of expert 0 at aten.linear.default are not the tokens that chose it",
    ),
    Case(
        "an expert chosen twice is added once",
        loop_of(ExpertLoop, route=duplicated, add=add_by_index),
        "refused: aten.index_put_.default adds once where a token chooses an expert twice; index_add adds all",
    ),
    Case(
        "an expert chosen twice is added once, without a weight",
        loop_of(ExpertLoop, route=duplicated, hits=any_choice, weigh=unweighted, add=add_by_index),
        "refused: expert 0 adds once to a token that chooses it twice, without a weight",
    ),
    Case(
        "sums of several experts are overwritten",
        loop_of(ExpertLoop, add=overwrite),
        "refused: aten.index_put_.default must add to the sums of tokens that choose several experts",
    ),
    Case(
        "outputs are subtracted",
        loop_of(ExpertLoop, add=subtract),
        "refused: aten.index_add_.default must add the outputs of an expert to the sums of their tokens",
    ),
    Case(
        "outputs are added at their choices",
        loop_of(ExpertLoop, add=at_choices),
        "refused: aten.index_add_.default must add the outputs of an expert to the sums of their tokens",
    ),
    Case(
        "weights of other tokens",
        loop_of(ExpertLoop, weigh=transposed_weights),
        "refused: aten.index.Tensor must take the weights of an expert by the token and the choice of each hit",
    ),
    Case(
        "weights by choice alone",
        loop_of(ExpertLoop, weigh=swapped_indices),
        "refused: aten.index.Tensor must take the weights of an expert by the token and the choice of each hit",
    ),
    Case(
        "weights are rounded",
        loop_of(ExpertLoop, weigh=rounded_weights),
        "refused: aten.to.dtype rounds the routing weights of an expert to torch.bfloat16",
    ),
    Case(
        "weights are multiplied in twice",
        loop_of(ExpertLoop, weigh=weights_twice),
        "refused: aten.mul.Tensor multiplies a second routing weight in",
    ),
    Case(
        "other weights for one expert",
        loop_of(ExpertLoop, loop=other_weights),
        "refused: expert 1 has other routing weights than expert 0",
    ),
    Case(
        "every expert on all tokens, with any ids",
        loop_of(DenseLoop, route=duplicated),
        "refused: every expert runs on every token, and not every id is known to be an expert's",
    ),
    Case("the weights of all others", loop_of(DenseLoop, weigh=weight_of_other_expert), NO_RULE),
    Case(
        "no activation",
        loop_of(ExpertLoop, expert=without_activation),
        "refused: the gate between the two expert linears must be one of silu, gelu, gelu_tanh, relu, relu2, "
        "clamped_swiglu, clamped_silu, softcapped_silu, got mul(first, second)",
    ),
    Case(
        "a norm after each expert",
        loop_of(ExpertLoop, expert=normed),
        "refused: aten.layer_norm.default must be the second linear map of an expert",
    ),
    Case(
        "a norm inside",
        loop_of(ExpertLoop, expert=normed_inside),
        "refused: aten.layer_norm.default has no meaning inside an expert",
    ),
    Case(
        "another gate in one expert",
        loop_of(ExpertLoop, expert=another_gate),
        "refused: expert 3 has another gate than expert 0",
    ),
    Case(
        "three products before the gate",
        loop_of(ExpertLoop, expert=three_products),
        "refused: expert 1 has another gate than expert 0",
    ),
    Case(
        "one linear map",
        loop_of(ExpertLoop, expert=one_linear, prepare=square),
        "refused: aten.index.Tensor has no meaning inside an expert",
    ),
    Case(
        "an inner value is read outside",
        loop_of(ExpertLoop, expert=remember, forward=seen_too),
        "refused: aten.linear.default inside it is also read by aten.mean.default",
    ),
    Case(
        "experts of different widths",
        loop_of(ExpertLoop, prepare=different_width),
        "refused: all tensors of gate_up must be alike, got [12, 8] float32 on cpu at 0 and [16, 8] float32 "
        "on cpu at 1; experts of different shapes need calls of their own",
    ),
    Case(
        "a bias in one expert",
        loop_of(ExpertLoop, prepare=one_with_bias),
        "refused: expert 1 has linear maps of another form than expert 0",
    ),
    Case(
        "one expert without gradients",
        loop_of(ExpertLoop, expert=in_no_grad),
        "refused: its nodes run under different gradient or autocast modes",
    ),
    Case(
        "dropout inside",
        loop_of(ExpertLoop, expert=with_dropout),
        "refused: aten.dropout.default has no meaning inside an expert",
    ),
    Case(
        "the sum begins with the tokens",
        loop_of(ExpertLoop, begin=begin_with_tokens),
        "refused: aten.index_add_.default adds to aten.clone.default, which is neither zeros nor the sum of "
        "other experts",
    ),
    Case(
        "not every row is written",
        loop_of(SwitchLoop, route=some_ids, begin=begin_empty),
        "refused: aten.index_put_.default writes to memory that is not initialised, and not every id is known"
        " to be an expert's",
    ),
    Case(
        "sums in a narrower dtype",
        loop_of(ExpertLoop, begin=narrower, add=add_narrower),
        "refused: aten.to.dtype rounds expert outputs to torch.bfloat16 before they are summed",
    ),
    Case(
        "sums in a wider dtype",
        loop_of(ExpertLoop, begin=wider, add=add_wider),
        "refused: the sum stays in torch.float64, the tokens are torch.float32",
    ),
    Case(
        "a partial sum is read",
        loop_of(ExpertLoop, loop=partial_sum_is_read),
        "refused: aten.index_add_.default inside it is also read by aten.sum.default",
    ),
    Case(
        "a partial sum is read, functional",
        loop_of(ExpertLoop, loop=partial_sum_is_read, add=functional_add),
        "refused: aten.index_add.default inside it is also read by aten.sum.default",
    ),
    Case(
        "the tokens are written to",
        loop_of(ExpertLoop, loop=tokens_are_written),
        "refused: expert 1 reads other tokens than expert 0",
        gradients=False,
    ),
    Case(
        "each expert reads the sum so far",
        loop_of(ExpertLoop, loop=chained),
        "refused: expert 1 reads other tokens than expert 0",
    ),
    Case(
        "the tokens are a sum that was written at an index",
        lambda: nn.Sequential(SwitchLoop(), SwitchLoop()),
        f"{LISTED}\nrefused: aten.index_put_.default exists only inside one of Dynamo's nodes",
    ),
    Case("stacked, an expert is left out", loop_of(StackedLoop, loop=skips(0, 1, 2)), LISTED),
)


@pytest.mark.parametrize("case", NEAR_MISSES, ids=lambda case: case.name)
def test_it_nearly_matches(case: Case) -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(CAPTURE_SETTINGS):
        check(case)
