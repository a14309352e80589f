"""perseus demo and bench compile, on models small enough for a test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from perseus_compile import cli
from perseus_compile.cli import demo
from perseus_compile.testing import bench_compile, bench_moe
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
    monkeypatch.setattr(demo, "_SIZES", {**small_sizes("qwen3_moe"), "hidden_act": "relu"})
    monkeypatch.setattr(demo, "_BACKENDS", ("eager",))
    result = CliRunner().invoke(cli.app, ["demo"])
    assert result.exit_code == 1
    assert "perseus compiled no graph, or rewrote no layer" in result.output


def _measured(median: float) -> list[float]:
    return [median * factor for factor in (3.0, 1.0, 0.5, 1.0, 2.0)]


def test_bench_moe_prints_and_appends_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = {
        "perseus": _measured(1e-6),
        "eager, grouped_mm": _measured(1.5e-6),
        "Inductor, grouped_mm": _measured(2e-6),
    }
    monkeypatch.setattr(bench_moe, "measure", lambda case, **_: list(bench_moe._rows(case, samples)))
    out = tmp_path / "rows.jsonl"
    result = CliRunner().invoke(
        cli.app, ["bench", "moe", "--tokens", "1,16", "--dtypes", "bfloat16", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["tokens"], row["contestant"]) for row in rows] == [(t, name) for t in (1, 16) for name in samples]
    perseus = rows[0]
    assert (perseus["microseconds_p20"], perseus["microseconds_p50"], perseus["microseconds_p80"]) == (0.5, 1.0, 2.0)
    assert [row["time_over_best_inductor"] for row in rows[:3]] == [0.5, 0.75, 1.0]
    # T = 1: eight experts of three [1024, 512] maps in two bytes each; x and the output.
    assert perseus["flops"] == 6 * 8 * 1024 * 512
    assert perseus["bytes"] == pytest.approx((3 * 8 * 1024 * 512 + 2 * 1024) * 2)


@pytest.mark.slow
def test_contestants_compute_the_same_layer() -> None:
    case = bench_moe.Case(tokens=4, dtype=torch.float32, hidden=32, expert_width=16, experts=8, top_k=2)
    rows = bench_moe.measure(case, rounds=2)
    assert [row["contestant"] for row in rows] == list(bench_moe._contestants(case))
    assert all(row["microseconds_p50"] > 0 for row in rows)
    assert min(row["time_over_best_inductor"] for row in rows if "Inductor" in row["contestant"]) == 1.0


def test_large_copies_of_weights_are_not_measured() -> None:
    case = bench_moe.Case(tokens=1024, dtype=torch.float32)
    assert case.copied_bytes() == 1024 * 8 * 2 * 1024 * 512 * 4
    assert case.copied_bytes() > bench_moe._MAX_COPY_BYTES


def test_bench_compile_prints_and_appends_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = [
        {bench_compile.STAGES: 0.1, bench_compile.INDUCTOR: 2.0},
        {bench_compile.STAGES: 0.3, bench_compile.INDUCTOR: 4.0},
        {bench_compile.STAGES: 0.2, bench_compile.INDUCTOR: 4.0},
    ]
    monkeypatch.setattr(bench_compile, "rounds_of_seconds", lambda *_, **__: iter(measured))
    out = tmp_path / "rows.jsonl"
    out.write_text('{"earlier": "row"}\n')
    result = CliRunner().invoke(cli.app, ["bench", "compile", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "5.0%" in result.output
    earlier, stages, inductor = (json.loads(line) for line in out.read_text().splitlines())
    assert earlier == {"earlier": "row"}
    assert (stages["seconds_median"], stages["seconds_min"], stages["seconds_max"]) == (0.2, 0.1, 0.3)
    assert stages["share_of_inductor"] == 0.05 and inductor["share_of_inductor"] == 1.0
    for key in ("commit", "torch", "cpu", "threads", "layers", "model_type"):
        assert key in stages


@pytest.mark.slow
def test_compile_seconds_cover_every_stage() -> None:
    model = bench_compile.tiny_causal_lm("qwen3_moe", num_layers=1)
    measured = bench_compile._round(model, perseus_first=True)
    assert {"perseus, capture", "perseus, match", "perseus, rewrite"} <= set(measured)
    stages = sum(
        seconds for part, seconds in measured.items() if part.startswith("perseus, ") and part[-6:] != "stages"
    )
    assert measured[bench_compile.STAGES] == pytest.approx(stages)
    assert all(seconds > 0 for seconds in measured.values())
