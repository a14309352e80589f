"""perseus bench: what is printed and written, from measurements that are given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from perseus_compile import cli
from perseus_compile.testing import bench_compile, bench_e2e, bench_moe, moe_cases, moe_layer
from perseus_compile.testing.bench_rows import FIELDS, WrongResult, row


def run(out: Path, *arguments: str) -> tuple[str, list[dict[str, Any]]]:
    """The output and the rows of a command."""
    result = CliRunner().invoke(cli.app, ["bench", *arguments, "--commit", "abc123", "--out", str(out)])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for measured in rows:
        assert set(FIELDS) <= set(measured)
        assert measured["commit"] == "abc123" and measured["gpu"] is None
    return result.output, rows


def test_moe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"perseus": 0.001, "eager": 0.004, "inductor": 0.002}
    monkeypatch.setattr(moe_layer, "MoELayer", lambda case, dtype, device: (case, dtype))

    def measure(layer: Any, num_tokens: int, *, commit: str, **_: Any) -> list[dict[str, Any]]:
        case, dtype = layer
        rates = {"part": "layer", "tflops": 1.0, "gb_per_s": 2.0}
        found = {"gpu": None, "clock_mhz": None, "torch": "2", "commit": commit, "date": "2026-11-30"}
        shared = {"tokens": num_tokens, "dtype": str(dtype).removeprefix("torch.")}
        return [row("moe", case.name, [ms], found, impl=impl, **shared, **rates) for impl, ms in times.items()]

    monkeypatch.setattr(bench_moe, "measure", measure)
    output, rows = run(tmp_path / "rows.jsonl", "moe", "--device", "cpu", "--tokens", "1,16", "--dtypes", "bfloat16")
    assert [(row["tokens"], row["impl"]) for row in rows] == [(count, impl) for count in (1, 16) for impl in times]
    assert {row["case"] for row in rows} == {"small"}
    cells = [line.split() for line in output.splitlines() if line.lstrip().startswith("\u2502")]
    # tokens, milliseconds, spread, no experts alone, rates, then over eager, Inductor, the best Inductor
    assert [cell for cell in cells[0] if cell not in "\u2502-"] == [
        "1",
        "0.001",
        "0.001",
        "0.001",
        *"12",
        "0.25",
        "0.50",
        "0.50",
    ]


def test_a_wrong_contestant_fails_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def measure(layer: Any, num_tokens: int, **_: Any) -> list[dict[str, Any]]:
        measured.append(num_tokens)
        raise WrongResult(f"wrong at {num_tokens}")

    monkeypatch.setattr(moe_layer, "MoELayer", lambda *_: None)
    monkeypatch.setattr(bench_moe, "measure", measure)
    arguments = ["bench", "moe", "--device", "cpu", "--tokens", "1,16", "--dtypes", "float32"]
    result = CliRunner().invoke(cli.app, [*arguments, "--out", str(tmp_path / "rows.jsonl")])
    assert result.exit_code == 1
    assert measured == [1, 16]
    assert "not measured: small: wrong at 16" in result.output


def test_e2e(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
    monkeypatch.setattr(bench_e2e, "QWEN3_30B", {**bench_e2e.QWEN3_30B, **tiny, "vocab_size": 128})
    monkeypatch.setattr(bench_e2e, "CACHE_LENGTH", 16)
    monkeypatch.setattr(bench_e2e, "_compiled", lambda with_graphs: {"inductor": bench_e2e.forward})
    sizes = ("--layers", "1", "--prefill", "8", "--decode", "3")
    output, rows = run(tmp_path / "rows.jsonl", "e2e", "--device", "cpu", *sizes, "--rounds", "1")
    assert [(row["case"], row["tokens"], row["impl"]) for row in rows] == [
        ("qwen3_30b_1_layers/prefill", 8, "eager"),
        ("qwen3_30b_1_layers/prefill", 8, "inductor"),
        ("qwen3_30b_1_layers/decode", 3, "eager"),
        ("qwen3_30b_1_layers/decode", 3, "inductor"),
    ]
    assert "over best Inductor" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("moe", "--tokens", "1,many"), "--tokens must hold counts from 1 on, separated by commas; got '1,many'"),
        (("moe", "--dtypes", "float8"), "--dtypes must be among float32, bfloat16, float16; got 'float8'"),
        (("e2e", "--decode", "0"), "--decode must hold counts from 1 on, separated by commas; got '0'"),
        (("e2e", "--prefill", "x"), "--prefill must hold counts from 1 on, separated by commas; got 'x'"),
    ],
)
def test_wrong_lists_are_refused(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(cli.app, ["bench", *arguments, "--device", "cpu"])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split())


def test_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = [
        {bench_compile.STAGES: 0.1, bench_compile.INDUCTOR: 2.0},
        {bench_compile.STAGES: 0.3, bench_compile.INDUCTOR: 4.0},
        {bench_compile.STAGES: 0.2, bench_compile.INDUCTOR: 4.0},
    ]
    monkeypatch.setattr(bench_compile, "rounds_of_seconds", lambda *_, **__: iter(measured))  # models and loops alike
    growth = [{4: 0.010, 8: 0.020}, {4: 0.012, 8: 0.022}, {4: 0.011, 8: 0.021}]
    monkeypatch.setattr(bench_compile, "rounds_of_growth", lambda *_, **__: iter(growth))
    arguments = ("--loops", "3", "--growth", "4,8")
    output, (stages, inductor, *loop_and_grown) = run(tmp_path / "rows.jsonl", "compile", *arguments)
    loop, grown = loop_and_grown[:2], loop_and_grown[2:]
    assert [row["case"] for row in loop] == ["loop_3_experts"] * 2
    assert "5.0%" in output and "11.0" in output
    assert [(row["case"], row["ms_p50"]) for row in grown] == [
        ("qwen3_moe_4_layers", pytest.approx(11)),
        ("qwen3_moe_8_layers", pytest.approx(21)),
    ]
    assert [stages[key] for key in ("ms_p20", "ms_p50", "ms_p80")] == pytest.approx([100, 200, 300])
    assert (stages["impl"], inductor["impl"]) == ("perseus", "inductor")
    assert stages["share_of_inductor"] == 0.05 and inductor["share_of_inductor"] == 1.0


def test_rows_are_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.jsonl"
    out.write_text('{"earlier": "row"}\n')
    monkeypatch.setattr(bench_compile, "rounds_of_seconds", lambda *_, **__: iter([{bench_compile.INDUCTOR: 2.0}]))
    arguments = ["bench", "compile", "--loops", "", "--growth", "", "--out", str(out)]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    assert len(out.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "tpu"), "--device must be cpu, or cuda where torch sees a GPU"),
        (("--cases", "gpt-5"), "--cases must be among qwen3-30b"),
    ],
)
def test_mistakes_end_in_a_sentence(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(cli.app, ["bench", "moe", *arguments])
    assert result.exit_code != 0
    assert message in " ".join(result.output.replace("\u2502", " ").split())


def test_a_gpu_is_asked_for_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert CliRunner().invoke(cli.app, ["bench", "e2e", "--device", "cuda"]).exit_code != 0


def test_every_device_has_defaults() -> None:
    assert moe_cases.TOKENS.keys() == moe_cases.DTYPES.keys() == moe_cases.CASES_OF_DEVICE.keys() == {"cpu", "cuda"}
