"""How long does something take on the GPU? CUDA graphs in rotating order, each replay with a cold L2."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

FLUSH_BYTES = 256 << 20  # over twice the L2 of an H200, so that nothing of the call before is left there


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
    """``function``, which must not wait for the device, as a CUDA graph; it is called twice before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function()
    return Captured(graph, output, function)


def measure(graphs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each graph, one replay a round, in rotating order, 256 MiB written before each."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for round_index in range(rounds):
        turn = round_index % len(names)
        for name in names[turn:] + names[:turn]:
            flush.fill_(1)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graphs[name]()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end))
    return times
