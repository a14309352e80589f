"""How long do the perseus stages take beside Inductor? Compile time only; the models never run for speed."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._inductor.config
from torch import nn
from torch.fx import GraphModule

from perseus_compile import observe
from perseus_compile.backend import perseus
from perseus_compile.testing.models import tiny_causal_lm

INDUCTOR = "inductor, original graph"
INNER = "inductor, rewritten graph"
TOTAL = "perseus stages"


def compile_seconds(
    model_type: str, *, num_layers: int, rounds: int, on_round: Callable[[int], None] = lambda _: None
) -> dict[str, list[float]]:
    """Seconds per round and part: every perseus stage, their sum, and Inductor on both graphs.

    Rounds alternate between the two backends in one process and read no cache on disk. A first, smaller compile of
    each that is not counted pays for imports and for starting Inductor's workers.
    """
    _round(tiny_causal_lm(model_type, num_layers=2))
    model = tiny_causal_lm(model_type, num_layers=num_layers)
    seconds = defaultdict(list)
    for index in range(rounds):
        for part, value in _round(model).items():
            seconds[part].append(value)
        on_round(index)
    return dict(seconds)


def rows(seconds: dict[str, list[float]], conditions: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One JSON row per part: median, least and most seconds, and the share of Inductor's own time."""
    reference = statistics.median(seconds[INDUCTOR])
    for part, values in seconds.items():
        median = statistics.median(values)
        yield {
            **conditions,
            "part": part,
            "seconds_median": median,
            "seconds_min": min(values),
            "seconds_max": max(values),
            "share_of_inductor": median / reference,
        }


def _round(model: nn.Module) -> dict[str, float]:
    with torch._inductor.config.patch(force_disable_caches=True):
        original = _inductor_seconds(model)
        stages = _perseus_seconds(model)
    inner = stages.pop("inner")
    return {**stages, TOTAL: sum(stages.values()), INNER: inner, INDUCTOR: original}


def _inductor_seconds(model: nn.Module) -> float:
    seconds = 0.0
    inductor = torch._dynamo.lookup_backend("inductor")

    def timed(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        nonlocal seconds
        start = time.perf_counter()
        compiled = inductor(gm, example_inputs)
        seconds += time.perf_counter() - start
        return compiled

    _compile_once(model, timed)
    return seconds


def _perseus_seconds(model: nn.Module) -> dict[str, float]:
    with observe.collect() as graphs:
        _compile_once(model, perseus)
    total: dict[str, float] = defaultdict(float)
    for graph in graphs:
        for stage, value in graph.seconds.items():
            total[stage] += value
    return dict(total)


@torch.no_grad()
def _compile_once(model: nn.Module, backend: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    tokens = torch.randint(model.config.vocab_size, (2, 16))  # type: ignore[union-attr, arg-type]
    torch.compile(model, backend=backend)(tokens, use_cache=False)
