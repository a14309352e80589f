"""Which path, tiles and column groups does a call of the experts take on a GPU? Decides from numbers; measures nothing.

Candidates are priced by ``cuda_cost``. What ``perseus tune`` has measured on this machine (``tuned``) beats the model.
Token counts fall into buckets, one plan each; no token count is ever part of a compile key.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import torch
from torch import Tensor

from perseus_compile import cuda_cost, tuned
from perseus_compile.cuda_cost import CallShape, Candidate, GpuNumbers
from perseus_compile.facts import ExpertsSpec

# Predictions this close say nothing about which is faster (their own error is 2 % in the median, 9 % at most), and
# measured times this close are called ties everywhere else.
TIE = 0.05
# Where measured times of neighbouring tile configurations cross, in rows per expert: decides among ties. Smaller tiles
# read weights again for every block of an expert's rows; larger ones leave fewer stages for the stream of weights.
# (H200, BF16, even routing, five model shapes, T = 1 .. 16384, docs/measured.md)
CROSSINGS = {"few8": 1, "few16": 8, "few32": 16, "few64": 32}
LAST_TILES = "many128"
# Two column groups were 1-2 % faster than one from so many tokens on, four tied or lost (same measurements).
GROUPS_FROM_TOKENS = 1024
_FINE_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CudaPlan:
    """How the calls of one bucket run. ``predicted_ms``: of the model, or the measured median where tuned."""

    path: Literal["fused", "plain"]
    tiles: str | None
    column_groups: int
    predicted_ms: float
    source: Literal["model", "tuned"]
    reason: str  # why this candidate, one clause for explain()


def token_bucket(num_tokens: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, 32, 64 and so on that is not less than ``num_tokens``."""
    if num_tokens <= _FINE_BUCKETS[-1]:
        return next(bucket for bucket in _FINE_BUCKETS if num_tokens <= bucket)
    return 1 << (num_tokens - 1).bit_length()


def call_shape(
    x_TD: Tensor, ids_TK: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, spec: ExpertsSpec
) -> CallShape:
    """The numbers of a call; sizes must be plain ints."""
    return CallShape(
        num_tokens=x_TD.shape[0],
        top_k=ids_TK.shape[1],
        num_experts=spec.num_experts,
        num_local_experts=gate_up.shape[0],
        model_width=x_TD.shape[1],
        expert_width=down.shape[2 if spec.weight_layout == "out_in" else 1],
        has_biases=gate_up_bias is not None,
        weight_layout=spec.weight_layout,
        gate_layout=spec.gate_layout,
        activation=spec.activation,
    )


@functools.cache
def gpu_numbers(device_index: int) -> GpuNumbers:
    """Of an installed GPU."""
    properties = torch.cuda.get_device_properties(device_index)
    return GpuNumbers(
        name=properties.name,
        num_sms=properties.multi_processor_count,
        clock_ghz=properties.clock_rate / 1e6,  # kHz
        memory_tb_per_s=properties.memory_clock_rate * 1e3 * properties.memory_bus_width / 8 * 2 / 1e12,
    )


def ranked(shape: CallShape, gpu: GpuNumbers) -> tuple[tuple[Candidate, float], ...]:
    """Every way to run a call and its predicted milliseconds, fastest first."""
    timed = [(one, cuda_cost.predicted_ms(one, shape, gpu)) for one in cuda_cost.candidates(shape)]
    return tuple(sorted(timed, key=lambda pair: pair[1]))


def covering(timed: tuned.Timed, plain_covers: bool) -> tuned.Timed:
    """Those of the candidates that can run a call; the fused kernel can."""
    return tuple((one, ms) for one, ms in timed if plain_covers or one.path == "fused")


def plan_for(shape: CallShape, device_index: int, *, plain_covers: bool = True) -> CudaPlan:
    """The plan of the bucket that ``shape`` falls into, on an installed GPU.

    Args:
        plain_covers: whether the plain path can run the call (``grouped.unsupported_reason``).
    """
    bucket = dataclasses.replace(shape, num_tokens=token_bucket(shape.num_tokens))
    measured = tuned.lookup(tuned.key_of(bucket, device_index))
    plan = None if measured is None else choose_measured(measured, plain_covers=plain_covers)
    return plan or choose(bucket, gpu_numbers(device_index), plain_covers=plain_covers)


def plan_of_call(
    x_TD: Tensor,
    ids_TK: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    spec: ExpertsSpec,
    *,
    plain_covers: bool = True,
) -> CudaPlan:
    """``plan_for`` the tensors of a call on a GPU."""
    shape = call_shape(x_TD, ids_TK, gate_up, gate_up_bias, down, spec)
    return plan_for(shape, x_TD.device.index, plain_covers=plain_covers)


@functools.lru_cache(maxsize=4096)
def choose(shape: CallShape, gpu: GpuNumbers, *, plain_covers: bool = True) -> CudaPlan:
    """The candidate that measured crossings favour, unless another is predicted to be faster by more than a tie."""
    allowed = covering(ranked(shape, gpu), plain_covers)
    best, best_ms = allowed[0]
    tiles = next((name for name, rows in CROSSINGS.items() if shape.rows_per_expert <= rows), LAST_TILES)
    groups = 2 if shape.num_tokens >= GROUPS_FROM_TOKENS else 1
    favoured = [(one, ms) for one, ms in allowed if one.tiles == tiles and ms <= best_ms * (1 + TIE)]
    if not favoured:
        return _plan(best, best_ms, "model", f"predicted to be the fastest of {len(allowed)} candidates")
    chosen, ms = min(favoured, key=lambda pair: (pair[0].column_groups != groups, pair[1]))
    reason = f"measured fastest at {shape.rows_per_expert:.4g} rows per expert; no other is predicted {TIE:.0%} faster"
    return _plan(chosen, ms, "model", reason)


def choose_measured(measured: tuned.Timed, *, plain_covers: bool = True) -> CudaPlan | None:
    """The fastest of the measured candidates; None where the plain path alone was measured and does not cover."""
    allowed = covering(measured, plain_covers)
    if not allowed:
        return None
    fastest, ms = min(allowed, key=lambda pair: pair[1])
    return _plan(fastest, ms, "tuned", f"the fastest of {len(allowed)} candidates measured on this machine")


def _plan(candidate: Candidate, ms: float, source: Literal["model", "tuned"], reason: str) -> CudaPlan:
    return CudaPlan(
        path=candidate.path,
        tiles=candidate.tiles,
        column_groups=candidate.column_groups,
        predicted_ms=ms,
        source=source,
        reason=reason,
    )
