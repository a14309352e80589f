"""What was measured on an H200, as calls that the planner can be asked about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from perseus_compile.cuda_cost import PLAIN, CallShape, Candidate, GpuNumbers
from perseus_compile.testing import moe_cases

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
H200 = GpuNumbers(name="NVIDIA H200", num_sms=132, clock_ghz=1.98, memory_tb_per_s=4.917)
CASES = {case.name: case for case in moe_cases.GPU_CASES}
TOKENS = moe_cases.TOKENS["cuda"]


class Row(NamedTuple):
    case: str
    num_tokens: int
    candidate: Candidate
    measured_ms: float


def shape_of(case: str, num_tokens: int) -> CallShape:
    layer = CASES[case]
    return CallShape(
        num_tokens=num_tokens,
        top_k=layer.top_k,
        num_experts=layer.num_experts,
        num_local_experts=layer.num_experts,
        model_width=layer.model_width,
        expert_width=layer.expert_width,
        has_biases=layer.model_type == "gpt_oss",
        weight_layout=layer.experts.weight_layout,
        gate_layout=layer.experts.gate_layout,
        activation=layer.experts.activation,
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
