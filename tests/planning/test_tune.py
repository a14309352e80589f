"""Does tuning measure, keep and use what it found? And does the planner's answer reach a call?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from measured_rows import H200, shape_of

from perseus_compile import cuda_plan, fused_experts, grouped, tune, tuned
from perseus_compile.cuda_cost import PLAIN
from perseus_compile.errors import UnsupportedMoE
from perseus_compile.facts import ExpertsSpec
from perseus_compile.tune import ExpertWeights, tune_bucket

SPEC = ExpertsSpec(weight_layout="out_in", gate_layout="concatenated", activation="silu", num_experts=8)


def test_plan_for_the_plain_path_reaches_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = dataclasses.replace(
        cuda_plan.choose(shape_of("olmoe", 4), H200), path="plain", tiles=None, reason="of this test"
    )
    monkeypatch.setattr(fused_experts, "why_not", lambda *args: None)
    monkeypatch.setattr(cuda_plan, "plan_of_call", lambda *args, **kwargs: plain)
    monkeypatch.setattr(fused_experts, "kernel_for", lambda *args: pytest.fail("no kernel is needed"))
    bf16 = torch.bfloat16
    weights = (torch.zeros(8, 32, 16, dtype=bf16), None, torch.zeros(8, 16, 16, dtype=bf16), None)
    call = (torch.zeros(4, 16, dtype=bf16), torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2), *weights)
    assert fused_experts.run_experts(*call, SPEC) is None


def test_near_candidates_and_the_plain_path_are_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the GPU: calls are not made, a candidate's time is its place among those that were asked for."""
    bf16 = torch.bfloat16
    weights = ExpertWeights(
        gate_up=torch.zeros(8, 512, 1024, dtype=bf16),
        gate_up_bias=None,
        down=torch.zeros(8, 1024, 256, dtype=bf16),
        down_bias=None,
        spec=SPEC,
    )
    asked: list[str] = []

    def measure(graphs: Mapping[str, Any], rounds: int) -> dict[str, list[float]]:
        asked.extend(graphs)
        return {name: [9.0, place + 1.0, 0.5][:rounds] for place, name in enumerate(graphs)}

    monkeypatch.setattr(tune, "capture", lambda function: function)
    monkeypatch.setattr(tune, "measure", measure)
    monkeypatch.setattr(tune, "_call_of", lambda *args: None)
    monkeypatch.setattr(fused_experts, "why_not", lambda *args: None)
    monkeypatch.setattr(cuda_plan, "gpu_numbers", lambda index: H200)
    monkeypatch.setattr(tuned, "key_of", lambda shape, index: tuple(dataclasses.asdict(shape).items()))
    bucket = tune_bucket(weights, 2, 1000, rounds=3)
    assert bucket.num_tokens == 1024
    predictions = [row.predicted_ms for row in bucket.rows]
    for row in bucket.rows:
        is_near = row.predicted_ms <= tune.NEAR * min(predictions) or row.candidate == PLAIN
        assert (row.measured_ms is not None) == is_near == (str(row.candidate) in asked)
    assert len(asked) == len(set(asked)) < len(bucket.rows), "256 rows per expert: tiles of 8 tokens are far off"
    assert "plain path" in asked and str(bucket.rows[0].candidate) == asked[0]
    assert [row.is_chosen for row in bucket.rows] == [True] + [False] * (len(bucket.rows) - 1)
    x_TD, ids_TK = torch.zeros(600, 1024, dtype=bf16), torch.zeros(600, 2, dtype=torch.int64)
    plan = cuda_plan.plan_of_call(x_TD, ids_TK, weights.gate_up, None, weights.down, SPEC)
    assert (plan.source, plan.predicted_ms, plan.tiles) == ("tuned", 1.0, bucket.rows[0].candidate.tiles)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing is tuned on this machine; kernels stay in the user's cache."""
    plans = tmp_path / "plans"
    monkeypatch.setattr(tuned, "folder", lambda: plans)
    tuned._entries.cache_clear()
    yield plans
    tuned._entries.cache_clear()


@pytest.mark.gpu
def test_gpu_numbers_are_those_of_a_data_sheet() -> None:
    numbers = cuda_plan.gpu_numbers(0)
    assert numbers.num_sms > 16
    assert 0.5 < numbers.clock_ghz < 4
    assert 0.1 < numbers.memory_tb_per_s < 20
    if "H200" in numbers.name:
        assert numbers.clock_ghz == pytest.approx(H200.clock_ghz, rel=0.02)
        assert numbers.memory_tb_per_s == pytest.approx(H200.memory_tb_per_s, rel=0.03)
        assert numbers.num_sms == H200.num_sms


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
def test_tuning_is_measured_kept_and_used(folder: Path) -> None:
    weights = ExpertWeights.random(256, 128, False, SPEC)
    bucket = tune_bucket(weights, 2, 50, rounds=3)
    assert bucket.num_tokens == 64
    measured = [row for row in bucket.rows if row.measured_ms is not None]
    assert len(measured) >= 3 and PLAIN in [row.candidate for row in measured]
    assert [row.is_chosen for row in bucket.rows] == [True] + [False] * (len(bucket.rows) - 1)
    assert bucket.file is not None and bucket.file.parent == folder

    x_TD = torch.randn(50, 256, device="cuda").bfloat16()
    ids_TK = torch.rand(50, 8, device="cuda").topk(2).indices
    weights_TK = torch.full((50, 2), 0.5, device="cuda")
    experts = (weights.gate_up, None, weights.down, None)
    tuned._entries.cache_clear()  # as in another process
    plan = cuda_plan.plan_of_call(x_TD, ids_TK, weights.gate_up, None, weights.down, SPEC)
    assert (plan.source, plan.predicted_ms) == ("tuned", bucket.rows[0].measured_ms)
    assert plan.tiles == bucket.rows[0].candidate.tiles

    # What a call does follows the record: with the plain path as the only candidate the fused kernel declines.
    call = (x_TD, ids_TK, weights_TK, *experts)
    expected = grouped.forward(*call, SPEC)
    key = tuned.key_of(
        dataclasses.replace(
            cuda_plan.call_shape(x_TD, ids_TK, weights.gate_up, None, weights.down, SPEC), num_tokens=64
        ),
        0,
    )
    fused = next(row.candidate for row in measured if row.candidate.tiles)
    tuned.record(key, ((fused, 1.0), (PLAIN, 2.0)))
    actual = fused_experts.run_experts(*call, SPEC)
    assert actual is not None
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
    tuned.record(key, ((fused, 2.0), (PLAIN, 1.0)))
    assert fused_experts.run_experts(*call, SPEC) is None


@pytest.mark.gpu
def test_a_call_that_the_kernel_does_not_cover_has_nothing_to_tune(folder: Path) -> None:
    weights = ExpertWeights.random(256, 132, False, SPEC)
    with pytest.raises(UnsupportedMoE, match="there is nothing to tune"):
        tune_bucket(weights, 2, 4, rounds=1)
    assert not folder.exists()
