"""explain(): every layer is accounted for, every break in a MoE layer comes with the line that cures it."""

from __future__ import annotations

import json

import pytest
import torch
from spellings import GroupedMM
from torch import Tensor, nn

import perseus_compile
from perseus_compile.explain import COMPILE, NOT_FOUND, PREPARE, REWRITE_LOOP, Report
from perseus_compile.testing.models import tiny_causal_lm

TOKENS = torch.arange(10).view(2, 5)


def _explain(model: nn.Module, *args: Tensor, **kwargs: object) -> Report:
    with torch.no_grad():
        return perseus_compile.explain(model, *args, **kwargs)


class LoopOverAll(nn.Module):
    """Hand-written experts, D = 16, E = 4: captured under the settings of perseus_compile.compile."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def hit(self, ids_TK: Tensor) -> list[int]:
        return list(range(4))

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, ids_TK = self.gate(x_TD).softmax(-1).topk(2, -1)
        out_TD = torch.zeros_like(x_TD)
        for expert in self.hit(ids_TK):
            token, choice = torch.where(ids_TK == expert)
            out_TD.index_add_(0, token, self.experts[expert](x_TD[token]) * weights_TK[token, choice, None])
        return out_TD


class LoopOverHit(LoopOverAll):
    """Visits only the experts that were hit: no setting of Dynamo captures that."""

    def hit(self, ids_TK: Tensor) -> list[int]:
        return ids_TK.flatten().unique().tolist()


class DenseSum(LoopOverAll):
    """Runs every expert on every token: captured, but not in a form that is recognised."""

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, ids_TK = self.gate(x_TD).softmax(-1).topk(2, -1)
        weights_TE = x_TD.new_zeros(x_TD.shape[0], 4).scatter(1, ids_TK, weights_TK)
        return sum(self.experts[expert](x_TD) * weights_TE[:, expert, None] for expert in range(4))


class Printing(nn.Module):
    def forward(self, x_TD: Tensor) -> Tensor:
        print("a break outside of every MoE layer")
        return x_TD + 1


def test_every_layer_is_rewritten() -> None:
    report = _explain(tiny_causal_lm("qwen3_moe"), TOKENS)
    assert [(row.layer, row.status, row.op, row.spelling) for row in report.layers] == [
        ("model.layers.0.mlp.experts", "rewritten", "moe", "grouped_mm"),
        ("model.layers.1.mlp.experts", "rewritten", "moe", "grouped_mm"),
    ]
    assert all(row.nodes_after < row.nodes_before for row in report.layers)
    assert "+" in report.layers[0].graph_diff and "perseus.moe" in report.layers[0].graph_diff
    assert report.graph_breaks == ()
    assert (report.num_graphs, report.num_moe_modules) == (1, 2)


def test_refused_layer_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_causal_lm("qwen3_moe", hidden_act="tanh")
    report = _explain(model, TOKENS)
    assert {row.status for row in report.layers} == {"refused"}
    assert all("tanh" in row.reason for row in report.layers)


def test_break_in_a_hugging_face_loop_asks_for_prepare() -> None:
    model = tiny_causal_lm("qwen3_moe", implementation="eager")
    report = _explain(model, TOKENS)
    inside = [row for row in report.graph_breaks if row.moe_layers]
    assert inside
    assert {row.advice for row in inside} == {PREPARE}
    assert inside[0].moe_layers == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    assert inside[0].location.startswith("modeling_qwen3_moe.py:")
    assert "nonzero" in inside[0].reason
    assert report.layers == ()

    # The advice works, in the same process: no frame that Dynamo gave up on is remembered.
    perseus_compile.prepare(model)
    cured = _explain(model, TOKENS)
    assert cured.graph_breaks == ()
    assert [row.status for row in cured.layers] == ["rewritten", "rewritten"]


@pytest.mark.parametrize(("block", "advice"), [(LoopOverAll, COMPILE), (LoopOverHit, REWRITE_LOOP)])
def test_break_in_a_hand_written_loop(block: type[nn.Module], advice: str) -> None:
    report = _explain(nn.Sequential(block(), block()), torch.randn(5, 16))
    inside = [row for row in report.graph_breaks if row.moe_layers]
    assert inside
    assert {row.advice for row in inside} == {advice}
    assert inside[0].moe_layers == ("0.experts", "1.experts")


def test_break_elsewhere_has_no_advice(capsys: pytest.CaptureFixture[str]) -> None:
    report = _explain(nn.Sequential(tiny_causal_lm("qwen3_moe").model.layers[0].mlp, Printing()), torch.randn(1, 5, 64))
    assert [row.advice for row in report.graph_breaks] == [None]
    assert report.graph_breaks[0].moe_layers == ()
    assert [row.status for row in report.layers] == ["rewritten"]
    assert capsys.readouterr().out.count("a break outside") == 1


def test_unrecognised_experts_are_named() -> None:
    report = _explain(nn.Sequential(DenseSum()), torch.randn(5, 16))
    assert report.graph_breaks == ()
    if report.layers[0].status == "not found":
        assert [(row.layer, row.reason) for row in report.layers] == [("0.experts", NOT_FOUND)]
    else:
        assert report.layers[0].status == "refused"


def test_functions_can_be_explained() -> None:
    model = tiny_causal_lm("qwen3_moe")
    with torch.no_grad():
        report = perseus_compile.explain(lambda tokens: model(tokens).logits.argmax(-1), TOKENS)
    assert [row.status for row in report.layers] == ["rewritten", "rewritten"]


def test_compiled_model_stays_compiled_and_counters_stay() -> None:
    model = tiny_causal_lm("qwen3_moe")
    calls = []

    def counting(gm: torch.fx.GraphModule, example_inputs: list) -> torch.fx.GraphModule:
        calls.append(gm)
        return gm

    model.compile(backend=counting)
    counters = {name: dict(counter) for name, counter in torch._dynamo.utils.counters.items()}
    report = _explain(model, TOKENS)
    assert [row.status for row in report.layers] == ["rewritten", "rewritten"]
    assert calls == []
    assert {name: dict(counter) for name, counter in torch._dynamo.utils.counters.items()} == counters
    model(TOKENS)
    assert len(calls) == 1


def test_compiled_copy_is_explained_under_the_names_of_the_model() -> None:
    report = _explain(torch.compile(tiny_causal_lm("qwen3_moe"), backend="eager"), TOKENS)
    assert [(row.layer, row.status) for row in report.layers] == [
        ("model.layers.0.mlp.experts", "rewritten"),
        ("model.layers.1.mlp.experts", "rewritten"),
    ]


def test_report_is_text_dict_and_json() -> None:
    report = _explain(tiny_causal_lm("qwen3_moe", num_layers=1), TOKENS)
    assert json.loads(report.to_json()) == json.loads(json.dumps(report.to_dict()))
    assert report.to_dict()["layers"][0]["op"] == "moe"
    assert "model.layers.0.mlp.experts" in str(report)
    assert str(report).endswith(
        "1 rewritten, 0 refused, 0 not found; modules that own experts: 1, graphs: 1, graph breaks: 0"
    )


def test_a_layer_has_one_name_whatever_self_is_called() -> None:
    class Around(nn.Module):
        def __init__(me) -> None:
            super().__init__()
            me.moe = GroupedMM()

        def forward(me, x_TD: Tensor) -> Tensor:
            return me.moe(x_TD)

    (layer,) = _explain(Around(), torch.randn(5, 8)).layers
    assert (layer.layer, layer.status) == ("moe", "rewritten")
