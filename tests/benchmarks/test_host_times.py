"""Are host times those of the calls alone?"""

from __future__ import annotations

import pytest
import torch

from perseus_compile.testing import bench_host
from perseus_compile.testing.moe_cases import Case


def test_only_the_calls_are_timed() -> None:
    now = [0]

    def takes(nanoseconds: int) -> None:
        now[0] += nanoseconds

    order: list[str] = []
    calls = {"short": lambda: (order.append("short"), takes(1_000)), "long": lambda: takes(7_000)}
    times = bench_host.time_calls(calls, 2, lambda: takes(10**9), clock_ns=lambda: now[0])
    assert times == {"short": [0.001] * 128, "long": [0.007] * 128}
    assert len(order) == 3 * 64, "one round of 64 calls to warm up, two that count"


def test_the_bare_op_has_the_schema_of_the_experts() -> None:
    names = ("perseus_bench_host", "perseus")
    bare, own = (str(getattr(torch.ops, name).experts.default._schema).removeprefix(name) for name in names)
    assert bare == own


@pytest.mark.gpu
def test_a_row_per_part() -> None:
    case = Case(name="tiny", model_type="qwen3_moe", model_width=64, expert_width=32, num_experts=8, top_k=2)
    rows = bench_host.measure(case, 1, rounds=2)
    assert [row["part"] for row in rows] == ["launch", "allocate", "run", "site", "bare_op", "experts", "moe"]
    assert all(0 < row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"] for row in rows)
    assert {row["rounds"] for row in rows} == {128}
