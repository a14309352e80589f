"""Rows, ratios and cases: the numbers of a benchmark, without measuring."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from perseus_compile.testing import bench_moe, bench_rows, moe_cases
from perseus_compile.testing.conditions import conditions

ROOT = Path(__file__).parents[2]
CONDITIONS = {"gpu": "NVIDIA H200", "clock_mhz": 1980, "torch": "2", "commit": "abc", "date": "2026-11-30"}


def layer_row(impl: str, ms: float, *, case: str = "qwen3-30b", tokens: int = 1024, **more: object) -> bench_rows.Row:
    found = {**CONDITIONS, **more}
    return bench_rows.row("moe", case, [ms], found, tokens=tokens, dtype="bfloat16", impl=impl, part="layer")


def test_a_row_has_quantiles_and_every_field() -> None:
    row = bench_rows.row(
        *("moe", "small", [3.0, 1.0, 0.5, 1.0, 2.0], CONDITIONS), tokens=2, dtype="float32", impl="eager", part="layer"
    )
    assert (row["ms_p20"], row["ms_p50"], row["ms_p80"], row["rounds"]) == (0.5, 1.0, 2.0, 5)
    assert set(bench_rows.FIELDS) <= set(row)
    assert row["part"] == "layer" and row["world"] == 1 and row["plan"] is None


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")), ids=lambda file: file.stem)
def test_committed_results_have_every_field(file: Path) -> None:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows
    for row in rows:
        assert set(bench_rows.FIELDS) <= set(row)
        assert row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]


def test_each_contestant_is_first_in_turn() -> None:
    assert list(bench_rows.rotations("abc", 4)) == [list("abc"), list("bca"), list("cab"), list("abc")]


def test_conditions_of_a_cpu() -> None:
    found = conditions(torch.device("cpu"))
    assert found["gpu"] is None and found["clock_mhz"] is None
    assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?|unknown", found["commit"])
    assert conditions(torch.device("cpu"), commit="abc")["commit"] == "abc"


def test_ratios() -> None:
    cell = [layer_row("perseus", 0.3), layer_row("inductor", 0.9), layer_row("inductor_graph", 0.6)]
    assert bench_moe.ratios(cell) == pytest.approx(
        {
            "inductor": 1 / 3,
            "inductor_graph": 0.5,
            "best_inductor": 0.5,
            "best_rival": 0.3 / 0.393,
            "estimate": 0.3 / 0.272,
        }
    )


@pytest.mark.parametrize("other", [{"gpu": "NVIDIA H100"}, {"tokens": 64}, {"case": "gpt-oss-120b-as-is"}])
def test_figures_of_rivals_are_for_their_cells_and_gpu(other: dict[str, object]) -> None:
    assert bench_moe.ratios([layer_row("perseus", 0.3, **other)]) == {}  # type: ignore[arg-type]


def test_experts_alone_are_not_compared_with_layers() -> None:
    experts = {**layer_row("perseus", 0.1), "part": "experts"}
    assert bench_moe.ratios([experts, layer_row("perseus", 0.3), layer_row("eager", 0.6)])["eager"] == 0.5


def test_flops_and_bytes() -> None:
    small = moe_cases.CASES["small"]
    assert small.flops(2) == 6 * 2 * 8 * 1024 * 512
    assert small.bytes(1, 8, "bfloat16") == (3 * 8 * 1024 * 512 + 2 * 1024) * 2
    assert small.copied_bytes(1024, "float32") == 1024 * 8 * 2 * 1024 * 512 * 4 > bench_moe._MAX_COPY_BYTES


@pytest.mark.parametrize(("case", "tokens"), moe_cases.RIVALS)
def test_figures_of_rivals_are_plausible(case: str, tokens: int) -> None:
    """A layer takes longer than its GEMMs; the estimate is at most 5 % (a tie) above them, and no faster than HBM."""
    rival, shape = moe_cases.RIVALS[case, tokens], moe_cases.CASES[case]
    assert rival.gemms < rival.layer and rival.estimate < 1.05 * rival.gemms
    hit = shape.num_experts * (1 - (1 - shape.top_k / shape.num_experts) ** tokens)
    assert rival.estimate > 1e3 * shape.bytes(0, int(hit), "bfloat16") / 4.8e12
    assert tokens in moe_cases.TOKENS["cuda"]
