"""How long does something take on the GPU? Events, rotating order, cold L2; graphs and functions side by side."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from perseus_compile.testing.bench_rows import rotations

# Over twice the L2 of an H200 (50 MB), so that nothing of the call before is left there.
FLUSH_BYTES = 256 << 20
# A warm-up covers what a call does once: kernels that are built or loaded, and the recording of Inductor's own graphs
# (its first call runs as it is, its second is recorded).
_WARM_UP_CALLS = 3
# Sustained: a sample is the mean of so much work, back to back; the power cap shows after tens of milliseconds.
_SUSTAINED_MS = 50.0
_MIN_SUSTAINED_CALLS = 3
# Before such a sample, calls of the same contestant that are not timed. Else the clock that the contestant before has
# left behind decides: cells above 3 ms differed by up to 13 % with the neighbour in the order.
_SETTLING_MS = 100.0
_CLOCK_LOAD_MS = 100.0


@dataclasses.dataclass(frozen=True)
class Captured:
    """A CUDA graph that is called like the function it was made of; ``output`` is written by each call."""

    graph: torch.cuda.CUDAGraph
    output: Any
    function: Callable[[], Any]  # holds what the graph reads

    def __call__(self) -> Any:
        self.graph.replay()
        return self.output


def capture(function: Callable[[], Any]) -> Captured:
    """``function``, which must not wait for the device, as a CUDA graph; it is called a few times before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP_CALLS):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function()
    return Captured(graph, output, function)


def measure(
    contestants: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    sustained: bool = False,
    before_each: Callable[[], None] | None = None,
) -> dict[str, list[float]]:
    """Milliseconds of each contestant, one sample a round, in rotating order, each call with a cold L2.

    For a contestant that is no CUDA graph the time between its launches counts, as it does for its user.

    Args:
        contestants: graphs, or functions that launch on the current stream.
        rounds: samples of each contestant.
        sustained: a sample is the mean of 50 ms of calls, each after a write of the L2 and without a pause, after 100
            ms of the same that do not count; instead of one call after an idle moment.
        before_each: called before each call; its time does not count.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def sample(contestant: Callable[[], Any], num_calls: int) -> float:
        events = []
        for _ in range(num_calls):
            if before_each is not None:
                before_each()
            # Else Inductor takes a call for the next step of the contestant before it and records a graph for that.
            torch.compiler.cudagraph_mark_step_begin()
            flush.fill_(1)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            contestant()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in events) / num_calls

    num_calls, num_settling_calls = dict.fromkeys(contestants, 1), dict.fromkeys(contestants, 0)
    for name, contestant in contestants.items():
        for _ in range(_WARM_UP_CALLS):
            once = sample(contestant, 1)
        if sustained:
            num_calls[name] = max(_MIN_SUSTAINED_CALLS, round(_SUSTAINED_MS / once))
            num_settling_calls[name] = round(_SETTLING_MS / once)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for order in rotations(contestants, rounds):
        for name in order:
            if num_settling_calls[name]:
                sample(contestants[name], num_settling_calls[name])
            times[name].append(sample(contestants[name], num_calls[name]))
    return times


def clock_mhz(contestant: Callable[[], Any], milliseconds: float) -> int | None:
    """The SM clock while ``contestant``, which takes ``milliseconds``, runs; None without the package nvidia-ml-py."""
    for _ in range(max(1, round(_CLOCK_LOAD_MS / milliseconds))):
        contestant()
    time.sleep(_CLOCK_LOAD_MS / 2000)
    try:
        return torch.cuda.clock_rate()
    except ModuleNotFoundError:
        return None
    finally:
        torch.cuda.synchronize()
