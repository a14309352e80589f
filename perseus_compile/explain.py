"""What would ``backend="perseus"`` do with this model? Runs it once and reports; the model is left as it was."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from rich.console import RenderableType
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from perseus_compile import observe, report_table
from perseus_compile.backend import CAPTURE_SETTINGS, perseus
from perseus_compile.cuda_report import BucketReport
from perseus_compile.facts import Check
from perseus_compile.graph_breaks import RecordedBreak, fresh_dynamo, layers_around, record_graph_breaks
from perseus_compile.moe_modules import MoEModule, find_moe_modules, switchable

PREPARE = "before compiling: perseus_compile.prepare(model)"
COMPILE = "instead of torch.compile: perseus_compile.compile(model)"
REWRITE_LOOP = (
    "no setting captures this loop: go over all experts, `for e in range(num_experts)`, instead of those that were "
    "hit, with no branch on their token counts, then perseus_compile.compile(model)"
)
NOT_FOUND = (
    "it owns experts, but the captured graphs hold no top-k choice, expert maps and weighted sum that belong to it"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainedLayer:
    """One MoE layer, and what became of it."""

    graph: int | None  # which of the captured graphs it was found in
    layer: str
    status: Literal["rewritten", "refused", "not found"]
    reason: str  # why this op; or why the layer keeps its own code
    op: str | None = None  # the perseus op that replaces the layer
    spelling: str | None = None
    nodes_before: int | None = None
    nodes_after: int | None = None
    graph_diff: str = ""  # the lines of the graph that the rewrite changed
    cuda: tuple[BucketReport, ...] = ()  # how the experts will run on a GPU, a row per token bucket
    checks: tuple[Check, ...] = dataclasses.field(default=(), repr=False)  # what the stages asked, in order


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainedBreak:
    """A place where the graph ends. A MoE layer that a break cuts in two cannot be rewritten."""

    location: str  # file:line of the user's program
    reason: str
    moe_layers: tuple[str, ...]  # module paths of the MoE layers whose code the place belongs to
    advice: str | None  # the line to add, for breaks inside MoE layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What ``explain`` found. ``str(report)`` is a table; rich prints it in colour."""

    layers: tuple[ExplainedLayer, ...]
    graph_breaks: tuple[ExplainedBreak, ...]
    num_graphs: int
    num_moe_modules: int  # modules that own experts, found by their structure

    def __rich__(self) -> RenderableType:
        return report_table.render(self)

    def __str__(self) -> str:
        return report_table.as_text(self)

    def why(self, layer: str) -> str:
        """The checks of one layer in order, with the answer to each, and the graph breaks inside it, as text.

        Args:
            layer: the path of a MoE layer or of a module around one, as in ``layers`` and ``graph_breaks``.

        Raises:
            OptionError: the model has no MoE layer there.
        """
        return report_table.why_as_text(self, layer)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Runs ``model(*args, **kwargs)`` compiled with perseus and reports what became of its MoE layers.

    Graphs run uncompiled after the rewrite (inner compiler "eager"), so it takes seconds. If a MoE layer holds a
    graph break, the model runs a second time to see which line cures it.

    NOTE: it starts and ends with ``torch._dynamo.reset()``, as ``torch._dynamo.explain`` does, so functions that this
    process has compiled are compiled again at their next call. Without it, a frame that Dynamo gave up on before
    would show no break, and one it gives up on here would stay in Python after ``prepare(model)``.
    """
    model = model._orig_mod if isinstance(model, OptimizedModule) else model
    modules = find_moe_modules(model) if isinstance(model, nn.Module) else []
    graphs, breaks = _observe(model, args, kwargs)
    cut = [layers_around(record.stack, modules) for record in breaks]
    uncured = {module.path for inside in cut for module in inside}
    if any(inside and not _can_prepare(model, inside) for inside in cut):
        # NOTE: some loops that merely break make Dynamo raise under these settings; then nothing is cured.
        with contextlib.suppress(Exception), torch._dynamo.config.patch(CAPTURE_SETTINGS):
            left = [layers_around(record.stack, modules) for record in _observe(model, args, kwargs)[1]]
            uncured = {module.path for inside in left for module in inside}
    layers = tuple(_explained_layers(graphs))
    return Report(
        layers=(*layers, *_not_found(modules, layers, cut=[module for inside in cut for module in inside])),
        graph_breaks=tuple(
            _explained_break(record, inside, _advice(model, inside, uncured))
            for record, inside in zip(breaks, cut, strict=True)
        ),
        num_graphs=len(graphs),
        num_moe_modules=len(modules),
    )


def _observe(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[observe.GraphReport], list[RecordedBreak]]:
    with _uncompiled(model), fresh_dynamo(), record_graph_breaks() as breaks, observe.collect() as graphs:
        torch.compile(model, backend=perseus, options={"inner": "eager"})(*args, **kwargs)
        return list(graphs), breaks()


@contextlib.contextmanager
def _uncompiled(model: Callable[..., Any]) -> Iterator[None]:
    """Inside, the model is as it was before ``model.compile()``."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    compiled = [(module, module._compiled_call_impl) for module in modules if module._compiled_call_impl is not None]
    for module, _ in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call


def _explained_layers(graphs: list[observe.GraphReport]) -> Iterator[ExplainedLayer]:
    for index, graph in enumerate(graphs):
        for layer in graph.layers:
            yield ExplainedLayer(
                graph=index,
                layer=layer.layer,
                status="rewritten",
                op=layer.op,
                spelling=layer.spelling,
                reason=layer.why,
                nodes_before=layer.nodes_before,
                nodes_after=layer.nodes_after,
                graph_diff=layer.graph_diff,
                cuda=layer.cuda,
                checks=layer.checks,
            )
        for refusal in graph.refusals:
            yield ExplainedLayer(
                graph=index, layer=refusal.layer, status="refused", reason=refusal.reason, checks=refusal.checks
            )


def _not_found(
    modules: list[MoEModule], layers: tuple[ExplainedLayer, ...], cut: list[MoEModule]
) -> Iterator[ExplainedLayer]:
    """Modules that own experts, are not cut by a graph break, and of which no stage said anything."""
    for module in modules:
        if module not in cut and not any(_may_be_same(row.layer, module.path) for row in layers):
            yield ExplainedLayer(graph=None, layer=module.path, status="not found", reason=NOT_FOUND)


def _may_be_same(layer: str, path: str) -> bool:
    """Whether a path of the graph may mean the module ``path``, or the block around it.

    Where a graph break handed a submodule to Dynamo, paths of the graph start at that submodule; a name in parentheses
    stands for a whole graph.
    """
    owner = path.rpartition(".")[0]
    return layer.startswith("(") or layer.startswith(owner) or path.endswith(f".{layer}") or owner.endswith(f".{layer}")


def _explained_break(record: RecordedBreak, layers: list[MoEModule], advice: str | None) -> ExplainedBreak:
    return ExplainedBreak(
        location=str(record.stack[-1]),
        reason=_first_sentence(record.reason),
        moe_layers=tuple(layer.path for layer in layers),
        advice=advice,
    )


def _advice(model: Callable[..., Any], layers: list[MoEModule], uncured: set[str]) -> str | None:
    """The line that cures a break in ``layers``; ``uncured`` are those that break under the capture settings too."""
    if not layers:
        return None
    if _can_prepare(model, layers):
        return PREPARE
    return REWRITE_LOOP if any(layer.path in uncured for layer in layers) else COMPILE


def _can_prepare(model: Callable[..., Any], layers: list[MoEModule]) -> bool:
    return hasattr(model, "set_experts_implementation") and any(switchable(layer) for layer in layers)


def _first_sentence(reason: str) -> str:
    """Dynamo's reasons run over many lines; the first is the kind of break, the second explains it."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return ": ".join(line.removeprefix("Explanation: ") for line in lines[:2])
