"""How fast is one MoE layer, beside what a user of PyTorch has today? Forward.

Contestants, the ``impl`` of a row: ``perseus``; ``eager``, Hugging Face's block as it is (grouped_mm); ``inductor``,
the block compiled for exactly this token count; on a GPU ``inductor_graph``, the same in a CUDA graph, and ``plain``,
the plain path of perseus behind the block's router, in a CUDA graph as perseus is; on a CPU ``inductor_batched_mm``,
the block with the other implementation of its experts. ``part`` is ``layer``, router included, or ``experts``: ids and
weights are given.

Axes: B sequences (1), T tokens, D model width, S sampled tokens.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch._inductor.config
from torch import Tensor

from perseus_compile import fused_experts, grouped, observe
from perseus_compile.backend import perseus
from perseus_compile.testing import cpu_timing, cuda_timing, moe_cases
from perseus_compile.testing.bench_rows import Row, WrongResult, row
from perseus_compile.testing.conditions import conditions
from perseus_compile.testing.moe_cases import Case
from perseus_compile.testing.moe_layer import MoELayer, expected, inputs

BASELINES = ("inductor", "inductor_graph", "inductor_batched_mm")

Contestants = dict[str, Callable[[], Tensor]]  # by "part/impl"

# Relative L2 distance from float32. In bfloat16 a chain that rounds before and after the activation and at the weights
# reaches 7e-3; a wrong expert, bias or weight is ten times that.
_MAX_ERROR = {torch.bfloat16: 1.5e-2, torch.float32: 1e-5}
_SUSTAINED_TOKENS = 4096  # from here on the power cap counts
# On a CPU, rotating through several inputs changes which experts are hit, so that few tokens do not find all weights in
# a cache.
_CPU_INPUTS = 8
# batched_mm copies the weights of every chosen expert; beyond this it is left out.
_MAX_COPY_BYTES = 8e9
# Processes that compile ahead share the GPU's memory, each with the weights of one layer.
_PROCESSES_PER_CASE = 2


def default_rounds(num_tokens: int) -> int:
    """Short calls scatter more and cost less."""
    return 31 if num_tokens <= 128 else 15 if num_tokens < _SUSTAINED_TOKENS else 7


@torch.no_grad()
def measure(
    layer: MoELayer,
    num_tokens: int,
    *,
    rounds: int | None = None,
    with_inductor: bool = True,
    commit: str | None = None,
) -> list[Row]:
    """One row per contestant. All hold the same weights and run in one process, in rotating order.

    Args:
        rounds: samples per contestant; None: ``default_rounds``.
        with_inductor: False leaves out the compiled baselines.
        commit: see ``conditions``.

    Raises:
        WrongResult: a contestant is farther from float32 than rounding explains, or perseus did not rewrite the
            layer.
    """
    x_BTD, samples_S = inputs(layer, num_tokens)
    on_cuda = x_BTD.device.type == "cuda"
    expected_SD = expected(layer, x_BTD, samples_S)
    with observe.collect() as reports:
        contestants = (_on_cuda if on_cuda else _on_cpu)(layer, x_BTD, with_inductor)
        for name, contestant in contestants.items():
            actual_SD = contestant().reshape(num_tokens, -1)[samples_S].float()
            error = float((actual_SD - expected_SD).norm() / expected_SD.norm())
            if not error <= _MAX_ERROR[x_BTD.dtype]:
                limit = _MAX_ERROR[x_BTD.dtype]
                raise WrongResult(
                    f"{name} at T={num_tokens} must be within {limit} of float32, its error is {error:.2g}"
                )
    if sum(len(report.layers) for report in reports) != 1:
        refusals = [refusal.reason for report in reports for refusal in report.refusals]
        raise WrongResult(f"perseus must rewrite the layer at T={num_tokens}, it did not; reasons: {refusals}")
    rounds = rounds or default_rounds(num_tokens)
    clock_mhz = None
    if on_cuda:
        times = cuda_timing.measure(contestants, rounds, sustained=num_tokens >= _SUSTAINED_TOKENS)
        clock_mhz = cuda_timing.clock_mhz(contestants["layer/perseus"], min(times["layer/perseus"]))
    else:
        times = cpu_timing.measure(contestants, rounds)
    return list(rows(layer, x_BTD, times, conditions(x_BTD.device, commit=commit, clock_mhz=clock_mhz)))


def rows(layer: MoELayer, x_BTD: Tensor, times: Mapping[str, Sequence[float]], conditions: Row) -> Iterator[Row]:
    """The rows of one cell; TFLOP/s on useful FLOPs, GB/s on the weights of the experts hit, x and the output."""
    case, num_tokens = layer.case, x_BTD.shape[1]
    dtype = str(x_BTD.dtype).removeprefix("torch.")
    num_hit = layer.route(x_BTD)[0].unique().numel()
    tiles = fused_experts.choose_tiles(num_tokens, case.top_k, case.num_experts) if x_BTD.is_cuda else None
    for name, milliseconds in times.items():
        part, impl = name.split("/")
        measured = row(
            *("moe", case.name, milliseconds, conditions),
            tokens=num_tokens,
            dtype=dtype,
            impl=impl,
            plan=tiles if impl == "perseus" else None,
            part=part,
        )
        measured["tflops"] = case.flops(num_tokens) / measured["ms_p50"] / 1e9
        measured["gb_per_s"] = case.bytes(num_tokens, num_hit, dtype) / measured["ms_p50"] / 1e6
        yield measured


def ratios(cell: Sequence[Row]) -> dict[str, float]:
    """The time of the perseus layer over that of every other contestant of a cell, of rivals and of the estimate.

    Below 1 perseus is faster. "best_inductor" is the fastest of the compiled baselines. Figures of rivals are those of
    ``moe_cases.RIVALS`` and only there on their GPU and in their dtype.
    """
    layers = {row["impl"]: row["ms_p50"] for row in cell if row["part"] == "layer"}
    others = {impl: ms for impl, ms in layers.items() if impl != "perseus"}
    baselines = [ms for impl, ms in layers.items() if impl in BASELINES]
    if baselines:
        others["best_inductor"] = min(baselines)
    first = cell[0]
    rival = moe_cases.RIVALS.get((first["case"], first["tokens"]))
    if rival and first["gpu"] == moe_cases.RIVALS_GPU and first["dtype"] == "bfloat16":
        others |= {"best_rival": rival.layer, "estimate": rival.estimate}
    return {name: layers["perseus"] / ms for name, ms in others.items()}


def compile_ahead(
    cases: Sequence[Case], tokens: Sequence[int], dtype: torch.dtype, device: torch.device, *, with_inductor: bool
) -> None:
    """Compiles every cell in parallel processes, so that ``measure`` finds graphs and kernels in the caches on disk.

    The caches are Inductor's (``TORCHINDUCTOR_CACHE_DIR``) and the one of our kernels (``PERSEUS_CACHE_DIR``).
    """
    tasks = [(case, tokens[start::_PROCESSES_PER_CASE]) for case in cases for start in range(_PROCESSES_PER_CASE)]
    tasks = [(case, some) for case, some in tasks if some]
    # Not forked: a process with a CUDA context must not be.
    # NOTE: a key of torch's caches names the first imported module that has the name "torch" in it, so the main process
    # must have imported perseus_compile before torch, as these do and as the command line does.
    context = multiprocessing.get_context("spawn")
    workers = min(len(tasks), os.cpu_count() or 1)
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting = [pool.submit(_compile, case, some, dtype, device, with_inductor) for case, some in tasks]
        for done in concurrent.futures.as_completed(waiting):
            done.result()


@torch.no_grad()
def _compile(case: Case, tokens: Sequence[int], dtype: torch.dtype, device: torch.device, with_inductor: bool) -> None:
    torch._inductor.config.compile_threads = 1  # there are as many processes as cores
    layer = MoELayer(case, dtype, device)
    for num_tokens in tokens:
        x_BTD, _ = inputs(layer, num_tokens)
        for function in _compiled(layer, with_inductor).values():
            function(x_BTD)


def _compiled(layer: MoELayer, with_inductor: bool) -> dict[str, Callable[[Tensor], Tensor]]:
    """The layer compiled for exactly one token count, which is the best that Inductor can do."""
    torch._dynamo.reset()
    # Dynamo about helpers of transformers that are cached by version number; tracing through them is harmless.
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    functions = {"perseus": torch.compile(layer, backend=perseus, dynamic=False, fullgraph=True)}
    if with_inductor:
        functions["inductor"] = torch.compile(layer, dynamic=False, fullgraph=True)
    return functions


def _on_cuda(layer: MoELayer, x_BTD: Tensor, with_inductor: bool) -> Contestants:
    x_TD, routed, numbers = x_BTD[0], layer.route(x_BTD), layer.spec.as_kwargs()
    functions = _compiled(layer, with_inductor)

    def plain() -> Tensor:
        return grouped.forward(x_TD, *layer.route(x_BTD), *layer.weights, layer.spec)

    contestants: Contestants = {
        "experts/perseus": cuda_timing.capture(
            lambda: torch.ops.perseus.experts(x_TD, *routed, *layer.weights, **numbers)
        ),
        "layer/perseus": cuda_timing.capture(lambda: functions["perseus"](x_BTD)),
        "layer/plain": cuda_timing.capture(plain),
        "layer/eager": lambda: layer(x_BTD),
    }
    if with_inductor:
        contestants["layer/inductor"] = lambda: functions["inductor"](x_BTD)
        contestants["layer/inductor_graph"] = cuda_timing.capture(contestants["layer/inductor"])
    return contestants


def _on_cpu(layer: MoELayer, x_BTD: Tensor, with_inductor: bool) -> Contestants:
    num_tokens, dtype = x_BTD.shape[1], x_BTD.dtype
    functions: dict[str, Callable[[Tensor], Tensor]] = {**_compiled(layer, with_inductor), "eager": layer}
    copied = layer.case.copied_bytes(num_tokens, str(dtype).removeprefix("torch."))
    if with_inductor and copied <= _MAX_COPY_BYTES:
        batched = MoELayer(layer.case, dtype, x_BTD.device, "batched_mm")
        functions["inductor_batched_mm"] = torch.compile(batched, dynamic=False, fullgraph=True)
    generator = torch.Generator().manual_seed(1)
    more = (torch.randn(x_BTD.shape, generator=generator).to(dtype) for _ in range(_CPU_INPUTS - 1))
    all_inputs = [x_BTD, *more]

    def rotating(function: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        turns = itertools.cycle(all_inputs)
        return lambda: function(next(turns))

    return {f"layer/{impl}": rotating(function) for impl, function in functions.items()}
