"""perseus bench: speed of a layer and of a model, and compile time. Prints tables, writes JSON rows.

A row is one measurement with its conditions (``testing/bench_rows.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.progress import track
from rich.table import Table

from perseus_compile.cli.console import counts, errors, results
from perseus_compile.cli.models import DType, require_transformers
from perseus_compile.testing import bench_rows, moe_cases
from perseus_compile.testing.bench_rows import Row, WrongResult
from perseus_compile.testing.conditions import conditions

if TYPE_CHECKING:
    from perseus_compile.testing.bench_compile import Call

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)

Device = Annotated[str | None, typer.Option(help="cuda or cpu; cuda where there is one")]
Commit = Annotated[str | None, typer.Option(help="of the source tree, where git does not know it")]
Out = Annotated[Path, typer.Option(help="JSON rows are appended to this file")]


@app.command("moe")
def moe_layer(
    device: Device = None,
    cases: Annotated[str | None, typer.Option(help="names of testing/moe_cases.py, separated by commas")] = None,
    tokens: Annotated[str | None, typer.Option(help="token counts, separated by commas")] = None,
    dtypes: Annotated[str | None, typer.Option(help="dtypes, separated by commas")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="samples of each contestant; 7 to 31 by tokens")] = None,
    inductor: Annotated[bool, typer.Option(help="measure the compiled baselines too")] = True,
    commit: Commit = None,
    out: Out = Path("bench_moe.jsonl"),
) -> None:
    """Time of one MoE layer beside eager code and Inductor: six layers on a GPU, a small one on a CPU."""
    require_transformers()
    from perseus_compile.testing import bench_moe
    from perseus_compile.testing.moe_layer import MoELayer

    where = _device(device)
    chosen = [_case(name) for name in cases.split(",")] if cases else moe_cases.CASES_OF_DEVICE[where.type]
    token_counts = counts("--tokens", tokens) if tokens else moe_cases.TOKENS[where.type]
    names = dtypes.split(",") if dtypes else moe_cases.DTYPES[where.type]
    say = _clock()
    wrong: list[str] = []
    for dtype in [_dtype(name) for name in names]:
        if where.type == "cuda" and len(chosen) * len(token_counts) > 1:
            say(f"compiling {len(chosen) * len(token_counts)} cells ahead")
            bench_moe.compile_ahead(chosen, token_counts, dtype, where, with_inductor=inductor)
        for case in chosen:
            layer = MoELayer(case, dtype, where)
            cells = []
            for count in token_counts:
                try:
                    cell = bench_moe.measure(layer, count, rounds=rounds, with_inductor=inductor, commit=commit)
                except WrongResult as error:
                    wrong.append(f"{case.name}: {error}")
                    continue
                bench_rows.append(out, cell)
                cells.append(cell)
                times = ", ".join(f"{row['part']}/{row['impl']} {row['ms_p50']:.4g}" for row in cell)
                say(f"{case.name} T={count}: {times} ms")
            if cells:
                results().print(_moe_table(cells))
    _finish(out, wrong)


@app.command("e2e")
def end_to_end(
    device: Device = None,
    layers: Annotated[int, typer.Option(min=1, help="decoder layers")] = 8,
    prefill: Annotated[str, typer.Option(help="prompt lengths, separated by commas; may be empty")] = "4096",
    decode: Annotated[str, typer.Option(help="batch sizes, separated by commas; may be empty")] = "1,16,64",
    rounds: Annotated[int, typer.Option(min=1, help="samples of each contestant")] = 11,
    commit: Commit = None,
    out: Out = Path("bench_e2e.jsonl"),
) -> None:
    """Prefill and decode of a random model of Qwen3-30B-A3B's widths beside Inductor. For a GPU: 50 GB at 8 layers."""
    require_transformers()
    from perseus_compile.testing import bench_e2e

    where, say = _device(device), _clock()
    wrong: list[str] = []
    workloads = bench_e2e.workloads(counts("--prefill", prefill), counts("--decode", decode))
    model = bench_e2e.random_model(bench_e2e.QWEN3_30B, num_layers=layers, device=where)
    say("the model is made")
    exact = bench_e2e.exact_logits(model, workloads)
    say("float32 logits are known")
    table = Table(title=f"Qwen3-30B-A3B widths, {layers} layers: milliseconds", title_justify="left")
    for heading in ("workload", "tokens", "contestant", "median", "p20 - p80", "over best Inductor", "first call s"):
        table.add_column(heading)
    for workload in workloads:
        try:
            rows = bench_e2e.measure(
                *(model, f"qwen3_30b_{layers}_layers", workload, exact[workload]),
                rounds=rounds,
                with_graphs=where.type == "cuda",
                commit=commit,
            )
        except WrongResult as error:
            wrong.append(f"{workload.name}, {workload.tokens} tokens: {error}")
            continue
        bench_rows.append(out, rows)
        say(f"{workload.name}, {workload.tokens} tokens: done")
        best = min(row["ms_p50"] for row in rows if row["impl"] in bench_e2e.BASELINES)
        for row in rows:
            ratio, first = f"{row['ms_p50'] / best:.2f}", f"{row['first_call_s']:.1f}"
            table.add_row(
                workload.name, str(row["tokens"]), row["impl"], f"{row['ms_p50']:.4g}", _spread(row), ratio, first
            )
        table.add_section()
    results().print(table)
    _finish(out, wrong)


@app.command("compile")
def compile_time(
    model_type: Annotated[str, typer.Option(help="a Hugging Face model_type")] = "qwen3_moe",
    layers: Annotated[int, typer.Option(min=1, help="decoder layers")] = 8,
    growth: Annotated[str, typer.Option(help="numbers of decoder layers for the time per MoE layer; may be empty")] = (
        "4,8,16"
    ),
    loops: Annotated[str, typer.Option(help="numbers of experts of unrolled loops over experts; may be empty")] = "64",
    rounds: Annotated[int, typer.Option(min=1, help="compiles of each contestant, in rotating order")] = 3,
    commit: Commit = None,
    out: Out = Path("bench_compile.jsonl"),
) -> None:
    """Compile time: the perseus stages beside Inductor's own, without any cache, and their time per MoE layer."""
    require_transformers()
    sizes, loop_sizes = counts("--growth", growth), counts("--loops", loops)
    from perseus_compile.testing.bench_compile import loop_call, model_call

    found = conditions(torch.device("cpu"), commit=commit)
    call, first = model_call(model_type, layers), model_call(model_type, 2)
    rows = _print_compile_seconds(call, first, f"{model_type}_{layers}_layers", rounds, found)
    for num_experts in loop_sizes:
        call, first = loop_call(num_experts), loop_call(2)
        rows += _print_compile_seconds(call, first, f"loop_{num_experts}_experts", rounds, found)
    if sizes:
        rows += _print_growth(model_type, sizes, rounds, found)
    bench_rows.append(out, rows)
    _finish(out, wrong=[])


def _print_compile_seconds(call: Call, first: Call, case: str, rounds: int, found: Row) -> list[Row]:
    """Measures and prints the seconds that the parts of a compilation take."""
    from perseus_compile.testing import bench_compile

    measured = bench_compile.rounds_of_seconds(call, first=first, rounds=rounds)
    steps = track(measured, description=f"compiling {case}", total=rounds, console=errors)
    rows = list(bench_compile.rows(list(steps), case, found))
    table = Table(title=f"Seconds to compile {case}", title_justify="left")
    for heading in ("part", "median s", "p20", "p80", "share of Inductor"):
        table.add_column(heading)
    for row in rows:
        seconds = (f"{row[key] / 1e3:.3f}" for key in ("ms_p50", "ms_p20", "ms_p80"))
        table.add_row(row["part"], *seconds, f"{row['share_of_inductor']:.1%}")
    results().print(table)
    return rows


def _print_growth(model_type: str, layers: Sequence[int], rounds: int, found: Row) -> list[Row]:
    """Measures and prints the milliseconds per MoE layer by the number of layers."""
    from perseus_compile.testing import bench_compile

    measured = list(bench_compile.rounds_of_growth(model_type, layers=layers, rounds=rounds))
    rows = list(bench_compile.growth_rows(measured, model_type, found))
    table = Table(title=f"Milliseconds of all perseus stages per MoE layer, {model_type}", title_justify="left")
    for heading in ("decoder layers", "median ms", "p20", "p80"):
        table.add_column(heading, justify="right")
    for num_layers, row in zip(layers, rows, strict=True):
        table.add_row(str(num_layers), *(f"{row[key]:.1f}" for key in ("ms_p50", "ms_p20", "ms_p80")))
    results().print(table)
    return rows


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cuda", "cpu") or (name == "cuda" and not torch.cuda.is_available()):
        raise typer.BadParameter(f"--device must be cpu, or cuda where torch sees a GPU; got {name!r}")
    return torch.device(name)


def _dtype(name: str) -> torch.dtype:
    if name not in list(DType):
        raise typer.BadParameter(f"--dtypes must be among {', '.join(DType)}; got {name!r}")
    return DType(name).torch_dtype


def _case(name: str) -> moe_cases.Case:
    if name not in moe_cases.CASES:
        raise typer.BadParameter(f"--cases must be among {', '.join(moe_cases.CASES)}; got {name!r}")
    return moe_cases.CASES[name]


def _moe_table(cells: Sequence[Sequence[Row]]) -> Table:
    """A row per cell. Rates are those of the experts alone where they were measured, else of the layer."""
    from perseus_compile.testing.bench_moe import ratios

    first = cells[0][0]
    compared = list(dict.fromkeys(name for cell in cells for name in ratios(cell)))
    title = f"{first['case']}, {first['dtype']}: milliseconds of perseus, and its time over that of others"
    table = Table(title=title, title_justify="left")
    for heading in ("tokens", "layer", "p20 - p80", "experts", "TFLOP/s", "GB/s", *(f"/ {name}" for name in compared)):
        table.add_column(heading, justify="right")
    for cell in cells:
        own = {row["part"]: row for row in cell if row["impl"] == "perseus"}
        layer, experts = own["layer"], own.get("experts")
        rates = experts or layer
        found = ratios(cell)
        table.add_row(
            str(layer["tokens"]),
            f"{layer['ms_p50']:.4g}",
            _spread(layer),
            f"{experts['ms_p50']:.4g}" if experts else "-",
            f"{rates['tflops']:.4g}",
            f"{rates['gb_per_s']:.4g}",
            *(f"{found[name]:.2f}" if name in found else "-" for name in compared),
        )
    return table


def _spread(row: Row) -> str:
    return f"{row['ms_p20']:.4g} - {row['ms_p80']:.4g}"


def _clock() -> Callable[[str], None]:
    """Prints progress with the seconds since now."""
    start = time.perf_counter()

    def say(message: str) -> None:
        errors.print(f"[dim]{time.perf_counter() - start:6.1f} s  {message}[/dim]", highlight=False, soft_wrap=True)

    return say


def _finish(out: Path, wrong: Sequence[str]) -> None:
    """Says where the rows are, and fails if a contestant was wrong."""
    errors.print(f"[dim]rows appended to {out}[/dim]", highlight=False, soft_wrap=True)
    for message in wrong:
        errors.print(f"[red]not measured:[/red] {message}", highlight=False, soft_wrap=True)
    if wrong:
        raise typer.Exit(1)
