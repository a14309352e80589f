"""How long do the perseus stages take beside Inductor? Compile time only; the models never run for speed."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._inductor.config
from torch.fx import GraphModule

from perseus_compile import observe
from perseus_compile.backend import perseus
from perseus_compile.testing.bench_rows import Row, row
from perseus_compile.testing.models import random_tokens, tiny_causal_lm

INDUCTOR = "Inductor, original graph"
INNER = "Inductor, rewritten graph"
STAGES = "perseus, all stages"
_TOKENS = (2, 16)  # sequences, tokens


def rounds_of_seconds(model_type: str, *, num_layers: int, rounds: int) -> Iterator[dict[str, float]]:
    """Per round, the seconds of every part: each perseus stage, their sum, and Inductor on both graphs.

    Both backends run in one process, in alternating order, and read no cache on disk. A first, smaller compile that
    is not counted pays for imports and for starting Inductor's workers.
    """
    _round(tiny_causal_lm(model_type, num_layers=2), perseus_first=False)
    model = tiny_causal_lm(model_type, num_layers=num_layers)
    for index in range(rounds):
        yield _round(model, perseus_first=index % 2 == 1)


def rows(rounds: Sequence[dict[str, float]], case: str, conditions: Row) -> Iterator[Row]:
    """One row per part, with the share of Inductor's own time."""
    milliseconds = {part: [1e3 * measured[part] for measured in rounds] for part in rounds[0]}
    reference = statistics.median(milliseconds[INDUCTOR])
    for part, values in milliseconds.items():
        yield row(
            *("compile", case, values, conditions),
            tokens=math.prod(_TOKENS),
            dtype="float32",
            impl="inductor" if part == INDUCTOR else "perseus",
            part=part,
            share_of_inductor=statistics.median(values) / reference,
        )


def _round(model: Any, *, perseus_first: bool) -> dict[str, float]:
    with warnings.catch_warnings(), torch._inductor.config.patch(force_disable_caches=True):
        warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
        stages = _perseus_seconds(model) if perseus_first else None
        original = _inductor_seconds(model)
        stages = stages or _perseus_seconds(model)
    inner = stages.pop("inner")
    named = {f"perseus, {stage}": seconds for stage, seconds in stages.items()}
    return {**named, STAGES: sum(stages.values()), INNER: inner, INDUCTOR: original}


def _inductor_seconds(model: Any) -> float:
    seconds = 0.0
    inductor: Callable[..., Any] = torch._dynamo.lookup_backend("inductor")

    def timed(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        nonlocal seconds
        start = time.perf_counter()
        compiled = inductor(gm, example_inputs)
        seconds += time.perf_counter() - start
        return compiled

    _compile_once(model, timed)
    return seconds


def _perseus_seconds(model: Any) -> dict[str, float]:
    with observe.collect() as graphs:
        _compile_once(model, perseus)
    total: dict[str, float] = defaultdict(float)
    for graph in graphs:
        for stage, seconds in graph.seconds.items():
            total[stage] += seconds
    return dict(total)


@torch.no_grad()
def _compile_once(model: Any, backend: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    torch.compile(model, backend=backend)(random_tokens(model, _TOKENS), use_cache=False)
