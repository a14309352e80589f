"""What was measured on an H200, as calls that the planner can be asked about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from perseus_compile.cuda_cost import PLAIN, CallShape, Candidate, GpuNumbers

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
H200 = GpuNumbers(name="NVIDIA H200", num_sms=132, clock_ghz=1.98, memory_tb_per_s=4.917)
# model width, expert width, experts, top-k
CASES = {
    "qwen3-30b": (2048, 768, 128, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "olmoe": (2048, 1024, 64, 8),
    "gpt-oss-120b": (2880, 2880, 128, 4),
    "gpt-oss-120b-as-is": (2880, 2880, 128, 4),
    "dsv3-slice": (7168, 2048, 32, 8),
}
TOKENS = (1, 16, 64, 128, 512, 1024, 2048, 4096, 8192, 16384)


class Row(NamedTuple):
    case: str
    num_tokens: int
    candidate: Candidate
    measured_ms: float


def shape_of(case: str, num_tokens: int) -> CallShape:
    model_width, expert_width, num_experts, top_k = CASES[case]
    as_is = case.endswith("as-is")
    return CallShape(
        num_tokens=num_tokens,
        top_k=top_k,
        num_experts=num_experts,
        num_local_experts=num_experts,
        model_width=model_width,
        expert_width=expert_width,
        has_biases=as_is,
        weight_layout="in_out" if as_is else "out_in",
        gate_layout="interleaved" if as_is else "concatenated",
        activation="clamped_swiglu" if as_is else "silu",
    )


def rows(name: str) -> list[Row]:
    """The rows of the experts alone, by the fused kernel and on the plain path."""
    found = []
    for line in (RESULTS / name).read_text().splitlines():
        row = json.loads(line)
        if row["part"] == "experts" and row["impl"] in ("perseus", "plain"):
            groups = row.get("column_groups", 2 if row["tokens"] >= 1024 else 1)
            fused = row["impl"] == "perseus"
            candidate = Candidate(path="fused", tiles=row["plan"], column_groups=groups) if fused else PLAIN
            found.append(Row(row["case"], row["tokens"], candidate, row["ms_p50"]))
    return found
