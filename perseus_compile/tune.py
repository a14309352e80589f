"""Which candidate of a plan is fastest on this GPU? Measures those that may be and keeps the times for the planner.

Axes: T tokens, K choices per token, E experts, D model width, F expert width.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from perseus_compile import cuda_plan, fused_experts, grouped, tuned
from perseus_compile.cuda_cost import Candidate
from perseus_compile.errors import BuildError, UnsupportedMoE
from perseus_compile.facts import ExpertsSpec
from perseus_compile.jit.spec import spec_for
from perseus_compile.testing.cuda_timing import capture, measure

# Predicted to be slower than the best by more than this: not measured. The model is off by 9 % at most where it was
# fitted; elsewhere, and for other candidates than the best, it may be off by more.
NEAR = 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """Random experts on the current GPU, bfloat16, in the layout of ``spec``."""

    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    spec: ExpertsSpec

    @staticmethod
    def random(model_width: int, expert_width: int, has_biases: bool, spec: ExpertsSpec) -> ExpertWeights:
        def normal(*sizes: int) -> Tensor:
            return torch.empty(*sizes, device="cuda", dtype=torch.bfloat16).normal_(std=model_width**-0.5)

        experts = spec.num_experts
        out_in = spec.weight_layout == "out_in"
        return ExpertWeights(
            gate_up=normal(experts, 2 * expert_width, model_width)
            if out_in
            else normal(experts, model_width, 2 * expert_width),
            gate_up_bias=normal(experts, 2 * expert_width) if has_biases else None,
            down=normal(experts, model_width, expert_width) if out_in else normal(experts, expert_width, model_width),
            down_bias=normal(experts, model_width) if has_biases else None,
            spec=spec,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunedCandidate:
    """A row of the table that ``perseus tune`` prints; ``measured_ms`` is None where it was not worth a measurement."""

    candidate: Candidate
    predicted_ms: float
    measured_ms: float | None
    is_chosen: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunedBucket:
    """What was found out about one token bucket, and the file that keeps it; None: it could not be written."""

    num_tokens: int
    rows: tuple[TunedCandidate, ...]  # fastest first
    file: Path | None


def tune_bucket(weights: ExpertWeights, top_k: int, num_tokens: int, *, rounds: int) -> TunedBucket:
    """Measures the candidates near the model's choice for the bucket of ``num_tokens``, interleaved, and keeps them.

    Every candidate is one CUDA graph, replayed with a cold L2; the median of ``rounds`` counts. Routing is even. The
    device of the weights must be the current one.

    Raises:
        UnsupportedMoE: the fused kernel does not cover the call, so that there is nothing to choose.
        BuildError: a kernel cannot be built or loaded.
    """
    num_tokens = cuda_plan.token_bucket(num_tokens)
    device = weights.gate_up.device
    model_width = weights.gate_up.shape[2 if weights.spec.weight_layout == "out_in" else 1]
    x_TD = torch.randn(num_tokens, model_width, device=device).bfloat16()
    scores_TE = torch.rand(num_tokens, weights.spec.num_experts, device=device)
    ids_TK = scores_TE.topk(top_k, -1).indices
    weights_TK = torch.full((num_tokens, top_k), 1 / top_k, device=device)
    experts = (weights.gate_up, weights.gate_up_bias, weights.down, weights.down_bias)
    tensors = (x_TD, ids_TK, weights_TK, *experts)
    uncovered = fused_experts.why_not(*tensors, weights.spec)
    if uncovered is not None:
        raise UnsupportedMoE(f"{uncovered}; such a call has one path, so that there is nothing to tune")
    plain_covers = grouped.unsupported_reason(x_TD, weights.gate_up, weights.down, weights.spec) is None
    shape = cuda_plan.call_shape(x_TD, ids_TK, weights.gate_up, weights.gate_up_bias, weights.down, weights.spec)
    ranked = cuda_plan.covering(cuda_plan.ranked(shape, cuda_plan.gpu_numbers(device.index)), plain_covers)
    near = [one for one, ms in ranked if one.path == "plain" or ms <= NEAR * ranked[0][1]]
    graphs = {str(one): capture(_call_of(one, tensors, weights.spec)) for one in near}
    times = measure(graphs, rounds)
    medians = {one: statistics.median(times[str(one)]) for one in near}
    file = tuned.record(tuned.key_of(shape, device.index), tuple(medians.items()))
    fastest = min(medians, key=medians.__getitem__)
    rows = [
        TunedCandidate(candidate=one, predicted_ms=ms, measured_ms=medians.get(one), is_chosen=one == fastest)
        for one, ms in ranked
    ]
    rows.sort(key=lambda row: (row.measured_ms is None, row.measured_ms or row.predicted_ms))
    return TunedBucket(num_tokens=num_tokens, rows=tuple(rows), file=file)


def _call_of(
    candidate: Candidate,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None],
    spec: ExpertsSpec,
) -> Callable[[], Tensor]:
    if candidate.tiles is None:
        return lambda: grouped.forward(*tensors, spec)
    variant = spec_for(
        candidate.tiles, weight_layout=spec.weight_layout, gate_layout=spec.gate_layout, activation=spec.activation
    )
    kernel = fused_experts.kernel_for(variant, tensors[0].device.index)
    if kernel is None:
        raise BuildError(f"the kernel for {variant} must be built to be measured, it could not be; see the log")
    prepared = kernel.prepare(*tensors, spec, num_column_groups=candidate.column_groups)
    return lambda: prepared.run(*tensors[:3])
