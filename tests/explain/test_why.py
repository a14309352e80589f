"""explain --why: the chain of checks of one layer is what the stages asked, and ends where they stopped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from spellings import BatchedMM, Experts, GroupedMM, changed
from torch import Tensor, nn
from typer.testing import CliRunner

import perseus_compile
from perseus_compile import cli
from perseus_compile.explain import PREPARE, Report
from perseus_compile.facts import Check
from perseus_compile.passes import match_moe
from perseus_compile.testing.models import tiny_causal_lm

CONDITIONS_OF_MATCH = [
    "known gate",
    "weights agree",
    "shapes agree",
    "no autocast",
    "no transform",
    "one mode",
    "inner values unread",
    "writes",
    "whole values",
    "router can join",
]
CONDITIONS_OF_PLAN = ["device", "dtype", "op covers the experts"]


def _explain(layer: nn.Module) -> Report:
    with torch.no_grad():
        return perseus_compile.explain(nn.Sequential(nn.Identity(), layer), torch.randn(6, 8))


def _checks(layer: nn.Module) -> tuple[Check, ...]:
    (row,) = _explain(layer).layers
    return row.checks


def _names(checks: tuple[Check, ...]) -> list[str]:
    return [check.name for check in checks]


def test_a_rewritten_layer_passed_every_check() -> None:
    checks = _checks(GroupedMM())
    assert all(check.passed for check in checks)
    assert _names(checks)[-14:] == [*CONDITIONS_OF_MATCH, *CONDITIONS_OF_PLAN, "op covers the router"]
    rules = _names(checks)[:-14]
    assert rules[:4] == ["router logits", "softmax over experts", "top-k", "part of top-k"]
    assert rules[-1] == "sum over choices"
    assert rules.count("grouped GEMM") == 2
    assert [check.stage for check in checks] == ["match"] * (len(checks) - 4) + ["plan"] * 4
    first = checks[rules.index("gather rows")]
    assert first.node.startswith("aten.index.Tensor (")
    assert first.finding.startswith("TokenRows: [R, D]: the token of each routed row")


def _tanh_gate(layer: Experts, hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    return torch.tanh(gate) * up


def _wrong_choices(layer: GroupedMM, permutation: Tensor) -> Tensor:
    return permutation // (layer.top_k + 1)


def _shifted_ends(layer: GroupedMM, sorted_ids: Tensor) -> Tensor:
    return GroupedMM.ends(layer, sorted_ids).roll(1)


def _softplus_router(layer: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.topk(F.softplus(F.linear(x, layer.router)), layer.top_k, dim=-1)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (changed(GroupedMM, gate=_tanh_gate), "known gate"),
        (changed(GroupedMM, row_tokens=_wrong_choices), "token of a row"),
        (changed(GroupedMM, ends=_shifted_ends), "grouped GEMM"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refused_layer_ends_with_its_sentence(layer: Callable[[], nn.Module], name: str) -> None:
    (row,) = _explain(layer()).layers
    assert row.status == "refused"
    (failed,) = [check for check in row.checks if check.finding == row.reason]
    assert (failed.name, failed.passed) == (name, False)
    assert not set(CONDITIONS_OF_PLAN) & set(_names(row.checks)), "planning is not reached"


def test_a_step_that_no_rule_reads_is_in_the_chain() -> None:
    checks = _checks(changed(GroupedMM, ends=_shifted_ends)())
    unread = [check for check in checks if not check.passed and check.name == "-"]
    assert [check.node.split(" ")[0] for check in unread] == ["aten.roll.default"]
    assert unread[0].finding == "no rule gives it a meaning"


def test_a_router_that_stays_apart_says_why() -> None:
    (row,) = _explain(changed(BatchedMM, route=_softplus_router)()).layers
    (failed,) = [check for check in row.checks if not check.passed]
    assert failed.name == "router can join"
    assert row.reason == f"experts alone: {failed.finding}"
    assert _names(row.checks)[-3:] == CONDITIONS_OF_PLAN


def test_the_chain_is_what_the_matcher_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """A condition made wrong on purpose is where the chain ends."""
    monkeypatch.setattr(match_moe, "weights_reason", lambda *_: "a sentence of this test")
    last = _checks(GroupedMM())[-1]
    assert (last.name, last.passed, last.finding) == ("weights agree", False, "a sentence of this test")


def test_layers_do_not_share_checks() -> None:
    """The second layer reads the sum of the first one directly; its chain begins at that sum."""
    with torch.no_grad():
        report = perseus_compile.explain(nn.Sequential(BatchedMM(), BatchedMM()), torch.randn(6, 8))
    first, second = report.layers
    assert _names(first.checks) == _names(second.checks)
    assert not {check.node for check in first.checks if check.node} & {c.node for c in second.checks if c.node}


def test_why_as_text() -> None:
    text = _explain(changed(GroupedMM, gate=_tanh_gate)()).why("1")
    assert "known gate" in text and "mul(tanh(first), second)" in text
    assert "1: refused: the gate between the two expert linears must be one of" in text


def test_an_unknown_layer_is_an_error() -> None:
    report = _explain(BatchedMM())
    with pytest.raises(perseus_compile.OptionError, match=r"one of the model's MoE layers \(1\).*got '7'"):
        report.why("7")


def test_why_of_a_layer_with_a_graph_break() -> None:
    model = tiny_causal_lm("qwen3_moe", num_layers=1, implementation="eager")
    with torch.no_grad():
        text = perseus_compile.explain(model, torch.arange(10).view(2, 5)).why("model.layers.0.mlp.experts")
    assert PREPARE in text


def test_command_prints_the_chain() -> None:
    result = CliRunner().invoke(cli.app, ["explain", "qwen3_moe", "--layers", "1", "--why", "model.layers.0"])
    assert result.exit_code == 0, result.output
    for expected in ("router logits", "grouped GEMM", *CONDITIONS_OF_MATCH, *CONDITIONS_OF_PLAN):
        assert expected in result.output
    assert "model.layers.0.mlp.experts: rewritten to perseus::moe: router and experts are one node" in result.output
