"""Layers that choose by top-k and weight outputs of experts, but in a way that no rule follows: they get a sentence.

Axes: B sequences, T tokens, K choices per token, E experts, D model width.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from loops import GatedMLP
from torch import Tensor, nn

from perseus_compile import observe
from perseus_compile.backend import CAPTURE_SETTINGS, perseus

FLATTEN = "flatten the tokens before the router"
NO_RULE = "in a way that no rule knows"


class Layer(nn.Module):
    """Scores of 4 experts for x [..., D], and what ``combine`` makes of them."""

    def __init__(self, combine: Callable[[Layer, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(GatedMLP(8, 12, bias=False) for _ in range(4))
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        return self.combine(self, x, self.router(x))


def dense(layer: Layer, x_BTD: Tensor, scores_BTE: Tensor) -> Tensor:
    weights, ids = scores_BTE.softmax(-1).topk(2, -1)
    dense_BTE = torch.zeros_like(scores_BTE).scatter(-1, ids, weights)
    return sum(expert(x_BTD) * dense_BTE[..., i, None] for i, expert in enumerate(layer.experts))


def at_places(layer: Layer, x_BTD: Tensor, scores_BTE: Tensor) -> Tensor:
    weights, ids = scores_BTE.softmax(-1).topk(2, -1)
    out = torch.zeros_like(x_BTD)
    for i, expert in enumerate(layer.experts):
        rows, tokens, choices = torch.where(ids == i)
        outputs = expert(x_BTD[rows, tokens]) * weights[rows, tokens, choices, None]
        out = out.index_put((rows, tokens), outputs, accumulate=True)
    return out


def softmax_of_chosen(layer: Layer, x_TD: Tensor, scores_TE: Tensor) -> Tensor:
    best, ids = scores_TE.topk(2, -1)
    dense_TE = torch.full_like(scores_TE, float("-inf")).scatter(-1, ids, best).softmax(-1)
    return sum(expert(x_TD) * dense_TE[:, i, None] for i, expert in enumerate(layer.experts))


def chosen_of_all(layer: Layer, x_TD: Tensor, scores_TE: Tensor) -> Tensor:
    weights, ids = scores_TE.softmax(-1).topk(2, -1)
    outputs = torch.stack([expert(x_TD) for expert in layer.experts], dim=1)
    return (outputs.gather(1, ids[..., None].expand(-1, -1, 8)) * weights[..., None]).sum(1)


def one_map(layer: Layer, x_TD: Tensor, scores_TE: Tensor) -> Tensor:
    """Not experts: a scale of one linear map."""
    return layer.experts[0](x_TD) * scores_TE.topk(2, -1).values.sum(-1, keepdim=True)


def sampling(layer: Layer, x_TD: Tensor, scores_TE: Tensor) -> Tensor:
    """Not experts: what top-k makes goes through a linear map before anything is multiplied with it."""
    best = F.pad(scores_TE.topk(2, -1).values, (0, 6))
    return layer.experts[0](best) * layer.experts[1](x_TD)


def _reasons(combine: Callable[[Layer, Tensor, Tensor], Tensor], shape: tuple[int, ...]) -> list[str]:
    layer, x = Layer(combine), torch.randn(shape)
    with torch.no_grad(), torch._dynamo.config.patch(CAPTURE_SETTINGS), observe.collect() as reports:
        compiled = torch.compile(layer, backend=perseus, options={"inner": "eager"})
        torch.testing.assert_close(compiled(x), layer(x))
    assert not any(report.layers for report in reports)
    return [refusal.reason for report in reports for refusal in report.refusals]


@pytest.mark.parametrize("combine", (dense, at_places))
def test_tokens_with_two_axes(combine: Callable[[Layer, Tensor, Tensor], Tensor]) -> None:
    (reason,) = _reasons(combine, (2, 3, 8))
    assert "scores with 3 axes" in reason and FLATTEN in reason


@pytest.mark.parametrize("combine", (softmax_of_chosen, chosen_of_all))
def test_weights_that_no_rule_knows(combine: Callable[[Layer, Tensor, Tensor], Tensor]) -> None:
    (reason,) = _reasons(combine, (5, 8))
    assert reason.endswith(NO_RULE)


@pytest.mark.parametrize("combine", (one_map, sampling))
def test_a_choice_that_is_of_no_experts(combine: Callable[[Layer, Tensor, Tensor], Tensor]) -> None:
    assert _reasons(combine, (5, 8)) == []
