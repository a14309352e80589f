"""How long do the perseus stages take beside Inductor? Compile time only; the models never run for speed.

Axes: T tokens, K choices per token, D model width.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from perseus_compile import observe
from perseus_compile.backend import CAPTURE_SETTINGS, perseus
from perseus_compile.testing.bench_rows import Row, row
from perseus_compile.testing.models import random_tokens, tiny_causal_lm

INDUCTOR = "Inductor, original graph"
INNER = "Inductor, rewritten graph"
STAGES = "perseus, all stages"
PER_LAYER = "perseus, all stages, per MoE layer"
_TOKENS = (2, 16)  # sequences, tokens


class Call(NamedTuple):
    """What is compiled: a call of a module."""

    module: nn.Module
    args: tuple[Tensor, ...]
    kwargs: dict[str, Any]


class ExpertLoop(nn.Module):
    """A layer that runs its experts, each with weights of its own, one after the other.

    Width 64, and top 4 where there are so many experts.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.top_k = min(4, num_experts)
        self.router = nn.Linear(64, num_experts, bias=False)
        self.gates, self.ups, self.downs = (
            nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(num_experts)) for _ in range(3)
        )

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, ids_TK = self.router(x_TD).softmax(dim=-1).topk(self.top_k, dim=-1)
        out_TD = torch.zeros_like(x_TD)
        for expert, (gate, up, down) in enumerate(zip(self.gates, self.ups, self.downs, strict=True)):
            tokens, choices = torch.where(ids_TK == expert)
            rows = x_TD[tokens]
            rows = down(F.silu(gate(rows)) * up(rows))
            out_TD.index_add_(0, tokens, rows * weights_TK[tokens, choices, None])
        return out_TD


def model_call(model_type: str, num_layers: int) -> Call:
    """A tiny Hugging Face model of ``num_layers`` decoder layers on 2 sequences of 16 tokens."""
    model = tiny_causal_lm(model_type, num_layers=num_layers)
    return Call(model, (random_tokens(model, _TOKENS),), {"use_cache": False})


def loop_call(num_experts: int) -> Call:
    """A loop over ``num_experts`` experts on 32 tokens; Dynamo unrolls it."""
    return Call(ExpertLoop(num_experts), (torch.randn(math.prod(_TOKENS), 64),), {})


def rounds_of_seconds(call: Call, *, first: Call, rounds: int) -> Iterator[dict[str, float]]:
    """Per round, the seconds of every part: each perseus stage, their sum, and Inductor on both graphs.

    Both backends run in one process, in alternating order, and read no cache on disk. ``first`` is compiled before and
    not counted: it pays for imports and for starting Inductor's workers.
    """
    _round(first, perseus_first=False)
    for index in range(rounds):
        yield _round(call, perseus_first=index % 2 == 1)


def rounds_of_growth(model_type: str, *, layers: Sequence[int], rounds: int) -> Iterator[dict[int, float]]:
    """Per round, by the number of decoder layers: the seconds of all perseus stages for each MoE layer.

    Nothing compiles the graph after the rewrite. The seconds do not grow with the number where the stages are linear.
    """
    calls = {num_layers: model_call(model_type, num_layers) for num_layers in layers}
    _perseus_seconds(calls[min(calls)], inner="eager")  # pays for imports
    for _ in range(rounds):
        yield {num_layers: _seconds_per_layer(call) for num_layers, call in calls.items()}


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


def _round(call: Call, *, perseus_first: bool) -> dict[str, float]:
    with warnings.catch_warnings(), torch._inductor.config.patch(force_disable_caches=True):
        warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
        stages = _perseus_seconds(call) if perseus_first else None
        original = _inductor_seconds(call)
        stages = stages or _perseus_seconds(call)
    inner = stages.pop("inner")
    named = {f"perseus, {stage}": seconds for stage, seconds in stages.items()}
    return {**named, STAGES: sum(stages.values()), INNER: inner, INDUCTOR: original}


def _inductor_seconds(call: Call) -> float:
    seconds = 0.0
    inductor: Callable[..., Any] = torch._dynamo.lookup_backend("inductor")

    def timed(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        nonlocal seconds
        start = time.perf_counter()
        compiled = inductor(gm, example_inputs)
        seconds += time.perf_counter() - start
        return compiled

    _compile_once(call, timed)
    return seconds


def _seconds_per_layer(call: Call) -> float:
    with observe.collect() as graphs:
        stages = _perseus_seconds(call, inner="eager")
    num_rewritten = sum(len(graph.layers) for graph in graphs)
    assert num_rewritten, "a model without a rewritten layer has no seconds per layer"
    return (sum(stages.values()) - stages["inner"]) / num_rewritten


def _perseus_seconds(call: Call, inner: str = "inductor") -> dict[str, float]:
    with observe.collect() as graphs:
        _compile_once(call, functools.partial(perseus, options={"inner": inner}))
    total: dict[str, float] = defaultdict(float)
    for graph in graphs:
        for stage, seconds in graph.seconds.items():
            total[stage] += seconds
    return dict(total)


@torch.no_grad()
def _compile_once(call: Call, backend: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(CAPTURE_SETTINGS):
        torch.compile(call.module, backend=backend)(*call.args, **call.kwargs)
