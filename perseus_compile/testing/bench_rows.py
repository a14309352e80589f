"""What is in a row of a result file? One measurement with its conditions; every ``perseus bench`` writes these."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# Every row has these; null where a field says nothing (the GPU of a CPU measurement, the plan of a baseline).
FIELDS = (
    *("bench", "case", "tokens", "world", "dtype", "impl", "ms_p20", "ms_p50", "ms_p80", "plan"),
    *("gpu", "clock_mhz", "torch", "commit", "date"),
)


class WrongResult(AssertionError):
    """A contestant does not compute what it is measured for; it has no time."""


def row(
    bench: str,
    case: str,
    milliseconds: Sequence[float],
    conditions: Row,
    *,
    tokens: int,
    dtype: str,
    impl: str,
    plan: str | None = None,
    **more: Any,
) -> Row:
    """One measurement.

    Args:
        bench: which benchmark: moe, e2e, compile or host.
        case: what is run, a name.
        milliseconds: the samples.
        conditions: of ``conditions.conditions``.
        tokens: per call and rank.
        dtype: without "torch.".
        impl: who ran it: perseus, inductor, ...
        plan: what perseus chose.
        more: fields that only this benchmark has.
    """
    ordered = sorted(milliseconds)
    return {
        **{"bench": bench, "case": case, "tokens": tokens, "world": 1, "dtype": dtype, "impl": impl},
        "ms_p20": ordered[int(0.2 * (len(ordered) - 1))],
        "ms_p50": statistics.median(ordered),
        "ms_p80": ordered[round(0.8 * (len(ordered) - 1))],
        **{"plan": plan, "rounds": len(ordered)},
        **more,
        **conditions,
    }


def append(file: Path, rows: Iterable[Row]) -> None:
    with file.open("a") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def rotations(names: Iterable[str], rounds: int) -> Iterator[list[str]]:
    """For each round an order of the names in which another one is first."""
    names = list(names)
    for index in range(rounds):
        turn = index % len(names)
        yield names[turn:] + names[:turn]
