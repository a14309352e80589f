"""perseus bench: speed of the ops, and compile time. Prints tables, writes JSON rows that carry their conditions."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track
from rich.table import Table

from perseus_compile.cli.console import errors, results
from perseus_compile.cli.models import require_transformers
from perseus_compile.testing.conditions import conditions

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)

Rounds = Annotated[int, typer.Option(min=1, help="measurements of each cell, in rotating order")]


@app.command("compile")
def compile_time(
    model_type: Annotated[str, typer.Option(help="a Hugging Face model_type")] = "qwen3_moe",
    layers: Annotated[int, typer.Option(min=1, help="decoder layers")] = 8,
    rounds: Rounds = 3,
    out: Annotated[Path, typer.Option(help="JSON rows are appended to this file")] = Path("bench_compile.jsonl"),
) -> None:
    """Compile time: the perseus stages beside Inductor's own, without any cache."""
    require_transformers()
    from perseus_compile.testing import bench_compile

    steps = track(
        bench_compile.rounds_of_seconds(model_type, num_layers=layers, rounds=rounds),
        description="compiling",
        total=rounds,
        console=errors,
    )
    case = {"bench": "compile", "model_type": model_type, "layers": layers, "rounds": rounds}
    rows = list(bench_compile.rows(list(steps), {**case, **conditions()}))
    table = Table(title=f"Seconds to compile {model_type}, {layers} layers", title_justify="left")
    for heading in ("part", "median s", "min", "max", "share of Inductor"):
        table.add_column(heading)
    for row in rows:
        seconds = (f"{row[key]:.3f}" for key in ("seconds_median", "seconds_min", "seconds_max"))
        table.add_row(row["part"], *seconds, f"{row['share_of_inductor']:.1%}")
    results().print(table)
    _append(out, rows)


def _append(out: Path, rows: Iterable[dict[str, Any]]) -> None:
    with out.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    errors.print(f"[dim]rows appended to {out}[/dim]", highlight=False)
