"""Experts whose outputs go through a step of their own before they are weighted: the experts alone become one node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from near_miss import Case, check, layer_of
from spellings import BatchedMM, Experts, GroupedMM, changed
from torch import Tensor

from perseus_compile import observe
from perseus_compile.backend import perseus

ALONE = "experts: aten.layer_norm.default comes between the experts and their routing weights"
LOST = "refused: aten.layer_norm.default has no meaning between the expert linears and the sum over choices"


def normed(spelling: type[Experts]) -> Any:
    return lambda layer, rows, weights: spelling.weigh(layer, F.layer_norm(rows, rows.shape[1:]), weights)


@pytest.mark.parametrize("dynamic", (None, True))
@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("layout", ("out_in", "in_out"))
@pytest.mark.parametrize("spelling", (GroupedMM, BatchedMM))
def test_it_matches(spelling: type[Experts], layout: str, bias: bool, dynamic: bool | None) -> None:
    options = {"layout": layout, "bias": bias, "width": 8, "expert_width": 8}
    check(Case("norm", layer_of(spelling, options=options, weigh=normed(spelling)), ALONE, dynamic=dynamic))


def test_a_step_after_the_rows_are_back_in_choice_order() -> None:
    """The op ends before the rows change their order, since it returns them in the order in which it gets them."""

    def experts(layer: GroupedMM, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        sorted_ids, permutation = layer.sort(ids.reshape(-1))
        ends = layer.ends(sorted_ids)
        hidden = layer.first(x[layer.row_tokens(permutation)], sorted_ids, ends)
        out = layer.second(layer.gate(hidden), sorted_ids, ends)[layer.invert(permutation)]
        return layer.combine(layer.weigh(F.layer_norm(out, (8,)), weights.reshape(-1)), x)

    check(Case("norm in choice order", layer_of(GroupedMM, experts=experts), ALONE))


@pytest.mark.parametrize("spelling", (GroupedMM, BatchedMM))
def test_verified_and_checked(spelling: type[Experts]) -> None:
    """The options that look at ids see them as columns of one choice."""
    torch.manual_seed(0)
    layer = changed(spelling, weigh=normed(spelling))()
    x = torch.randn(5, 8)
    options = {"inner": "eager", "verify": True, "debug": True}
    compiled = torch.compile(layer, backend=perseus, options=options)
    with observe.collect() as reports, torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))
    assert [found.op for report in reports for found in report.layers] == ["experts"]


def test_negative_ids_wrap() -> None:
    """Ids that index the weights directly count from the last expert where they are negative."""

    def route(layer: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = Experts.route(layer, x)
        return weights, ids - layer.num_experts

    check(Case("negative ids", layer_of(BatchedMM, route=route, weigh=normed(BatchedMM)), ALONE))


def seen_from_outside(layer: Experts, x: Tensor) -> Tensor:
    return BatchedMM.forward(layer, x) + layer.seen.mean()


def remember(layer: Experts, hidden: Tensor) -> Tensor:
    layer.seen = hidden
    return BatchedMM.gate(layer, hidden)


def outputs_of_other_width(layer: Experts) -> None:
    layer.down = torch.nn.Parameter(layer._stack(2 * layer.width, 12))


NEAR_MISSES = (
    Case(
        "an inner value has another reader",
        layer_of(BatchedMM, forward=seen_from_outside, gate=remember, weigh=normed(BatchedMM)),
        LOST,
    ),
    Case(
        "no known gate",
        layer_of(GroupedMM, gate=lambda m, h: h.chunk(2, dim=-1)[0], weigh=normed(GroupedMM)),
        LOST,
    ),
    Case(
        "outputs of another width",
        layer_of(
            BatchedMM,
            prepare=outputs_of_other_width,
            weigh=normed(BatchedMM),
            combine=lambda m, rows, x: rows.view(x.shape[0], m.top_k, -1).sum(dim=1),
        ),
        LOST,
    ),
    Case(
        "outputs in a wider dtype",
        layer_of(BatchedMM, second=lambda m, rows, ids, ends: BatchedMM.second(m, rows, ids, ends).double(),
                 weigh=lambda m, rows, weights: F.layer_norm(rows, (8,)).float() * weights.unsqueeze(-1)),
        ALONE,
    ),
)  # fmt: skip


@pytest.mark.parametrize("case", NEAR_MISSES, ids=lambda case: case.name)
def test_it_nearly_matches(case: Case) -> None:
    check(case)
