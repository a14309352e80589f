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
from perseus_compile.cli.models import DType, require_transformers
from perseus_compile.testing.conditions import conditions

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)

Rounds = Annotated[int, typer.Option(min=1, help="measurements of each cell, in rotating order")]


@app.command("moe")
def moe_layer(
    tokens: Annotated[str, typer.Option(help="token counts, separated by commas")] = "1,4,16,64,256,1024",
    dtypes: Annotated[str, typer.Option(help="dtypes, separated by commas")] = "bfloat16,float32",
    rounds: Rounds = 7,
    out: Annotated[Path, typer.Option(help="JSON rows are appended to this file")] = Path("bench_moe.jsonl"),
) -> None:
    """Time of one MoE layer on the CPU (hidden 1024, expert width 512, 64 experts, top-8) beside Inductor's."""
    require_transformers()
    from perseus_compile.testing import bench_moe

    cases = [
        bench_moe.Case(tokens=int(count), dtype=DType(dtype).torch_dtype)
        for dtype in dtypes.split(",")
        for count in tokens.split(",")
    ]
    table = Table(title="Microseconds per call, median", title_justify="left")
    for heading in ("dtype", "tokens", "contestant", "microseconds", "p20 - p80", "over best Inductor"):
        table.add_column(heading)
    for case in track(cases, description="measuring", console=errors):
        rows = [{"bench": "moe", **row, **conditions()} for row in bench_moe.measure(case, rounds=rounds)]
        for row in rows:
            spread = f"{row['microseconds_p20']:.0f} - {row['microseconds_p80']:.0f}"
            median, ratio = f"{row['microseconds_p50']:.0f}", f"{row['time_over_best_inductor']:.2f}"
            table.add_row(row["dtype"], str(row["tokens"]), row["contestant"], median, spread, ratio)
        table.add_section()
        _append(out, rows)
    results().print(table)
    _say_where(out)


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
    _say_where(out)


def _append(out: Path, rows: Iterable[dict[str, Any]]) -> None:
    with out.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _say_where(out: Path) -> None:
    errors.print(f"[dim]rows appended to {out}[/dim]", highlight=False)
