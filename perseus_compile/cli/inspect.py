"""perseus explain, diff and doctor: what would happen to a model, and what is here."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import torch
import typer
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from perseus_compile.cli.console import results, step
from perseus_compile.cli.models import DEFAULT_IMPLEMENTATION, DType, Width, random_model, require_transformers
from perseus_compile.doctor import Finding, diagnose
from perseus_compile.explain import Report
from perseus_compile.explain import explain as explain_model
from perseus_compile.report_table import render_why
from perseus_compile.testing.models import random_tokens

Everything = Annotated[bool, typer.Option("--all", help="every MoE family of transformers, tiny; takes minutes")]
_NAME = typer.Argument(metavar="NAME_OR_FOLDER", help="model_type, or a folder with config.json")
Name = Annotated[str, _NAME]
OptionalName = Annotated[str | None, _NAME]
Layers = Annotated[int, typer.Option(min=1, help="decoder layers")]
WidthOption = Annotated[Width, typer.Option(help="small sizes, or those of the real model")]
DTypeOption = Annotated[DType, typer.Option(help="dtype of the weights")]
Implementation = Annotated[
    str, typer.Option(help="how the experts run, for set_experts_implementation: grouped_mm, batched_mm, eager")
]
Why = Annotated[
    str | None,
    typer.Option(metavar="LAYER", help="the chain of checks of one layer, by its path or a module around it"),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table")]


def explain(
    name: OptionalName = None,
    everything: Everything = False,
    layers: Layers = 2,
    width: WidthOption = Width.reduced,
    dtype: DTypeOption = DType.float32,
    implementation: Implementation = DEFAULT_IMPLEMENTATION,
    why: Why = None,
    as_json: AsJson = False,
) -> None:
    """Which MoE layers of a model are rewritten, which not, and why. Weights are random; nothing is downloaded."""
    if (name is None) != everything:
        got = "neither" if name is None else "both"
        raise typer.BadParameter(f"a NAME_OR_FOLDER must be given, or --all, got {got}")
    if name is None:
        _explain_families(implementation, dtype)
        return
    report = _report(name, layers, width, dtype, implementation)
    if as_json:
        typer.echo(report.to_json())
    else:
        results().print(render_why(report, why) if why is not None else report)


def diff(
    name: Name,
    width: WidthOption = Width.reduced,
    dtype: DTypeOption = DType.float32,
    implementation: Implementation = DEFAULT_IMPLEMENTATION,
) -> None:
    """The lines of the graph that change where one MoE layer is rewritten."""
    # Two layers, since some models start with a dense one; the first that was rewritten is shown.
    report = _report(name, 2, width, dtype, implementation)
    rewritten = [row for row in report.layers if row.status == "rewritten"]
    if not rewritten:
        results().print(report)
        raise typer.Exit(1)
    print_diff(rewritten[0].graph_diff)


def doctor(as_json: AsJson = False) -> None:
    """What this machine has, and what each missing piece costs. Exits with 1 where a required piece is missing."""
    findings = diagnose()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        results().print(_findings_table(findings))
    if any(finding.required and not finding.found for finding in findings):
        raise typer.Exit(1)


def print_diff(graph_diff: str) -> None:
    results().print(Syntax(graph_diff, "diff", background_color="default", word_wrap=True))


def _explain_families(implementation: str, dtype: DType) -> None:
    require_transformers()
    from perseus_compile.testing.families import find_families
    from perseus_compile.testing.survey import as_markdown, survey

    reports = []
    for family in find_families():
        with step(f"compiling {family.name}"):
            reports.append(survey(family, implementation=implementation, dtype=dtype.torch_dtype))
    typer.echo(as_markdown(reports))


def _report(name: str, layers: int, width: Width, dtype: DType, implementation: str) -> Report:
    with step(f"building {name} with random weights"):
        model = random_model(name, num_layers=layers, width=width, dtype=dtype, implementation=implementation)
    with step("compiling and running it once"), torch.no_grad():
        return explain_model(model, random_tokens(model, (2, 8)), use_cache=False)


def _findings_table(findings: list[Finding]) -> Table:
    table = Table()
    for heading in ("piece", "here", "detail", "without it"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        mark = (
            Text("yes", style="green") if finding.found else Text("no", style="red" if finding.required else "yellow")
        )
        table.add_row(finding.name, mark, Text(finding.detail), Text(finding.cost or "-"))
    return table
