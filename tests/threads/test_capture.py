"""Public threads about models that could not be captured. Each test is named by its thread; the inputs are our own."""

from __future__ import annotations

import copy

import pytest
import torch
from eager_twin import outcome_of, train_beside_eager, weighted_sum
from hand_written_loops import HitLoop, NumelLoop
from loops import ExpertLoop
from torch import Tensor, nn

import perseus_compile
from perseus_compile import observe
from perseus_compile.backend import perseus
from perseus_compile.explain import REWRITE_LOOP
from perseus_compile.testing.families import find_families, inputs_of, tiny_model
from perseus_compile.testing.models import tiny_causal_lm

IDS = torch.arange(12).view(2, 6)
X = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))


def _family_model(name: str) -> nn.Module:
    families = {family.name: family for family in find_families()}
    if name not in families:
        pytest.skip(f"the installed transformers has no {name}")
    return tiny_model(families[name])


def _advice(layer: ExpertLoop) -> set[str | None]:
    with torch.no_grad():
        report = perseus_compile.explain(nn.Sequential(layer), X)
    return {each.advice for each in report.graph_breaks if each.moe_layers}


@pytest.mark.parametrize("name", ("hunyuan_v1_moe", "mixtral", "qwen2_moe"))
def test_transformers_40421(name: str) -> None:
    """The loop over the experts that were hit dies under fullgraph: prepared, generate is captured whole, and equal."""
    model = _family_model(name)
    model.set_experts_implementation("eager")
    settings = {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(IDS, **settings)
    perseus_compile.prepare(model).compile(backend=perseus, fullgraph=True, options={"inner": "eager"})
    with observe.collect() as graphs:
        assert torch.equal(model.generate(IDS, **settings), expected)
    outcome = outcome_of(graphs)
    assert set(outcome.ops) == {"moe"} and outcome.refusals == []


def test_transformers_39012_model() -> None:
    """DeepSeek-V3 trains under compile, in one graph."""
    model = tiny_causal_lm("deepseek_v3", implementation="eager").train()
    step = perseus_compile.prepare(model)
    outcome = train_beside_eager(step, lambda each: each(IDS, labels=IDS, use_cache=False).loss, fullgraph=True)
    assert (outcome.ops, outcome.refusals) == (["moe"], [])


@pytest.mark.parametrize("loop", (NumelLoop, HitLoop))
def test_transformers_39012_unsloth_3712_loop(loop: type[ExpertLoop]) -> None:
    """A branch on a count, an index by a tensor: the numbers hold, and explain says how the loop can be captured."""
    torch.manual_seed(0)
    layer = loop()
    expected = layer(X)
    assert _advice(layer) == {REWRITE_LOOP}
    torch.testing.assert_close(perseus_compile.compile(copy.deepcopy(layer), inner="aot_eager")(X), expected)


def test_unsloth_3712_model() -> None:
    """Qwen3-VL-MoE in its own loop, prepared."""
    model = _family_model("qwen3_vl_moe_text")
    model.set_experts_implementation("eager")
    inputs = inputs_of(model, num_tokens=6)
    with torch.no_grad(), observe.collect() as graphs:
        expected = model(**inputs)[0]
        perseus_compile.prepare(model).compile(backend=perseus, fullgraph=True, options={"inner": "eager"})
        torch.testing.assert_close(model(**inputs)[0], expected, rtol=1e-4, atol=1e-5)
    assert outcome_of(graphs).ops == ["moe", "moe"]


def test_transformers_30793() -> None:
    """``torch.where`` per expert needs settings of Dynamo: compile() sets them around the call alone."""
    torch.manual_seed(0)
    layer = ExpertLoop()
    expected = layer(X)
    settings = ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")
    before = {name: getattr(torch._dynamo.config, name) for name in settings}
    assert before == dict.fromkeys(settings, False)
    compiled = perseus_compile.compile(copy.deepcopy(layer), inner="aot_eager")
    with observe.collect() as graphs:
        torch.testing.assert_close(compiled(X), expected)
    assert len(graphs) == 1
    assert outcome_of(graphs).ops == ["experts_list"]
    assert {name: getattr(torch._dynamo.config, name) for name in settings} == before


def test_transformers_38518() -> None:
    """Mixtral can be exported, and the exported program is rewritten as the model is."""
    model = tiny_causal_lm("mixtral", implementation="eager").eval()
    perseus_compile.prepare(model)

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(ids, use_cache=False).logits

    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
        exported = torch.export.export(Logits(), (IDS,)).module()
        torch.testing.assert_close(exported(IDS), expected)
        with observe.collect() as graphs:
            compiled = torch.compile(exported, backend=perseus, options={"inner": "eager"})
            torch.testing.assert_close(compiled(IDS), expected)
    outcome = outcome_of(graphs)
    assert len(outcome.ops) == 2 and outcome.refusals == []


def test_torchtitan_1364() -> None:
    """Experts without tokens are ordinary: steps that use one, two or all experts share one graph, with gradients."""
    model = tiny_causal_lm("deepseek_v3", num_layers=2).model.layers[1].mlp.train()
    twin = copy.deepcopy(model)
    model.compile(backend=perseus, dynamic=True, options={"inner": "aot_eager"})
    tokens = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1))
    with observe.collect() as graphs:
        for used in (1, 2, 15):
            x = tokens.view(1, 15, 64)[:, torch.arange(15) % used]  # equal tokens choose equal experts
            for each in (model, twin):
                weighted_sum(each(x)).backward()
            torch.testing.assert_close(model(x), twin(x))
    torch.testing.assert_close(
        *({name: each.grad for name, each in one.named_parameters()} for one in (model, twin)), rtol=1e-4, atol=1e-5
    )
    assert [len(graph.layers) for graph in graphs] == [1]
