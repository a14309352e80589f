"""How does a report look on a terminal? Presentation only."""

from __future__ import annotations

import collections
import io
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from perseus_compile.errors import OptionError

if TYPE_CHECKING:
    from perseus_compile.cuda_report import BucketReport
    from perseus_compile.explain import ExplainedBreak, ExplainedLayer, Report

# Wide enough for the paths and reasons of real models where the output is not a terminal.
_PLAIN_WIDTH = 160
_SHOWN_PATHS = 2


def render(report: Report) -> RenderableType:
    parts: list[RenderableType] = [_layer_table(report.layers)] if report.layers else []
    parts += _cuda_tables(report.layers)
    if report.graph_breaks:
        parts.append(_break_table(report.graph_breaks))
    return Group(*parts, _summary(report))


def as_text(report: Report) -> str:
    """The tables without colour, for logs and files."""
    return _as_text(render(report))


def _as_text(rendered: RenderableType) -> str:
    text = io.StringIO()
    Console(file=text, width=_PLAIN_WIDTH, color_system=None).print(rendered)
    return text.getvalue().rstrip()


def render_why(report: Report, layer: str) -> RenderableType:
    """The checks of ``layer``, and the graph breaks inside it.

    Raises:
        OptionError: the report has no such layer.
    """
    layers = [row for row in report.layers if _is_at(row.layer, layer)]
    breaks = [row for row in report.graph_breaks if any(_is_at(path, layer) for path in row.moe_layers)]
    if not layers and not breaks:
        known = dict.fromkeys(row.layer for row in report.layers)
        known |= dict.fromkeys(path for row in report.graph_breaks for path in row.moe_layers)
        raise OptionError(
            f"the layer must be one of the model's MoE layers ({', '.join(known) or 'it has none'}) or a module around "
            f"one, got {layer!r}"
        )
    parts: list[RenderableType] = []
    for row in layers:
        parts += [_check_table(row)] if row.checks else []
        parts.append(_outcome(row))
    if breaks:
        parts.append(_break_table(tuple(breaks)))
    return Group(*parts)


def why_as_text(report: Report, layer: str) -> str:
    return _as_text(render_why(report, layer))


def _is_at(path: str, layer: str) -> bool:
    return path == layer or path.startswith(f"{layer}.")


def _check_table(row: ExplainedLayer) -> Table:
    table = Table(title=f"{row.layer}, graph {'-' if row.graph is None else row.graph}", title_justify="left")
    for heading in ("stage", "check", "at", "passed", "finding"):
        table.add_column(heading, overflow="fold")
    for check in row.checks:
        passed = Text("yes", style="green") if check.passed else Text("no", style="yellow")
        table.add_row(check.stage, check.name, Text(check.node or "-"), passed, Text(check.finding))
    return table


def _outcome(row: ExplainedLayer) -> Text:
    into = f" to perseus::{row.op}" if row.op else ""
    return Text(f"{row.layer}: {row.status}{into}: {row.reason}\n")


def _layer_table(layers: tuple[ExplainedLayer, ...]) -> Table:
    table = Table(title="MoE layers", title_justify="left")
    for heading in ("layer", "graph", "status", "op", "spelling", "nodes", "reason"):
        table.add_column(heading, overflow="fold")
    for row in layers:
        style = "green" if row.status == "rewritten" else "yellow"
        nodes = f"{row.nodes_before} -> {row.nodes_after}" if row.nodes_before is not None else "-"
        table.add_row(
            row.layer,
            "-" if row.graph is None else str(row.graph),
            Text(row.status, style=style),
            row.op or "-",
            row.spelling or "-",
            nodes,
            Text(row.reason),
        )
    return table


def _cuda_tables(layers: tuple[ExplainedLayer, ...]) -> list[Table]:
    """One for all layers that run alike."""
    alike: dict[tuple[BucketReport, ...], list[str]] = {}
    for layer in layers:
        if layer.cuda:
            alike.setdefault(layer.cuda, []).append(layer.layer)
    return [_cuda_table(buckets, _shortened(tuple(names))) for buckets, names in alike.items()]


def _cuda_table(buckets: tuple[BucketReport, ...], names: str) -> Table:
    table = Table(title=f"On the GPU, milliseconds without the router: {names}", title_justify="left")
    for heading in ("tokens", "path", "kernel", "column groups", "predicted ms", "workspace / bound MiB"):
        table.add_column(heading, overflow="fold")
    for heading in ("reason", "router"):
        table.add_column(heading, overflow="fold")
    for row in buckets:
        table.add_row(
            str(row.num_tokens),
            row.path,
            row.kernel or "-",
            str(row.column_groups) if row.kernel else "-",
            f"{row.predicted_ms:.3g} ({row.source})",
            f"{_mebibytes(row.workspace_bytes)} / {_mebibytes(row.workspace_bound_bytes)}",
            Text(row.reason),
            Text(row.router),
        )
    return table


def _mebibytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**20:.1f}"


def _break_table(breaks: tuple[ExplainedBreak, ...]) -> Table:
    table = Table(title="Graph breaks", title_justify="left")
    for heading in ("place", "in MoE layer", "reason", "what to do"):
        table.add_column(heading, overflow="fold")
    for row in sorted(breaks, key=lambda row: not row.moe_layers):
        table.add_row(row.location, _shortened(row.moe_layers), Text(row.reason), Text(row.advice or "-", style="bold"))
    return table


def _shortened(paths: tuple[str, ...]) -> str:
    if not paths:
        return "-"
    more = len(paths) - _SHOWN_PATHS
    return ", ".join(paths[:_SHOWN_PATHS]) + (f" and {more} more" if more > 0 else "")


def _summary(report: Report) -> str:
    counts = collections.Counter(row.status for row in report.layers)
    return (
        f"{counts['rewritten']} rewritten, {counts['refused']} refused, {counts['not found']} not found; "
        f"modules that own experts: {report.num_moe_modules}, graphs: {report.num_graphs}, "
        f"graph breaks: {len(report.graph_breaks)}"
    )
