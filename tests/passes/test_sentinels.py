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


def two_largest(layer: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
    """The best expert, and the best of the others, each found by a maximum."""
    scores = torch.softmax(torch.nn.functional.linear(x, layer.router), dim=-1)
    weights, ids = scores.max(dim=-1, keepdim=True)
    others, other_ids = scores.scatter(-1, ids, -torch.inf).max(dim=-1, keepdim=True)
    return torch.cat([weights, others], dim=-1), torch.cat([ids, other_ids], dim=-1)


def class_that_is_no_expert(layer: Experts, x: Tensor, *, replaced: int = 4, by: int = 0) -> tuple[Tensor, Tensor]:
    """The last of five classes computes nothing: its choices go to an expert with the weight zero."""
    scores = torch.nn.functional.pad(torch.nn.functional.linear(x, layer.router), (0, 1)).sigmoid()
    weights, ids = scores.topk(2, dim=-1)
    skipped = ids == replaced
    return weights.masked_fill(skipped, 0.0), ids.masked_fill(skipped, by)


def moved_later(layer: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = Experts.route(layer, x)
    ids.add_(1)
    return weights, ids


@pytest.mark.parametrize("route", (two_largest, class_that_is_no_expert), ids=lambda route: route.__name__)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_ids_that_are_known_by_other_steps(spelling: str, route: object) -> None:
    report = compile_and_compare(layer_with_limit(spelling, 4, bias=True, route=route), torch.randn(5, 8))
    assert [layer.op for layer in report.layers] == ["experts"]


def no_expert_kept(layer: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
    return class_that_is_no_expert(layer, x, replaced=3)


def replaced_by_itself(layer: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
    return class_that_is_no_expert(layer, x, by=4)


def mask_written_later(layer: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.nn.functional.pad(torch.nn.functional.linear(x, layer.router), (0, 1)).sigmoid()
    weights, ids = scores.topk(2, dim=-1)
    skipped = ids == 4
    skipped[:, 1] = False
    return weights.masked_fill(ids == 4, 0.0), ids.masked_fill(skipped, 0)


@pytest.mark.parametrize(
    ("route", "ids"),
    [
        (mask_written_later, "ids in [0, 5)"),
        (moved_later, "ids of unknown range"),
        (no_expert_kept, "ids in [0, 5)"),
        (replaced_by_itself, "ids in [0, 5)"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_ids_that_may_be_out_of_range(route: object, ids: str) -> None:
    report = compile_and_compare(layer_with_limit("batched", 4, bias=True, route=route), torch.randn(5, 8))
    assert report.layers == []
    assert [refusal.reason for refusal in report.refusals] == [CLAMPED.format(ids, 3)]
