"""Where does the command line write? Results to stdout, progress and errors to stderr, so that results can be piped."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

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
    errors.print(f"[dim]{message}: {time.perf_counter() - start:.1f} s[/dim]", highlight=False)
