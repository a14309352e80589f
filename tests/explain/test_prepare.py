"""prepare(): switches what runs in a loop, leaves alone what is capturable, says what to do where it cannot."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import perseus_compile
from perseus_compile.moe_modules import find_moe_modules
from perseus_compile.testing.models import MODEL_TYPES, tiny_causal_lm


def _implementation(model: nn.Module) -> str:
    return model.get_experts_implementation()[""]


def test_loop_becomes_one_graph_with_the_same_numbers() -> None:
    model = tiny_causal_lm("qwen3_moe", implementation="eager")
    tokens = torch.arange(10).view(2, 5)
    with torch.no_grad():
        expected = model(tokens).logits
        assert perseus_compile.prepare(model) is model
        torch.testing.assert_close(model(tokens).logits, expected)
        compiled = torch.compile(model, backend="perseus", options={"inner": "eager"}, fullgraph=True)
        torch.testing.assert_close(compiled(tokens).logits, expected)
    assert _implementation(model) == "grouped_mm"


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_capturable_model_is_left_alone(implementation: str) -> None:
    model = tiny_causal_lm("qwen3_moe", implementation=implementation)
    perseus_compile.prepare(model)
    assert _implementation(model) == implementation


def test_model_inside_a_wrapper_is_switched() -> None:
    wrapped = nn.Sequential(tiny_causal_lm("qwen3_moe", implementation="eager"))
    perseus_compile.prepare(wrapped)
    assert _implementation(wrapped[0]) == "grouped_mm"


def test_dense_model_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 1), nn.Conv1d(4, 8, 1))
    assert perseus_compile.prepare(model) is model


class _ListedExperts(nn.Module):
    """The older way: a router beside a list of expert modules."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))


def test_model_without_a_switch_is_told_what_to_do() -> None:
    model = nn.Sequential(_ListedExperts())
    with pytest.raises(perseus_compile.UnsupportedMoE) as caught:
        perseus_compile.prepare(model)
    assert str(caught.value) == (
        "prepare() needs a model that offers set_experts_implementation for its MoE layers (Hugging Face transformers "
        ">= 5.0), got Sequential whose layer '0.experts' (ModuleList, 4 experts) offers none. Compile it with "
        "perseus_compile.compile(model), which can capture loops over range(num_experts), and see "
        "perseus_compile.explain(model, ...) for what is left"
    )


def test_refused_switch_keeps_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_causal_lm("qwen3_moe", implementation="eager")

    def refuse(implementation: str) -> None:
        raise ValueError(f"{implementation} is not for you")

    monkeypatch.setattr(model, "set_experts_implementation", refuse)
    with pytest.raises(perseus_compile.UnsupportedMoE, match="grouped_mm is not for you"):
        perseus_compile.prepare(model)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_modules_that_own_experts_are_found_by_structure(model_type: str) -> None:
    model = tiny_causal_lm(model_type, num_layers=3)
    num_dense = 1 if model_type in ("deepseek_v3", "glm4_moe") else 0
    found = find_moe_modules(model)
    assert [layer.path for layer in found] == [f"model.layers.{i}.mlp.experts" for i in range(num_dense, 3)]
    assert {layer.num_experts for layer in found} == {8}
