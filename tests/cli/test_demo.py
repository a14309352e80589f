"""perseus demo, on a model small enough for a test."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from perseus_compile import cli
from perseus_compile.cli import demo
from perseus_compile.testing.models import small_sizes


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_SIZES", small_sizes("qwen3_moe"))
    monkeypatch.setattr(demo, "_NUM_LAYERS", 1)
    monkeypatch.setattr(demo, "_NEW_TOKENS", 3)
    monkeypatch.setattr(demo, "_ERROR_DTYPES", (torch.float32,))
    torch._dynamo.utils.counters.clear()


@pytest.mark.slow
def test_demo_shows_table_diff_errors_and_speed(small_demo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_BACKENDS", ("eager", "perseus"))
    result = CliRunner().invoke(cli.app, ["demo"])
    assert result.exit_code == 0, result.output
    assert "1 rewritten, 0 refused, 0 not found" in result.output
    assert result.output.count("+%moe_default") == 1
    assert "Error of the logits against float64 eager" in result.output
    speed = result.output.partition("tokens/s")[2]
    assert [line.split()[1] for line in speed.splitlines() if "100%" in line] == ["eager", "perseus"]


@pytest.mark.slow
def test_demo_fails_if_nothing_was_rewritten(small_demo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_SIZES", {**small_sizes("qwen3_moe"), "hidden_act": "tanh"})
    monkeypatch.setattr(demo, "_BACKENDS", ("eager",))
    result = CliRunner().invoke(cli.app, ["demo"])
    assert result.exit_code == 1
    assert "perseus compiled no graph, or rewrote no layer" in result.output
