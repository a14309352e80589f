"""How does a report look on a terminal? Presentation only."""

from __future__ import annotations

import collections
import io
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

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
    text = io.StringIO()
    Console(file=text, width=_PLAIN_WIDTH, color_system=None).print(render(report))
    return text.getvalue().rstrip()


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
