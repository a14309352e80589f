"""prepare(): switches what runs in a loop, leaves alone what is capturable, says what to do where it cannot."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import perseus_compile
from perseus_compile import observe
from perseus_compile.errors import GroupError
from perseus_compile.moe_modules import find_moe_modules
from perseus_compile.testing.families import find_families, inputs_of, tiny_model
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


class _InterleavedExperts(nn.Module):
    """The parameters and arguments of a loop over hit experts in transformers, but gate and up rows take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.randn(4, 16, 8)), nn.Parameter(torch.randn(4, 8, 8))
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out_TD = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            tokens_N, choices_N = torch.where(top_k_index == expert)
            hidden = hidden_states[tokens_N] @ self.gate_up_proj[expert].T
            y_ND = (self.act_fn(hidden[:, ::2]) * hidden[:, 1::2]) @ self.down_proj[expert].T
            out_TD.index_add_(0, tokens_N, y_ND * top_k_weights[tokens_N, choices_N, None])
        return out_TD


def test_other_code_with_the_same_parameters_is_left_alone() -> None:
    x_TD, ids_TK, weights_TK = torch.randn(5, 8), torch.randint(4, (5, 2)), torch.rand(5, 2)
    experts = _InterleavedExperts()
    expected = experts(x_TD, ids_TK, weights_TK)
    with pytest.raises(perseus_compile.UnsupportedMoE, match="_InterleavedExperts, 4 experts"):
        perseus_compile.prepare(experts)
    torch.testing.assert_close(experts(x_TD, ids_TK, weights_TK), expected)


# Families whose loop runs over the experts that were hit, and how many layers of the tiny model are rewritten.
LOOPED = {"dbrx": 2, "jetmoe": 2, "longcat_flash": 2, "nllb-moe": 4, "step3p5": 1, "switch_transformers": 4}


@pytest.mark.parametrize("name", LOOPED)
def test_loop_over_hit_experts(name: str) -> None:
    """The same numbers from the same state dict, and one node for each layer's experts."""
    families = {family.name: family for family in find_families()}
    if name not in families:
        pytest.skip(f"this transformers has no {name}")
    model = tiny_model(families[name]).eval()
    names, inputs = list(model.state_dict()), inputs_of(model, num_tokens=7)
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad(), observe.collect() as graphs:
        expected = model(**inputs)[0]
        perseus_compile.prepare(model)
        assert list(model.state_dict()) == names
        torch.testing.assert_close(model(**inputs)[0], expected, rtol=1e-4, atol=1e-5)
        compiled = perseus_compile.compile(model, inner="eager")
        torch.testing.assert_close(compiled(**inputs)[0], expected, rtol=1e-4, atol=1e-5)
    num_rewritten, refused = sum(len(graph.layers) for graph in graphs), [graph.refusals for graph in graphs]
    assert not any(refused)
    if counters["graph_break"]:  # elsewhere in models of transformers before 5.24: one graph then serves several layers
        assert num_rewritten >= 1
    else:
        assert num_rewritten == LOOPED[name]


def test_forward_in_training_is_the_same() -> None:
    """Every expert sees the gradients that it had before."""
    families = {family.name: family for family in find_families()}
    if "step3p5" not in families:
        pytest.skip("this transformers has no step3p5")
    model = tiny_model(families["step3p5"]).train()
    prepared = perseus_compile.prepare(copy.deepcopy(model))
    inputs = inputs_of(model, num_tokens=7)
    for network in (model, prepared):
        network(**inputs)[0].square().mean().backward()
    for (name, one), (_, other) in zip(model.named_parameters(), prepared.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


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


def test_a_name_is_no_process_group() -> None:
    with pytest.raises(GroupError, match=r"ep_group must be a process group, .* got 'ranks'"):
        perseus_compile.prepare(nn.Linear(1, 1), "ranks")  # type: ignore[arg-type]
