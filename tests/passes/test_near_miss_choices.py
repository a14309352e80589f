"""Loops over the choices of a token that are nearly one layer of all choices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import ChoiceLoop, Hits, StackedChoiceLoop
from near_miss import Case, check
from spellings import changed
from torch import Tensor

from perseus_compile.backend import CAPTURE_SETTINGS

LISTED = "experts: the weights of the experts are separate tensors"


def loop_of(**steps: Any) -> Any:
    return lambda: changed(ChoiceLoop, **steps)()


def with_choices(*given: tuple[int, int], num_experts: Any = lambda choice: 4) -> Any:
    """A loop over the choices, each with the column of its ids and that of its weights."""

    def loop(layer: ChoiceLoop, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = layer.begin(x)
        for choice, column in given:
            for expert in range(num_experts(choice)):
                total = layer.add_choice(total, x, ids[:, choice], weights[:, column], expert)
        return total

    return loop


def scaled_weights(layer: ChoiceLoop, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    total = layer.begin(x)
    for choice in range(layer.top_k):
        of_choice = weights[:, choice] if choice == 0 else weights[:, choice] * 2
        for expert in range(layer.num_experts):
            total = layer.add_choice(total, x, ids[:, choice], of_choice, expert)
    return total


def other_expert(layer: ChoiceLoop, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    total = layer.begin(x)
    for choice in range(layer.top_k):
        for expert in range(layer.num_experts):
            hits = layer.hits(ids[:, choice], expert)
            rows = layer.expert((expert + choice) % layer.num_experts, layer.rows(x, hits))
            total = layer.add(total, layer.weigh(rows, weights[:, choice], hits), hits)
    return total


class FewerExperts(StackedChoiceLoop):
    """The stacks hold one expert more than the loop has."""

    def prepare(self) -> None:
        self.num_experts -= 1


def replaced(layer: ChoiceLoop, total: Tensor, rows: Tensor, hits: Hits) -> Tensor:
    total[hits] = rows
    return total


NEAR_MISSES = (
    Case(
        "a choice is left out",
        lambda: changed(ChoiceLoop, loop=with_choices((0, 0), (1, 1)))(top_k=3),
        "refused: the sum is over the choices [0, 1] of a token, and a token has 3",
    ),
    Case(
        "a choice is added twice",
        loop_of(loop=with_choices((0, 0), (1, 1), (0, 0))),
        "refused: expert 3 is added twice to one sum",
    ),
    Case("choices in another order", loop_of(loop=with_choices((1, 1), (0, 0))), LISTED),
    Case(
        "the weights of the other choice",
        loop_of(loop=with_choices((0, 1), (1, 0))),
        "refused: expert 3 is weighted by other weights than those of choice 1",
    ),
    Case(
        "the weights of one choice are scaled",
        loop_of(loop=scaled_weights),
        "refused: expert 3 is weighted by other weights than those of choice 1",
    ),
    Case(
        "fewer experts for one choice",
        loop_of(loop=with_choices((0, 0), (1, 1), num_experts=lambda choice: 4 - choice)),
        "refused: choice 0 has other experts than choice 1",
    ),
    Case(
        "another expert for one choice",
        loop_of(loop=other_expert),
        "refused: expert 3 computes something else for choice 0",
    ),
    Case(
        "entries of larger stacks for each choice",
        FewerExperts,
        "refused: aten.select.int takes the weights of an expert from their stack once more",
    ),
    Case(
        "one choice replaces the other",
        loop_of(add=replaced),
        "refused: the outputs for one choice of a token replace those for another",
    ),
)


@pytest.mark.parametrize("case", NEAR_MISSES, ids=lambda case: case.name)
def test_near_miss(case: Case) -> None:
    with torch._dynamo.config.patch(CAPTURE_SETTINGS):
        check(case)
