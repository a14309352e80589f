"""The spelling passes/patterns/sentinels.py: clamps and masks that change nothing, and those that might."""

from __future__ import annotations

import pytest
import torch
from spellings import BatchedMM, Experts, GroupedMM, changed
from torch import Tensor

import perseus_compile
from perseus_compile import observe


def clamped_and_masked(layer: GroupedMM, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Rows of ids from ``limit`` on count for nothing."""
    limit = layer.limit
    sorted_ids, permutation = layer.sort(ids.reshape(-1))
    rows = x[layer.row_tokens(permutation)]
    ends = layer.ends(sorted_ids)
    foreign = (sorted_ids >= limit).unsqueeze(-1)
    sorted_ids.clamp_(max=limit - 1)
    rows.masked_fill_(foreign, 0.0)
    hidden = layer.first(rows, sorted_ids, ends).masked_fill(foreign, 0.0)
    out = layer.second(layer.gate(hidden), sorted_ids, ends).masked_fill(foreign, 0.0)
    out = layer.weigh(out, weights.reshape(-1)[permutation])
    return layer.combine(out[layer.invert(permutation)], x)


def clamped(layer: BatchedMM, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return BatchedMM.experts(layer, x, ids.reshape(-1).clamp(0, layer.limit - 1), weights)


SPELLINGS = {"grouped": (GroupedMM, clamped_and_masked), "batched": (BatchedMM, clamped)}


def layer_with_limit(spelling: str, limit: int, *, bias: bool, **steps: object) -> Experts:
    def prepare(layer: Experts) -> None:
        layer.limit = limit

    base, experts = SPELLINGS[spelling]
    torch.manual_seed(0)
    return changed(base, experts=experts, prepare=prepare, **steps)(bias=bias)


def compile_and_compare(layer: Experts, *args: Tensor) -> observe.GraphReport:
    compiled = torch.compile(layer, backend=perseus_compile.perseus, options={"inner": "eager"})
    with observe.collect() as reports, torch.no_grad():
        torch.testing.assert_close(compiled(*args), layer(*args))
    (report,) = reports
    return report


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_steps_without_effect_are_read_through(spelling: str, bias: bool) -> None:
    report = compile_and_compare(layer_with_limit(spelling, 4, bias=bias), torch.randn(5, 8))
    assert [layer.op for layer in report.layers] == ["moe"]
    added = [line for line in report.graph_diff.splitlines() if line.startswith("+")]
    removed = [line for line in report.graph_diff.splitlines() if line.startswith("-")]
    assert not any("clamp" in line or "masked_fill" in line for line in added)
    assert any("clamp" in line for line in removed), "the idle clamp must go with its layer"


MASKED = (
    "aten.masked_fill_.Scalar (masked_fill_) masks rows, and the mask is not known to be False for all ids of a top-k"
)
CLAMPED = "aten.clamp.default (clamp) must leave expert ids as they are, got a clamp of {} to [0, {}]"


@pytest.mark.parametrize(
    ("spelling", "sentence"), [("grouped", MASKED), ("batched", CLAMPED.format("ids in [0, 4)", 2))]
)
def test_a_clamp_that_moves_ids_is_refused(spelling: str, sentence: str) -> None:
    report = compile_and_compare(layer_with_limit(spelling, 3, bias=True), torch.randn(5, 8))
    assert report.layers == []
    assert [refusal.reason for refusal in report.refusals] == [sentence]


@pytest.mark.parametrize(
    ("spelling", "sentence"), [("grouped", MASKED), ("batched", CLAMPED.format("ids of unknown range", 3))]
)
def test_ids_of_unknown_range_are_refused(spelling: str, sentence: str) -> None:
    def forward(layer: Experts, x: Tensor, ids: Tensor) -> Tensor:
        return layer.experts(x, ids, torch.ones(ids.shape))

    layer = layer_with_limit(spelling, 4, bias=True, forward=forward)
    ids = torch.tensor([[0, 3], [2, 1], [1, 1]])
    report = compile_and_compare(layer, torch.randn(3, 8), ids)
    assert report.layers == []
    assert [refusal.reason for refusal in report.refusals] == [sentence]
