"""What is left out of the view changes nothing that is found, and is left out only where no rule could read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from spellings import GroupedMM
from torch import Tensor, nn
from torch.fx import GraphModule

from perseus_compile import capture, observe
from perseus_compile.backend import perseus
from perseus_compile.plain_nodes import plain_nodes
from perseus_compile.testing.models import random_tokens, tiny_causal_lm

X_BTD = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))


def _num_plain(call: Callable[..., Any], *args: Tensor) -> int:
    found: list[int] = []

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append(len(plain_nodes(gm.graph)))
        return gm.forward

    torch.compile(call, backend=backend, fullgraph=True)(*args)
    return found[0]


@pytest.mark.parametrize("model_type", ("qwen3_moe", "mixtral", "qwen2_moe"))
def test_the_same_layers_are_found(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_causal_lm(model_type)
    tokens = random_tokens(model, (2, 5))
    diffs = []
    for find in (plain_nodes, lambda graph: {}):
        torch._dynamo.reset()
        monkeypatch.setattr(capture, "plain_nodes", find)
        with torch.no_grad(), observe.collect() as graphs:
            torch.compile(model, backend=perseus, options={"inner": "eager"})(tokens, use_cache=False)
        diffs.append([(layer.op, layer.graph_diff) for graph in graphs for layer in graph.layers])
    assert diffs[0] == diffs[1] and len(diffs[0]) == 2


class Block(nn.Module):
    """A norm, experts on [T, D], and ``after`` with their output and the input, both [B, T, D]."""

    def __init__(self, after: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.linear, self.experts, self.after = nn.LayerNorm(8), nn.Linear(8, 8), GroupedMM(), after

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(self.norm(x)) * 2
        routed = self.experts(h.view(-1, 8)).view(h.shape)
        return self.norm(self.after(h, routed))


def test_a_residual_connection_is_no_end() -> None:
    assert _num_plain(Block(lambda h, routed: h + routed), X_BTD) == 5


def _written(h: Tensor, routed: Tensor) -> Tensor:
    h.add_(1)
    return h + routed


def _written_through_a_view(h: Tensor, routed: Tensor) -> Tensor:
    h.view(-1, 8).add_(1)
    return h + routed


@pytest.mark.parametrize(
    "after", (lambda h, routed: h * routed, _written, _written_through_a_view), ids=("product", "write", "view")
)
def test_everything_is_traced(after: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert _num_plain(Block(after), X_BTD) == 0


@pytest.mark.parametrize(("inplace", "num_plain"), [(False, 2), (True, 1)])
def test_functions_that_may_write_in_place(inplace: bool, num_plain: int) -> None:
    assert _num_plain(lambda x: torch.nn.functional.silu(x.mean(-1, keepdim=True), inplace=inplace), X_BTD) == num_plain


@pytest.mark.parametrize(("max_norm", "num_plain"), [(None, 2), (1.0, 0)])
def test_an_embedding_may_rescale_its_weight(max_norm: float | None, num_plain: int) -> None:
    embedding = nn.Embedding(6, 8, max_norm=max_norm)
    assert _num_plain(lambda ids: embedding(ids) * 2, torch.tensor([[0, 1], [2, 3]])) == num_plain


def test_what_a_choice_is_made_on_is_traced() -> None:
    def router(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, weight).softmax(-1).topk(2, dim=-1)[0]

    assert _num_plain(router, X_BTD, torch.randn(4, 8)) == 0
