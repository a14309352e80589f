"""perseus tune and perseus warmup: what they work on, what they print, and how they exit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from perseus_compile import cli, env, tuned, warmup
from perseus_compile.cli import tune as tune_command
from perseus_compile.cli.expert_forms import form_of_model
from perseus_compile.cuda_cost import PLAIN, Candidate
from perseus_compile.tune import ExpertWeights, TunedBucket, TunedCandidate
from perseus_compile.warmup import Outcome, Unit


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


@pytest.mark.parametrize(
    ("model_type", "sizes", "words"),
    [
        ("qwen3_moe", (2048, 768, 128, 8, False), ("out_in", "concatenated", "silu")),
        ("gpt_oss", (2880, 2880, 128, 4, True), ("in_out", "interleaved", "clamped_swiglu")),
        ("deepseek_v3", (7168, 2048, 256, 8, False), ("out_in", "concatenated", "silu")),
    ],
)
def test_form_of_a_model(model_type: str, sizes: tuple[int, int, int, int, bool], words: tuple[str, ...]) -> None:
    form = form_of_model(model_type)
    spec = form.spec
    assert (form.model_width, form.expert_width, spec.num_experts, form.top_k, form.has_biases) == sizes
    assert (spec.weight_layout, spec.gate_layout, spec.activation) == words


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_tune_without_a_gpu_says_so() -> None:
    result = _run("tune", "--model-type", "qwen3_moe")
    assert result.exit_code == 1
    assert " ".join(result.stderr.split()).startswith("error: perseus tune measures on an NVIDIA GPU and found none")
    assert result.stdout == ""


def test_tune_on_another_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    result = _run("tune", "--model-type", "qwen3_moe")
    assert result.exit_code == 1
    assert "compute capability 9.0, got 8.0" in " ".join(result.stderr.split())


def test_tune_measures_each_bucket_once_and_prints_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []
    few8, few16 = (Candidate(path="fused", tiles=tiles, column_groups=1) for tiles in ("few8", "few16"))

    def tune_bucket(weights: ExpertWeights, top_k: int, num_tokens: int, *, rounds: int) -> TunedBucket:
        asked.append((num_tokens, rounds))
        rows = (
            TunedCandidate(candidate=few16, predicted_ms=0.5, measured_ms=0.25, is_chosen=True),
            TunedCandidate(candidate=few8, predicted_ms=0.4, measured_ms=0.3, is_chosen=False),
            TunedCandidate(candidate=PLAIN, predicted_ms=9.0, measured_ms=None, is_chosen=False),
        )
        return TunedBucket(num_tokens=num_tokens, rows=rows, file=tmp_path / "plan.json")

    monkeypatch.setattr(tune_command, "_no_gpu", lambda: None)
    monkeypatch.setattr(ExpertWeights, "random", staticmethod(lambda *numbers: numbers))
    monkeypatch.setattr(tune_command, "tune_bucket", tune_bucket)
    numbers = ("--hidden", "64", "--expert-width", "32", "--experts", "8", "--top-k", "2")
    result = _run("tune", *numbers, "--tokens", "100,1,128", "--rounds", "3")
    assert result.exit_code == 0, result.output
    assert asked == [(1, 3), (128, 3)]
    lines = [line for line in result.stdout.splitlines() if "few16 x 1" in line]
    assert len(lines) == 2 and all("0.5000" in line and "0.2500" in line and "yes" in line for line in lines)
    assert str(tmp_path / "plan.json") in result.stderr


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
def test_tune_end_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tuned, "folder", lambda: tmp_path)
    numbers = ("--hidden", "256", "--expert-width", "128", "--experts", "8", "--top-k", "2")
    try:
        result = _run("tune", *numbers, "--tokens", "1,64", "--rounds", "3")
        assert result.exit_code == 0, result.output
        assert result.stdout.count("yes") == 2 and result.stdout.count("plain path") == 2
        assert len(list(tmp_path.glob("*.json"))) == 2
    finally:
        tuned._entries.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hidden", "64"), "all of --hidden, --expert-width, --experts and --top-k"),
        (("--tokens", "0"), "counts from 1 on"),
        (("--tokens", "many"), "counts from 1 on"),
        (
            (
                *("--hidden", "64", "--expert-width", "32", "--experts", "8", "--top-k", "2"),
                *("--activation", "tanh"),
            ),
            "must be one of silu, gelu, gelu_tanh",
        ),
    ],
)
def test_tune_refuses_wrong_numbers(arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_command, "_no_gpu", lambda: None)
    result = _run("tune", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--activation", "gelu"), [unit.name for unit in warmup.expert_units("out_in", "concatenated", "gelu")]),
        (
            ("--model-type", "gpt_oss"),
            [
                *(unit.name for unit in warmup.expert_units("in_out", "interleaved", "clamped_swiglu")),
                "router of up to 128 experts",
            ],
        ),
        (("--all",), [unit.name for unit in warmup.shipped_units()]),
    ],
)
@pytest.mark.parametrize("is_kept", [True, False])
def test_warmup_compiles_what_was_asked_for(
    arguments: tuple[str, ...], expected: list[str], is_kept: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def build_all(units: Sequence[Unit], num_processes: int | None) -> list[Outcome]:
        assert [unit.name for unit in units] == expected
        assert {unit.arch.rstrip("a") for unit in units} == {"sm_90"}
        return [Outcome(unit.name, 1.5, False, is_kept, 1234) for unit in units]

    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path))
    monkeypatch.setattr(warmup, "build_all", build_all)
    result = _run("warmup", *arguments)
    assert result.exit_code == (0 if is_kept else 1), result.output
    assert result.stdout.count("1234") == len(expected)
    assert ("not kept" in result.stdout) == (not is_kept)
