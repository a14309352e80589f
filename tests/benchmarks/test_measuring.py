"""Measuring itself, on shapes so small that nothing is learnt about speed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from perseus_compile import observe
from perseus_compile.testing import bench_compile, bench_e2e, bench_moe, cpu_timing, cuda_timing
from perseus_compile.testing.bench_rows import WrongResult
from perseus_compile.testing.models import small_sizes
from perseus_compile.testing.moe_cases import Case
from perseus_compile.testing.moe_layer import MoELayer, expected, inputs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def tiny(model_type: str = "qwen3_moe") -> Case:
    return Case(name="tiny", model_type=model_type, model_width=64, expert_width=32, num_experts=8, top_k=2)


def test_cpu_times_are_those_of_the_contestants() -> None:
    waited = []
    contestants = {"short": lambda: time.sleep(0.001), "long": lambda: time.sleep(0.02)}
    times = cpu_timing.measure(contestants, 2, before_each=lambda: waited.append(time.sleep(0.002)))
    assert [len(samples) for samples in times.values()] == [2, 2]
    assert 1 <= min(times["short"]) < 15 and min(times["long"]) >= 20
    assert waited


@pytest.mark.parametrize("model_type", ("qwen3_moe", "mixtral", "olmoe", "gpt_oss"))
@torch.no_grad()
def test_expected_is_the_block(model_type: str) -> None:
    layer = MoELayer(tiny(model_type), torch.float32, CPU)
    x_BTD, samples_S = inputs(layer, 40)
    assert 1 <= samples_S.numel() <= 16
    torch.testing.assert_close(expected(layer, x_BTD, samples_S), layer(x_BTD)[0, samples_S])


@torch.no_grad()
def test_sampled_tokens_are_far_from_a_tie() -> None:
    layer = MoELayer(tiny(), torch.bfloat16, CPU)
    layer.router.weight[1:].copy_(layer.router.weight[0])  # all experts tie, but for the first two
    layer.router.weight[0] *= 3
    layer.router.weight[1] *= 2
    x_BTD, samples_S = inputs(layer, 64)
    logits_TE = layer.router(x_BTD[0])[0].float()
    chosen_TK = logits_TE.topk(3).values
    assert (chosen_TK[samples_S, 1] > chosen_TK[samples_S, 2]).all()
    assert samples_S.numel() < 64


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_moe_on_a_cpu(dtype: torch.dtype) -> None:
    layer = MoELayer(tiny(), dtype, CPU)
    rows = bench_moe.measure(layer, 5, rounds=2)
    assert [row["impl"] for row in rows] == ["perseus", "inductor", "eager", "inductor_batched_mm"]
    assert all(row["ms_p50"] > 0 and row["part"] == "layer" and row["tokens"] == 5 for row in rows)
    assert bench_moe.ratios(rows)["best_inductor"] > 0


@pytest.mark.parametrize("model_type", ("qwen3_moe", "gpt_oss"))
@torch.no_grad()
def test_contestants_of_a_gpu_agree(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their calls, without graphs, on a CPU."""
    layer = MoELayer(tiny(model_type), torch.bfloat16, CPU)
    x_BTD, samples_S = inputs(layer, 9)
    monkeypatch.setattr(cuda_timing, "capture", lambda function: function)
    monkeypatch.setattr(bench_moe, "_compiled", lambda layer, with_inductor: {"perseus": layer, "inductor": layer})
    contestants = bench_moe._on_cuda(layer, x_BTD, with_inductor=True)
    assert len(contestants) == 6
    for contestant in contestants.values():
        actual_SD = contestant().reshape(9, -1)[samples_S].float()
        torch.testing.assert_close(actual_SD, expected(layer, x_BTD, samples_S), rtol=0.03, atol=0.03)


def test_a_wrong_contestant_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = MoELayer(tiny(), torch.bfloat16, CPU)
    monkeypatch.setattr(
        bench_moe, "_compiled", lambda layer, with_inductor: {"perseus": lambda x_BTD: 1.05 * layer(x_BTD)}
    )
    with pytest.raises(WrongResult, match=r"layer/perseus at T=3 must be within .* its error is 0\.0[45]"):
        bench_moe.measure(layer, 3, rounds=1, with_inductor=False)


def test_a_layer_that_was_not_rewritten_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = MoELayer(tiny(), torch.bfloat16, CPU)
    monkeypatch.setattr(bench_moe, "_compiled", lambda layer, with_inductor: {"perseus": layer})
    with pytest.raises(WrongResult, match="perseus must rewrite the layer"):
        bench_moe.measure(layer, 3, rounds=1, with_inductor=False)


_COMPILE_AHEAD = """
from perseus_compile.testing import bench_moe
from perseus_compile.testing.moe_cases import Case
from perseus_compile.testing.moe_layer import MoELayer
import torch
from torch._dynamo.utils import counters

case = Case(name="tiny", model_type="qwen3_moe", model_width=64, expert_width=32, num_experts=8, top_k=2)
cpu = torch.device("cpu")
bench_moe.compile_ahead([case], [5], torch.bfloat16, cpu, with_inductor=False)
assert not counters["aot_autograd"]
bench_moe.measure(MoELayer(case, torch.bfloat16, cpu), 5, rounds=1, with_inductor=False)
found = counters["aot_autograd"]
print(found["autograd_cache_hit"], found["autograd_cache_miss"])
"""


@pytest.mark.slow
def test_compiling_ahead_fills_the_caches(tmp_path: Path) -> None:
    """In a process of its own, since torch's cache keys depend on what was imported first, here by pytest."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _COMPILE_AHEAD]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["1", "0"], "hits and misses"


@pytest.mark.slow
def test_e2e_on_a_cpu() -> None:
    model = bench_e2e.random_model(small_sizes("qwen3_moe"), num_layers=2, device=CPU)
    workloads = (
        bench_e2e.Workload(name="prefill", sequences=1, new_tokens=24, context=0),
        bench_e2e.Workload(name="decode", sequences=3, new_tokens=1, context=15),
    )
    exact = bench_e2e.exact_logits(model, workloads)
    for workload in workloads:
        rows = bench_e2e.measure(model, "tiny", workload, exact[workload], rounds=2, with_graphs=False)
        assert [row["impl"] for row in rows] == ["eager", "inductor", "perseus"]
        assert {row["case"] for row in rows} == {f"tiny/{workload.name}"}
        assert all(row["ms_p50"] > 0 and row["tokens"] == workload.tokens for row in rows)


@torch.no_grad()
def test_a_step_of_decoding_sees_its_context_and_can_be_repeated() -> None:
    model = bench_e2e.random_model(small_sizes("qwen3_moe"), num_layers=1, device=CPU)
    call = bench_e2e.Call(model, bench_e2e.Workload(name="decode", sequences=2, new_tokens=1, context=7))
    first = call.checked_logits(bench_e2e.forward)
    torch.testing.assert_close(call.checked_logits(bench_e2e.forward), first, rtol=0, atol=0)
    assert call.cache is not None
    call.cache.layers[0].values[:, :, 3] += 1
    assert not torch.equal(call.checked_logits(bench_e2e.forward), first)


@torch.no_grad()
def test_a_wrong_model_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bench_e2e.random_model(small_sizes("qwen3_moe"), num_layers=1, device=CPU)
    workload = bench_e2e.Workload(name="decode", sequences=2, new_tokens=1, context=7)
    exact = bench_e2e.exact_logits(model, [workload])

    def wrong(*arguments: object) -> torch.Tensor:
        return 1.1 * bench_e2e.forward(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(bench_e2e, "_compiled", lambda with_graphs: {"inductor": wrong})
    with pytest.raises(WrongResult, match=r"inductor must be within .* its error is 0\.1"):
        bench_e2e.measure(model, "tiny", workload, exact[workload], rounds=1, with_graphs=False)


@pytest.mark.slow
def test_compile_seconds_cover_every_stage() -> None:
    measured = bench_compile._round(bench_compile.model_call("qwen3_moe", num_layers=1), perseus_first=True)
    assert {"perseus, capture", "perseus, match", "perseus, rewrite"} <= set(measured)
    stages = sum(
        seconds for part, seconds in measured.items() if part.startswith("perseus, ") and part[-6:] != "stages"
    )
    assert measured[bench_compile.STAGES] == pytest.approx(stages)
    assert all(seconds > 0 for seconds in measured.values())


@pytest.mark.parametrize("num_experts", (2, 8))
def test_the_loop_that_is_compiled_is_one_layer(num_experts: int) -> None:
    with observe.collect() as graphs:
        bench_compile._perseus_seconds(bench_compile.loop_call(num_experts), inner="eager")
    assert [layer.op for graph in graphs for layer in graph.layers] == ["experts_list"]


def test_seconds_per_layer_do_not_grow_with_the_graph() -> None:
    """The stages are linear: a graph of eight times the layers costs each layer less than three times as much."""
    rounds = list(bench_compile.rounds_of_growth("qwen3_moe", layers=(2, 16), rounds=3))
    few, many = (min(measured[num_layers] for measured in rounds) for num_layers in (2, 16))
    assert many < 3 * few


@pytest.mark.gpu
def test_graphs_and_functions_are_timed_alike() -> None:
    small, large = (torch.ones(size, device="cuda") for size in (1 << 20, 1 << 28))
    contestants = {
        "small": cuda_timing.capture(lambda: small.mul(2)),
        "large": cuda_timing.capture(lambda: large.mul(2)),
        "large, no graph": lambda: large.mul(2),
    }
    assert float(contestants["large"]()[0]) == 2
    before: list[None] = []
    times = cuda_timing.measure(contestants, 3, before_each=lambda: before.append(None))
    medians = {name: sorted(samples)[1] for name, samples in times.items()}
    assert medians["small"] < 0.2 * medians["large"]
    assert medians["large, no graph"] < 2 * medians["large"]
    assert len(before) >= 9
    sustained = cuda_timing.measure({"large": contestants["large"]}, 1, sustained=True)
    assert sustained["large"][0] < 2 * medians["large"]
    clock = cuda_timing.clock_mhz(contestants["large"], medians["large"])
    assert clock is None or clock > 300


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", ("qwen3_moe", "gpt_oss"))
def test_moe_on_a_gpu(model_type: str) -> None:
    case = Case(name="tiny", model_type=model_type, model_width=128, expert_width=64, num_experts=8, top_k=2)
    layer = MoELayer(case, torch.bfloat16, CUDA)
    for num_tokens in (1, 40):
        rows = bench_moe.measure(layer, num_tokens, rounds=2)
        measured = [(row["part"], row["impl"]) for row in rows]
        assert measured[0] == ("experts", "perseus")
        assert {impl for _, impl in measured} == {"perseus", "plain", "eager", "inductor", "inductor_graph"}
        assert [row["plan"] is not None for row in rows] == [row["impl"] == "perseus" for row in rows]


@pytest.mark.gpu
@pytest.mark.slow
def test_e2e_on_a_gpu() -> None:
    model = bench_e2e.random_model(small_sizes("qwen3_moe"), num_layers=2, device=CUDA)
    workload = bench_e2e.Workload(name="decode", sequences=4, new_tokens=1, context=15)
    exact = bench_e2e.exact_logits(model, [workload])
    rows = bench_e2e.measure(model, "tiny", workload, exact[workload], rounds=2, with_graphs=True)
    assert len(rows) == 5
    assert all(row["cudagraph_skips"] == 0 for row in rows)
