"""The command ``perseus``: what the backend does with a model, and what this machine has.

Commands parse and print; what they print is computed elsewhere in the package.
"""

from __future__ import annotations

import sys

import typer

from perseus_compile.cli import bench, demo, inspect, tune, warmup
from perseus_compile.cli.console import errors
from perseus_compile.errors import PerseusError

app = typer.Typer(
    name="perseus",
    help='What torch.compile(backend="perseus") does with a Mixture-of-Experts model, and what this machine has.',
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("explain")(inspect.explain)
app.command("diff")(inspect.diff)
app.command("doctor")(inspect.doctor)
app.command("tune")(tune.tune)
app.command("warmup")(warmup.warmup)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Entry point of the console script: mistakes of the user end in one sentence, not in a traceback."""
    try:
        app()
    except PerseusError as error:
        errors.print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
        sys.exit(1)
