"""How long does the host take to launch a call, and where does the time go? Microseconds of Python and driver.

Parts, the ``part`` of a row: ``launch``, the C++ launcher alone; ``allocate``, the output and the workspace; ``run``,
``Prepared.run``, which is both; ``site``, finding the plan of a call; ``bare_op``, an op with the schema of
``perseus::experts`` whose kernel returns x, which no implementation in Python can beat; ``experts`` and ``moe``, the
ops. The GPU works behind the host and its queue is never full, so that no launch waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from perseus_compile import fused_experts, ops
from perseus_compile.call_sites import experts_site
from perseus_compile.facts import RoutingSpec, op_arguments
from perseus_compile.jit import driver
from perseus_compile.testing import cuda_timing
from perseus_compile.testing.bench_rows import Row, rotations, row
from perseus_compile.testing.conditions import conditions
from perseus_compile.testing.moe_cases import Case

CALLS_BETWEEN_SYNCHRONISATIONS = 64  # a stream's queue takes about a thousand launches

_LIBRARY = torch.library.Library("perseus_bench_host", "FRAGMENT")
_LIBRARY.define(next(schema for schema in ops.SCHEMAS if schema.startswith("experts(")))
_LIBRARY.impl("experts", lambda keyset, *tensors, **numbers: tensors[0], "Autograd", with_keyset=True)


def time_calls(
    contestants: Mapping[str, Callable[[], Any]],
    rounds: int,
    synchronise: Callable[[], None],
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> dict[str, list[float]]:
    """Milliseconds of every call, 64 calls of each contestant a round, in rotating order; a first round is left out.

    Args:
        synchronise: waits for the device; called outside the timed parts.
        clock_ns: nanoseconds.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for order in rotations(contestants, rounds + 1):
        for name in order:
            contestant, samples = contestants[name], times[name]
            synchronise()
            for _ in range(CALLS_BETWEEN_SYNCHRONISATIONS):
                start = clock_ns()
                contestant()
                samples.append((clock_ns() - start) / 1e6)
    synchronise()
    return {name: samples[CALLS_BETWEEN_SYNCHRONISATIONS:] for name, samples in times.items()}


@torch.no_grad()
def measure(case: Case, num_tokens: int, *, rounds: int = 100, commit: str | None = None) -> list[Row]:
    """One row per part, on the current CUDA device, in bfloat16 with random weights.

    Raises:
        AssertionError: the fused kernel does not cover the case.
    """
    contestants = _contestants(case, num_tokens)
    times = time_calls(contestants, rounds, torch.cuda.synchronize)
    clock_mhz = cuda_timing.clock_mhz(contestants["experts"], min(times["experts"]))
    found = conditions(torch.device("cuda"), commit=commit, clock_mhz=clock_mhz)
    return [
        row("host", case.name, milliseconds, found, tokens=num_tokens, dtype="bfloat16", impl="perseus", part=part)
        for part, milliseconds in times.items()
    ]


def _contestants(case: Case, num_tokens: int) -> dict[str, Callable[[], Any]]:
    experts, router = _random_tensors(case, num_tokens)
    x_TD, ids_TK, weights_TK = experts[:3]
    numbers = op_arguments(case.experts, x_TD.dtype)
    routing = RoutingSpec(
        routing="softmax_topk",
        top_k=case.top_k,
        renormalize=True,
        router_dtype=torch.bfloat16,
        score_dtype=torch.float32,
        weights_dtype=torch.float32,
    )
    moe_args, moe_numbers = (x_TD, router, None, None, *experts[3:]), {**op_arguments(routing, x_TD.dtype), **numbers}
    prepared = fused_experts.make_plan(experts, case.experts).prepared
    assert prepared is not None, "the fused kernel must cover the case"
    stream, workspace_bytes = driver.current_stream(x_TD.get_device()), prepared.layout.total_bytes
    out_TD = torch.empty_like(x_TD)
    workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device="cuda")
    addresses = [one.data_ptr() for one in (x_TD, ids_TK, weights_TK, out_TD, workspace)]
    hashable = tuple(tuple(one) if isinstance(one, list) else one for one in numbers.values())

    def allocate() -> None:
        torch.empty_like(x_TD, memory_format=torch.contiguous_format)
        driver.free(driver.allocate(workspace_bytes, stream))

    return {
        "launch": lambda: prepared.launch(stream, *addresses),
        "allocate": allocate,
        "run": lambda: prepared.run(x_TD, ids_TK, weights_TK),
        "site": lambda: ops._experts_sites.find(experts_site(hashable, *experts)),
        "bare_op": lambda: torch.ops.perseus_bench_host.experts(*experts, **numbers),
        "experts": lambda: torch.ops.perseus.experts(*experts, **numbers),
        "moe": lambda: torch.ops.perseus.moe(*moe_args, **moe_numbers),
    }


def _random_tensors(case: Case, num_tokens: int) -> tuple[tuple[Any, ...], Tensor]:
    """The arguments of ``perseus::experts`` in schema order, and a router weight."""

    def normal(*sizes: int) -> Tensor:
        return torch.empty(*sizes, device="cuda", dtype=torch.bfloat16).normal_().mul_(sizes[-1] ** -0.5)

    d, f, e = case.model_width, case.expert_width, case.num_experts
    gate_up, down = normal(e, 2 * f, d), normal(e, d, f)
    if case.experts.weight_layout == "in_out":
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    weights_TK, ids_TK = torch.rand(num_tokens, e, device="cuda").topk(case.top_k)
    return (normal(num_tokens, d), ids_TK, weights_TK, gate_up, None, down, None), normal(e, d)
