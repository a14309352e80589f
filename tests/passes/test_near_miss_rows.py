"""Row orders, weights and sums that are nearly those of a MoE: refused with a sentence, or rewritten and right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from near_miss import Case, check, layer_of
from spellings import BatchedMM, Experts, GroupedMM
from torch import Tensor


def weight_before_down(layer: Any, x: Tensor) -> Tensor:
    weights, ids = layer.route(x)
    flat = ids.reshape(-1)
    hidden = layer.gate(layer.first(layer.repeat(x), flat, flat)) * weights.reshape(-1, 1)
    return layer.combine(layer.second(hidden, flat, flat), x)


def stale_permutation(layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    sorted_ids, permutation = layer.sort(ids.reshape(-1))
    stale = torch.sort(ids.flip(0).reshape(-1))[1]
    rows, ends = x[permutation // layer.top_k], layer.ends(sorted_ids)
    out = layer.second(layer.gate(layer.first(rows, sorted_ids, ends)), sorted_ids, ends)
    return layer.combine(layer.weigh(out, weights.reshape(-1)[permutation])[layer.invert(stale)], x)


def weights_in_choice_order(layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    sorted_ids, permutation = layer.sort(ids.reshape(-1))
    rows, ends = x[permutation // layer.top_k], layer.ends(sorted_ids)
    out = layer.second(layer.gate(layer.first(rows, sorted_ids, ends)), sorted_ids, ends)
    return layer.combine(layer.weigh(out, weights.reshape(-1))[layer.invert(permutation)], x)


def weight_on_one_row_matrices(layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """[R, D, 1] * [R, 1] is legal where D == R, and weighs columns."""
    flat = ids.reshape(-1)
    hidden = layer.gate(layer.first(layer.repeat(x), flat, flat))
    out = torch.bmm(layer.down[flat], hidden.unsqueeze(-1)) * weights.reshape(-1).unsqueeze(-1)
    return layer.combine(out.squeeze(-1), x)


def counts(sorted_ids: Tensor, bins: int, high: int) -> Tensor:
    return torch.histc(sorted_ids.float(), bins=bins, min=0, max=high)


def inverse_by(values: Any, *, accumulate: bool = False) -> Any:
    def invert(layer: Experts, permutation: Tensor) -> Tensor:
        inverse = torch.zeros_like(permutation)
        inverse.index_put_((permutation,), values(permutation.size(0)), accumulate=accumulate)
        return inverse

    return invert


def padded_experts(layer: GroupedMM, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The rows of each expert begin at a multiple of four, as some grouped GEMMs want it."""
    sorted_ids, permutation = layer.sort(ids.reshape(-1))
    counts = torch.histc(sorted_ids.float(), bins=layer.num_experts, min=0, max=layer.num_experts - 1).long()
    padded = (counts + 3) // 4 * 4
    first, padded_first = counts.cumsum(0) - counts, padded.cumsum(0) - padded
    slots = torch.arange(len(sorted_ids)) - first[sorted_ids] + padded_first[sorted_ids]
    rows = x.new_zeros(len(sorted_ids) + 3 * layer.num_experts, x.shape[1])
    rows[slots] = x[layer.row_tokens(permutation)]
    ends = padded.cumsum(0, dtype=torch.int32)
    out = layer.second(layer.gate(layer.first(rows, sorted_ids, ends)), sorted_ids, ends)[slots]
    out = layer.weigh(out, weights.reshape(-1)[permutation])
    return layer.combine(out[layer.invert(permutation)], x)


LOST = "has no meaning between the expert linears and the sum over choices"
SUM = "aten.sum.dim_IntList must sum over the choices alone, got axes"
UNDO = "aten.index.Tensor must undo the permutation that ordered the rows, by its inverse"
INVERT = "aten.index_put_.default must write 0, 1, 2, ... at the permutation to invert it"
ROUND = "aten.to.dtype rounds expert outputs to torch.bfloat16 before they are summed"
GROUPED = "transformers.grouped_mm_fallback.default"

CASES = (
    Case(
        "rows of experts padded to a multiple",
        layer_of(GroupedMM, experts=padded_experts),
        "refused: the rows of each expert are padded at aten.floor_divide.default, perseus ops read rows without "
        "padding",
    ),
    # rows and their order
    Case("stale permutation", layer_of(GroupedMM, experts=stale_permutation), f"refused: {UNDO}"),
    Case("no inverse", layer_of(GroupedMM, invert=lambda m, p: p), f"refused: {UNDO}"),
    Case(
        "descending inverse",
        layer_of(GroupedMM, invert=lambda m, p: p.argsort(descending=True)),
        "refused: aten.argsort.default must sort the permutation in ascending order to invert it",
    ),
    Case(
        "inverse from 1",
        layer_of(GroupedMM, invert=inverse_by(lambda n: torch.arange(1, n + 1) % n)),
        f"refused: {INVERT}",
    ),
    Case(
        "inverse with a step",
        layer_of(GroupedMM, invert=inverse_by(lambda n: torch.arange(0, 2 * n, 2) // 2)),
        f"refused: {INVERT}",
    ),
    Case(
        "inverse of one value", layer_of(GroupedMM, invert=inverse_by(lambda n: torch.arange(1))), f"refused: {INVERT}"
    ),
    Case(
        "inverse accumulated",
        layer_of(GroupedMM, invert=inverse_by(torch.arange, accumulate=True)),
        f"refused: {INVERT}",
    ),
    Case(
        "descending sort",
        layer_of(GroupedMM, sort=lambda m, i: torch.sort(i, descending=True)),
        "refused: aten.sort.default must sort expert ids in ascending order",
    ),
    Case(
        "wrong divisor",
        layer_of(GroupedMM, row_tokens=lambda m, p: p // 4),
        "refused: aten.floor_divide.default must divide by the 2 choices per token, got 4",
    ),
    Case(
        "remainder instead of division",
        layer_of(GroupedMM, row_tokens=lambda m, p: p % 5),
        f"refused: the rows of {GROUPED} are not tokens gathered in the order of their sorted expert ids",
    ),
    Case(
        "one bin too many",
        layer_of(GroupedMM, ends=lambda m, i: counts(i, 5, 4)[:4].cumsum(0, dtype=torch.int32)),
        f"refused: the group offsets of {GROUPED} are not the cumulative counts of the expert ids",
    ),
    Case(
        "bins of another width",
        layer_of(GroupedMM, ends=lambda m, i: counts(i, 4, 4).cumsum(0, dtype=torch.int32)),
        "refused: aten.histc.default must count ids 0 .. E-1 in E bins, got bins=4, min=0, max=4",
    ),
    Case("one expert", layer_of(GroupedMM, options={"num_experts": 1, "top_k": 1}), "moe"),
    # weights and the sum
    Case(
        "no weight",
        layer_of(GroupedMM, weigh=lambda m, r, w: r),
        "refused: aten.sum.dim_IntList sums expert outputs before the routing weight is multiplied in",
    ),
    Case(
        "weight twice",
        layer_of(GroupedMM, weigh=lambda m, r, w: r * w[:, None] * w[:, None]),
        "refused: aten.mul.Tensor multiplies a second routing weight in",
    ),
    Case(
        "weights in another row order",
        layer_of(GroupedMM, experts=weights_in_choice_order),
        "refused: aten.mul.Tensor multiplies rows by weights that are in another row order",
    ),
    Case("weight before down", layer_of(BatchedMM, forward=weight_before_down), f"refused: aten.mul.Tensor {LOST}"),
    Case(
        "weight on one-row matrices",
        layer_of(BatchedMM, experts=weight_on_one_row_matrices),
        "refused: aten.mul.Tensor must multiply each row by one floating-point weight",
        num_tokens=4,
    ),
    Case(
        "rounded before the sum",
        layer_of(BatchedMM, weigh=lambda m, r, w: r.bfloat16().float() * w[:, None]),
        f"refused: {ROUND}",
    ),
    Case("sum in float64", layer_of(BatchedMM, weigh=lambda m, r, w: r.double() * w[:, None]), "moe"),
    Case(
        "mean", layer_of(BatchedMM, combine=lambda m, r, x: r.view(-1, 2, 8).mean(1)), f"refused: aten.mean.dim {LOST}"
    ),
    Case(
        "keepdim",
        layer_of(BatchedMM, combine=lambda m, r, x: r.view(-1, 2, 8).sum(1, keepdim=True)),
        f"refused: {SUM} [1], keepdim=True",
    ),
    Case(
        "sum over tokens, T == K",
        layer_of(BatchedMM, combine=lambda m, r, x: r.view(2, 2, 8).sum(0)),
        f"refused: {SUM} [0], keepdim=False",
        num_tokens=2,
    ),
    Case(
        "sum over the width, K == D",
        layer_of(BatchedMM, options={"num_experts": 8, "top_k": 8}, combine=lambda m, r, x: r.view(-1, 8, 8).sum(2)),
        f"refused: {SUM} [2], keepdim=False",
    ),
    Case(
        "sum over everything",
        layer_of(BatchedMM, combine=lambda m, r, x: r.view(-1, 2, 8).sum(dim=None, keepdim=True)),
        f"refused: {SUM} [], keepdim=True",
    ),
    Case(
        "two sums of the same rows",
        layer_of(BatchedMM, combine=lambda m, r, x: r.view(-1, 2, 8).sum(1) * r.view(-1, 2, 8).sum(1)),
        "refused: its expert outputs are summed 2 times",
    ),
    Case(
        "one sum, two readers",
        layer_of(GroupedMM, combine=lambda m, r, x: (lambda s: s * s)(GroupedMM.combine(m, r, x))),
        "moe",
    ),
    Case(
        "a second sum",
        layer_of(GroupedMM, combine=lambda m, r, x: GroupedMM.combine(m, r, x).sum(1, keepdim=True)),
        "moe",
    ),
    Case(
        "dropout of the weighted rows",
        layer_of(BatchedMM, weigh=lambda m, r, w: F.dropout(BatchedMM.weigh(m, r, w), 1.0)),
        f"refused: aten.dropout.default {LOST}",
    ),
    Case(
        "token rows flipped",
        layer_of(GroupedMM, row_tokens=lambda m, p: (p // 2).flip(0)),
        f"refused: the rows of {GROUPED} are not tokens gathered in the order of their sorted expert ids",
    ),
    Case("tanh after the sum", layer_of(GroupedMM, combine=lambda m, r, x: GroupedMM.combine(m, r, x).tanh()), "moe"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_near_miss(case: Case) -> None:
    check(case)
