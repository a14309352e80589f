"""Where does the command line write? Results to stdout, progress and errors to stderr, so that results can be piped."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import typer
from rich.console import Console

errors = Console(stderr=True)


def results() -> Console:
    """Made at each use, since rich binds to the stdout of that moment. Tables keep their width in a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


@contextlib.contextmanager
def step(message: str) -> Iterator[None]:
    """Shows that long work is going on, and afterwards how long it took."""
    start = time.perf_counter()
    with errors.status(f"{message} ..."):
        yield
    errors.print(f"[dim]{message}: {time.perf_counter() - start:.1f} s[/dim]", highlight=False, soft_wrap=True)


def counts(option: str, text: str) -> list[int]:
    """Of "1,16,64"; of nothing, none.

    Raises:
        typer.BadParameter: one is no number from 1 on.
    """
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isdecimal() and int(word) >= 1 for word in words):
        raise typer.BadParameter(f"{option} must hold counts from 1 on, separated by commas; got {text!r}")
    return [int(word) for word in words]
