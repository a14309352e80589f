"""What did each compile do? Reports, counters, logs, structured traces and graph diffs; changes nothing."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import difflib
import functools
import itertools
import logging
import re
import textwrap
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch._dynamo.utils import counters
from torch._logging._internal import trace_structured
from torch.fx import Node

from .facts import Check, Refusal

if TYPE_CHECKING:
    from .cuda_report import BucketReport

log = logging.getLogger("perseus_compile")

_LINE_WIDTH = 112  # characters of a graph line; a diff adds one


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerReport:
    """One rewritten MoE layer.

    Attributes:
        layer: dotted module path.
        spelling: how its code spells the experts.
        op: the op that it became: "moe", "experts", "experts_list" or "experts_parallel".
        nodes_before, nodes_after: nodes of Dynamo's graph around this rewrite.
        why: one clause on the choice of op.
        lines_before, lines_after: the part of the graph that this rewrite may change, a line per node.
        cuda: how the experts will run on a GPU, a row per token bucket; empty elsewhere, and outside of ``collect``.
        checks: what matching and planning asked about the layer, in order.
    """

    layer: str
    spelling: str
    op: str
    nodes_before: int
    nodes_after: int
    why: str
    lines_before: tuple[str, ...] = dataclasses.field(repr=False)
    lines_after: tuple[str, ...] = dataclasses.field(repr=False)
    cuda: tuple[BucketReport, ...] = ()
    checks: tuple[Check, ...] = dataclasses.field(default=(), repr=False)

    @functools.cached_property
    def graph_diff(self) -> str:
        """The lines that differ, with ``-`` and ``+``; nothing of what stayed. Made when it is asked for."""
        diff = difflib.unified_diff(_wrapped(self.lines_before), _wrapped(self.lines_after), lineterm="", n=0)
        return "\n".join(line for line in diff if not line.startswith(("---", "+++", "@@")))


@dataclasses.dataclass(kw_only=True)
class GraphReport:
    """What perseus did to one graph from Dynamo.

    Attributes:
        index: 0 for the first graph that this process hands to perseus.
        layers, refusals: in graph order.
        seconds: wall-clock seconds by stage, "capture" to "rewrite", and "inner" for the inner compiler.
    """

    index: int = dataclasses.field(default_factory=itertools.count().__next__)
    layers: list[LayerReport] = dataclasses.field(default_factory=list)
    refusals: list[Refusal] = dataclasses.field(default_factory=list)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def graph_diff(self) -> str:
        return "\n".join(layer.graph_diff for layer in self.layers)

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


_collectors: contextvars.ContextVar[tuple[list[GraphReport], ...]] = contextvars.ContextVar("collectors", default=())


@contextlib.contextmanager
def collect() -> Iterator[list[GraphReport]]:
    """Collects the reports of all graphs compiled inside the block, in order."""
    reports: list[GraphReport] = []
    token = _collectors.set((*_collectors.get(), reports))
    try:
        yield reports
    finally:
        _collectors.reset(token)


def is_collecting() -> bool:
    """Whether somebody waits for the reports of the graphs that are compiled now."""
    return bool(_collectors.get())


def publish(report: GraphReport) -> None:
    """Hands a finished report to counters, log, structured trace and collectors."""
    counts = counters["perseus"]
    counts["graphs"] += 1
    counts["rewrites"] += len(report.layers)
    counts["refusals"] += len(report.refusals)
    for layer in report.layers:
        change = layer.nodes_after - layer.nodes_before
        log.info("%s: rewritten to perseus::%s (%s); nodes: %d -> %d (%d)", layer.layer, layer.op, layer.why,
                 layer.nodes_before, layer.nodes_after, change)  # fmt: skip
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s:\n%s", layer.layer, layer.graph_diff)
    for refusal in report.refusals:
        log.info("%s: not rewritten (%s): %s", refusal.layer, refusal.stage, refusal.reason)
    log.debug("graph %d: seconds by stage: %s", report.index, report.seconds)
    for reports in _collectors.get():
        reports.append(report)


def trace_graph(name: str, gm: torch.fx.GraphModule) -> None:
    """Writes a graph to torch's structured trace (``TORCH_TRACE``), where tlparse shows it."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: gm.print_readable(print_output=False, include_stride=True, include_device=True),
    )


class GraphPart:
    """The part of a graph that a rewrite of ``nodes`` into the last of them may change.

    Made before the rewrite and read before and after it: from the first of the nodes to the last, and the readers of
    the last, whose lines name it.
    """

    def __init__(self, nodes: Iterable[Node], output: Node) -> None:
        nodes = [output, *nodes]
        self._before, self._after = min(nodes).prev, max(nodes).next
        while self._after in output.users:
            self._after = self._after.next
        last = self._after.prev
        self._readers = [user for user in sorted(output.users) if user > last]

    def lines(self) -> tuple[str, ...]:
        return tuple(self._lines())

    def _lines(self) -> Iterator[str]:
        node = self._before.next
        while node is not self._after:
            if node.op != "placeholder":
                yield _line(node)
            node = node.next
        for reader in self._readers:
            yield "..."  # other nodes, which stay
            yield _line(reader)


def _line(node: Node) -> str:
    value = node.meta.get("example_value")
    return f"{node.format_node()}  # {_kind(value)}" if isinstance(value, torch.Tensor) else str(node.format_node())


def _wrapped(lines: Iterable[str]) -> list[str]:
    return [
        part
        for line in lines
        for part in textwrap.wrap(_short(line), width=_LINE_WIDTH, subsequent_indent="    ", break_long_words=False)
    ]


_DTYPES = {
    torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.int64: "i64", torch.int32: "i32", torch.bool: "b8",
}  # fmt: skip


def _kind(value: torch.Tensor) -> str:
    return f"{_DTYPES.get(value.dtype, value.dtype)}[{', '.join(map(str, value.shape))}]"


def _short(line: str) -> str:
    """``format_node`` without user counts, and with module paths for parameters: ``%self.mlp.experts.down_proj``."""
    line = re.sub(r" : (\[[^]]*\] )?\[num_users=\d+\]", "", line)
    line = re.sub(r"%l_(self_\w+|args_\w+|kwargs_\w+|\w+_)\b", lambda match: "%" + _module_path(match[1]), line)
    return line.replace("[target=", "[").replace(", kwargs = {}", "")


def _module_path(placeholder: str) -> str:
    return re.sub(r"_(?:modules|parameters|buffers)_", ".", placeholder).removesuffix("_")
