"""How fast is one MoE layer on this CPU, beside what Inductor makes of the same layer? Forward, router included.

Axes: T tokens, K choices per token, E experts, D model width, F expert width.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from perseus_compile.testing.models import config_for, random_causal_lm

Layer = Callable[[Tensor], Tensor]

PERSEUS = "perseus"
EAGER = "eager, grouped_mm"
# A sample lasts this long at least, so that the clock and the call around it do not count.
_SAMPLE_SECONDS = 0.02
# Rotating through several inputs changes which experts are hit, so that few tokens do not find all weights in a cache.
_NUM_INPUTS = 8
# batched_mm copies the weights of every chosen expert; beyond this it is left out.
_MAX_COPY_BYTES = 8e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One layer and one batch."""

    tokens: int
    dtype: torch.dtype
    hidden: int = 1024
    expert_width: int = 512
    experts: int = 64
    top_k: int = 8

    def flops(self) -> int:
        """Three linear maps per routed row, two operations per weight."""
        return 6 * self.tokens * self.top_k * self.hidden * self.expert_width

    def bytes(self) -> float:
        """Weights of the experts that even routing hits, read once; x read once, the output written once."""
        hit = self.experts * (1 - (1 - self.top_k / self.experts) ** self.tokens)
        return (3 * hit * self.hidden * self.expert_width + 2 * self.tokens * self.hidden) * self.dtype.itemsize

    def copied_bytes(self) -> int:
        """What batched_mm copies for the larger of its two products."""
        return 2 * self.tokens * self.top_k * self.hidden * self.expert_width * self.dtype.itemsize

    def as_row(self) -> dict[str, Any]:
        numbers = {**dataclasses.asdict(self), "dtype": str(self.dtype).removeprefix("torch.")}
        return {**numbers, "flops": self.flops(), "bytes": self.bytes()}


def measure(case: Case, *, rounds: int) -> list[dict[str, Any]]:
    """One row per contestant: p20, median and p80 of the microseconds per call, and the median over Inductor's best.

    All contestants hold the same weights and run in one process, in rotating order. Each is compiled for exactly this
    shape, which is the best that Inductor can do.

    Raises:
        AssertionError: a contestant's output is not that of the uncompiled layer, up to rounding.
    """
    inputs = _inputs(case)
    contestants = _contestants(case)
    with torch.no_grad():
        reference = contestants[EAGER](inputs[0])
    calls = {name: _calls_per_sample(layer, inputs, reference) for name, layer in contestants.items()}
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for index in range(rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            samples[name].append(_sample(contestants[name], inputs, calls[name]))
    return list(_rows(case, samples))


def _rows(case: Case, samples: dict[str, list[float]]) -> Iterator[dict[str, Any]]:
    medians = {name: statistics.median(seconds) for name, seconds in samples.items()}
    best = min(seconds for name, seconds in medians.items() if name.startswith("Inductor"))
    for name, seconds in samples.items():
        ordered = sorted(seconds)
        yield {
            **case.as_row(),
            "contestant": name,
            "rounds": len(seconds),
            "microseconds_p20": 1e6 * ordered[int(0.2 * (len(ordered) - 1))],
            "microseconds_p50": 1e6 * medians[name],
            "microseconds_p80": 1e6 * ordered[round(0.8 * (len(ordered) - 1))],
            "time_over_best_inductor": medians[name] / best,
        }


def _inputs(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (_NUM_INPUTS, 1, case.tokens, case.hidden)
    return list(torch.randn(shape, generator=generator).to(case.dtype))


def _layer(case: Case, implementation: str) -> nn.Module:
    """The MoE block of a Qwen3-MoE model; the same weights at each call."""
    config = config_for(
        "qwen3_moe",
        num_layers=1,
        vocab_size=8,
        hidden_size=case.hidden,
        moe_intermediate_size=case.expert_width,
        num_experts=case.experts,
        num_experts_per_tok=case.top_k,
    )
    return random_causal_lm(config, dtype=case.dtype, implementation=implementation).model.layers[0].mlp


def _contestants(case: Case) -> dict[str, Layer]:
    torch._dynamo.reset()
    grouped = _layer(case, "grouped_mm")
    contestants: dict[str, Layer] = {
        PERSEUS: torch.compile(grouped, backend="perseus", dynamic=False),
        EAGER: grouped,
        "Inductor, grouped_mm": torch.compile(_layer(case, "grouped_mm"), dynamic=False),
    }
    if case.copied_bytes() <= _MAX_COPY_BYTES:
        contestants["Inductor, batched_mm"] = torch.compile(_layer(case, "batched_mm"), dynamic=False)
    return contestants


@torch.no_grad()
def _calls_per_sample(layer: Layer, inputs: list[Tensor], reference: Tensor) -> int:
    """Compiles, checks the values, and finds how many calls fill a sample."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
        output = layer(inputs[0])
    error = (output.double() - reference.double()).norm() / reference.double().norm()
    assert error < 64 * torch.finfo(reference.dtype).eps, f"relative error against the uncompiled layer: {error:.2g}"
    return max(1, round(_SAMPLE_SECONDS / _sample(layer, inputs, len(inputs))))


@torch.no_grad()
def _sample(layer: Layer, inputs: list[Tensor], num_calls: int) -> float:
    """Seconds per call."""
    start = time.perf_counter()
    for index in range(num_calls):
        layer(inputs[index % len(inputs)])
    return (time.perf_counter() - start) / num_calls
