"""How long do the perseus stages take beside Inductor? Compile time only; the models never run for speed."""

from __future__ import annotations

import functools
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
PER_LAYER = "perseus, all stages, per MoE layer"
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


def rounds_of_growth(model_type: str, *, layers: Sequence[int], rounds: int) -> Iterator[dict[int, float]]:
    """Per round, by the number of decoder layers: the seconds of all perseus stages for each MoE layer.

    Nothing compiles the graph after the rewrite. The seconds do not grow with the number where the stages are linear.
    """
    models = {num_layers: tiny_causal_lm(model_type, num_layers=num_layers) for num_layers in layers}
    _perseus_seconds(models[min(models)], inner="eager")  # pays for imports
    for _ in range(rounds):
        yield {num_layers: _seconds_per_layer(model) for num_layers, model in models.items()}


def growth_rows(rounds: Sequence[dict[int, float]], model_type: str, conditions: Row) -> Iterator[Row]:
    """One row per number of decoder layers."""
    for num_layers in rounds[0]:
        milliseconds = [1e3 * measured[num_layers] for measured in rounds]
        yield row(
            *("compile", f"{model_type}_{num_layers}_layers", milliseconds, conditions),
            tokens=math.prod(_TOKENS),
            dtype="float32",
            impl="perseus",
            part=PER_LAYER,
        )


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


def _seconds_per_layer(model: Any) -> float:
    with observe.collect() as graphs:
        stages = _perseus_seconds(model, inner="eager")
    num_rewritten = sum(len(graph.layers) for graph in graphs)
    assert num_rewritten, "a model without a rewritten layer has no seconds per layer"
    return (sum(stages.values()) - stages["inner"]) / num_rewritten


def _perseus_seconds(model: Any, inner: str = "inductor") -> dict[str, float]:
    with observe.collect() as graphs:
        _compile_once(model, functools.partial(perseus, options={"inner": inner}))
    total: dict[str, float] = defaultdict(float)
    for graph in graphs:
        for stage, seconds in graph.seconds.items():
            total[stage] += seconds
    return dict(total)


@torch.no_grad()
def _compile_once(model: Any, backend: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    torch.compile(model, backend=backend)(random_tokens(model, _TOKENS), use_cache=False)
