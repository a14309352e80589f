"""Where did Dynamo stop capturing, and in which MoE layers? Reads what Dynamo recorded; compiles nothing itself."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType

import torch
from torch import nn
from torch._dynamo import utils as dynamo_utils

from perseus_compile.moe_modules import MoEModule

# Dynamo keeps 64 records by default, fewer than a large model with breaks produces.
_MAX_RECORDS = 4096


@dataclasses.dataclass(frozen=True)
class Frame:
    """A line of the user's program."""

    filename: str
    line: int

    def __str__(self) -> str:
        return f"{os.path.basename(self.filename)}:{self.line}"


@dataclasses.dataclass(frozen=True)
class RecordedBreak:
    """A place at which Dynamo ended a graph or gave a whole frame back to Python."""

    reason: str
    stack: tuple[Frame, ...]  # outermost first; only the innermost frame where a whole frame was given back


@contextlib.contextmanager
def record_graph_breaks() -> Iterator[Callable[[], list[RecordedBreak]]]:
    """Collects the graph breaks of everything that is compiled inside. Yields a function that returns them.

    Two records of Dynamo are read, since neither is complete: ``graph_break_reasons`` lacks breaks inside Python
    loops, for which Dynamo runs the whole frame in Python; the compilation metrics lack those that it resumes from.
    """
    limit = dynamo_utils.DEFAULT_COMPILATION_METRICS_LIMIT
    dynamo_utils.set_compilation_metrics_limit(_MAX_RECORDS)
    num_reasons = len(dynamo_utils.graph_break_reasons)
    num_metrics = len(dynamo_utils.get_compilation_metrics())

    def recorded() -> list[RecordedBreak]:
        resumed = [
            RecordedBreak(reason.reason, tuple(Frame(frame.filename, frame.lineno or 0) for frame in reason.user_stack))
            for reason in dynamo_utils.graph_break_reasons[num_reasons:]
        ]
        given_back = [
            RecordedBreak(
                metrics.fail_reason or "",
                (Frame(metrics.fail_user_frame_filename, metrics.fail_user_frame_lineno or 0),),
            )
            for metrics in dynamo_utils.get_compilation_metrics()[num_metrics:]
            if metrics.fail_user_frame_filename is not None
        ]
        return _without_repeats([*resumed, *given_back])

    try:
        yield recorded
    finally:
        dynamo_utils.set_compilation_metrics_limit(limit)


@contextlib.contextmanager
def fresh_dynamo() -> Iterator[None]:
    """Runs its body as if nothing had been compiled yet, and leaves nothing compiled behind."""
    counters = {name: counter.copy() for name, counter in dynamo_utils.counters.items()}
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()
        dynamo_utils.counters.clear()
        dynamo_utils.counters.update(counters)


def layers_around(stack: Sequence[Frame], layers: Sequence[MoEModule]) -> list[MoEModule]:
    """The MoE layers whose code, or whose owner's code, the innermost such frame of ``stack`` lies in.

    Dynamo records lines, not module instances, hence all layers that share the code are meant.
    """
    for frame in reversed(stack):
        around = [layer for layer in layers if _runs(layer.module, frame)]
        around = around or [layer for layer in layers if layer.owner is not None and _runs(layer.owner, frame)]
        if around:
            return around
    return []


def _runs(module: nn.Module, frame: Frame) -> bool:
    return any(
        code.co_filename == frame.filename and code.co_firstlineno <= frame.line <= _last_line(code)
        for code in _methods(type(module))
    )


def _methods(module_type: type) -> Iterator[CodeType]:
    for base in module_type.__mro__:
        if base.__module__.startswith("torch.nn."):
            return
        for method in vars(base).values():
            if isinstance(method, FunctionType):
                yield inspect.unwrap(method).__code__


def _last_line(code: CodeType) -> int:
    return max((line for _, _, line in code.co_lines() if line is not None), default=code.co_firstlineno)


def _without_repeats(breaks: list[RecordedBreak]) -> list[RecordedBreak]:
    """One record for each place: Dynamo meets a break again in every frame that it could not inline."""
    seen: dict[tuple[str, int], RecordedBreak] = {}
    for record in breaks:
        if record.stack:
            place = record.stack[-1]
            seen.setdefault((place.filename, place.line), record)
    return list(seen.values())
