"""Steps of an optimizer: gradients accumulate, frozen parameters stay, and nothing is compiled again for either."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from eager_twin import assert_same_gradients, outcome_of, train_beside_eager, weighted_sum
from spellings import BatchedMM, Experts, GroupedMM
from torch import Tensor, nn

from perseus_compile import observe
from perseus_compile.backend import perseus
from perseus_compile.testing.models import tiny_causal_lm

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
STACKED = ("gate_up", "down", "gate_up_bias", "down_bias")


def _loss(model: nn.Module) -> Tensor:
    return weighted_sum(model(X))


@pytest.mark.parametrize("spelling", (GroupedMM, BatchedMM))
def test_gradients_accumulate(spelling: type[Experts]) -> None:
    torch.manual_seed(0)
    outcome = train_beside_eager(spelling(bias=True), _loss, num_backwards=3)
    assert (outcome.ops, outcome.graphs) == (["moe"], 1)


@pytest.mark.parametrize("set_to_none", (True, False))
def test_steps_of_an_optimizer(set_to_none: bool) -> None:
    """Two steps of two micro-batches each move the parameters as in eager, by one graph."""
    torch.manual_seed(0)
    model = GroupedMM(bias=True)
    twin = copy.deepcopy(model)
    model.compile(backend=perseus, options={"inner": "aot_eager"})
    with observe.collect() as graphs:
        for each in (model, twin):
            optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
            for _ in range(2):
                optimizer.zero_grad(set_to_none=set_to_none)
                for micro_batch in (X, -2 * X):
                    weighted_sum(each(micro_batch)).backward()
                optimizer.step()
    torch.testing.assert_close(dict(model.named_parameters()), dict(twin.named_parameters()))
    assert [len(graph.layers) for graph in graphs] == [1]


@pytest.mark.parametrize("spelling", (GroupedMM, BatchedMM))
@pytest.mark.parametrize("frozen", [*((name,) for name in STACKED), STACKED], ids=lambda names: "+".join(names))
def test_frozen_experts(frozen: tuple[str, ...], spelling: type[Experts]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), spelling(bias=True))
    for name in frozen:
        getattr(model[1], name).requires_grad_(False)
    assert train_beside_eager(model, _loss).ops == ["moe"]


def test_experts_frozen_between_steps() -> None:
    """Freezing is seen: the graph that differentiated the experts is not used again."""
    torch.manual_seed(0)
    model = BatchedMM()
    twin = copy.deepcopy(model)
    model.compile(backend=perseus, options={"inner": "aot_eager"})
    with observe.collect() as graphs:
        for each in (model, twin):
            _loss(each).backward()
            each.gate_up.requires_grad_(False)
            each.zero_grad()
            _loss(each).backward()
    assert model.gate_up.grad is None
    assert_same_gradients(model, twin)
    assert set(outcome_of(graphs).ops) == {"moe"}


def test_only_the_router_of_a_hugging_face_model_trains() -> None:
    model = tiny_causal_lm("qwen3_moe").train().requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.gate.requires_grad_(True)
    ids = torch.arange(12).view(2, 6)
    outcome = train_beside_eager(model, lambda each: each(ids, labels=ids, use_cache=False).loss)
    assert outcome.ops == ["moe", "moe"]
    trained = {name for name, each in model.named_parameters() if each.grad is not None and each.grad.any()}
    assert trained == {f"model.layers.{index}.mlp.gate.weight" for index in range(2)}


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations((True, False))))
def test_evaluation_between_steps(first: bool, second: bool) -> None:
    """A graph with gradients and one without serve the same model in turn."""
    torch.manual_seed(0)
    model = BatchedMM()
    twin = copy.deepcopy(model)
    model.compile(backend=perseus, options={"inner": "aot_eager"})
    with observe.collect() as graphs:
        for grad in (first, second, first):
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close(model(X), twin(X))
    assert outcome_of(graphs).ops == ["moe", "moe"]
