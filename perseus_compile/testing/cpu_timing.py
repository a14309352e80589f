"""How long does something take on the CPU? Samples of many calls, in rotating order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from perseus_compile.testing.bench_rows import rotations

# A sample lasts this long at least, so that the clock and the call around it do not count.
_SAMPLE_SECONDS = 0.02
_WARM_UP_CALLS = 8


def measure(
    contestants: Mapping[str, Callable[[], Any]], rounds: int, *, before_each: Callable[[], None] | None = None
) -> dict[str, list[float]]:
    """Milliseconds per call of each contestant, one sample a round, in rotating order.

    Args:
        contestants: functions without arguments.
        rounds: samples of each contestant.
        before_each: called before each call; its time does not count.
    """

    def sample(contestant: Callable[[], Any], num_calls: int) -> float:
        seconds = 0.0
        for _ in range(num_calls):
            if before_each is not None:
                before_each()
            start = time.perf_counter()
            contestant()
            seconds += time.perf_counter() - start
        return seconds / num_calls

    num_calls = {
        name: max(1, round(_SAMPLE_SECONDS / sample(contestant, _WARM_UP_CALLS)))
        for name, contestant in contestants.items()
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for order in rotations(contestants, rounds):
        for name in order:
            times[name].append(1e3 * sample(contestants[name], num_calls[name]))
    return times
