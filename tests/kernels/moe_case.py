"""What do the kernel tests and benchmarks run on? Random calls of the experts, and their meaning in float32.

Axes: T tokens, K choices per token, E experts, D model width, F expert width.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from perseus_compile.facts import ExpertsSpec

TOLERANCE = 6e-3  # relative L2 of BF16 operands with float32 sums against float32; measured 2.3e-3 to 2.8e-3


@dataclasses.dataclass
class Case:
    """The arguments of ``perseus::experts`` in schema order, then its numbers."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    spec: ExpertsSpec

    @property
    def args(self) -> tuple[Tensor | None, ...]:
        return (self.x, self.ids, self.weights, self.gate_up, self.gate_up_bias, self.down, self.down_bias)

    def with_ids(self, ids: Tensor) -> Case:
        return dataclasses.replace(self, ids=ids)


def make_case(
    model_width: int,
    expert_width: int,
    num_experts: int,
    top_k: int,
    num_tokens: int,
    *,
    seed: int = 0,
    bias: bool = False,
    id_dtype: torch.dtype = torch.int64,
    weight_dtype: torch.dtype = torch.float32,
    weight_layout: str = "out_in",
    gate_layout: str = "concatenated",
    activation: str = "silu",
    weight_on: str = "output",
    expert_offset: int = 0,
    local_experts: int | None = None,
) -> Case:
    """Random x and weights, near-uniform routing without repeated experts in a token."""
    local = num_experts if local_experts is None else local_experts
    random = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.empty(*shape, device="cuda", dtype=torch.bfloat16).normal_(generator=random).mul_(scale)

    x = normal(num_tokens, model_width)
    scores = torch.randn(num_tokens, num_experts, device="cuda", generator=random).softmax(-1)
    weights, ids = scores.topk(top_k, -1)
    gate_up = normal(local, 2 * expert_width, model_width, scale=model_width**-0.5)
    down = normal(local, model_width, expert_width, scale=expert_width**-0.5)
    if weight_layout == "in_out":
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    spec = ExpertsSpec(
        weight_layout=weight_layout,  # type: ignore[arg-type]
        gate_layout=gate_layout,  # type: ignore[arg-type]
        activation=activation,  # type: ignore[arg-type]
        activation_params=(1.702, 7.0) if activation == "clamped_swiglu" else (),
        weight_on=weight_on,  # type: ignore[arg-type]
        num_experts=num_experts,
        expert_offset=expert_offset,
    )
    return Case(
        x=x,
        ids=ids.to(id_dtype),
        weights=(weights / weights.sum(-1, keepdim=True)).to(weight_dtype),
        gate_up=gate_up,
        gate_up_bias=normal(local, 2 * expert_width) if bias else None,
        down=down,
        down_bias=normal(local, model_width) if bias else None,
        spec=spec,
    )


def activate(gate: Tensor, up: Tensor, spec: ExpertsSpec) -> Tensor:
    if spec.activation == "silu":
        return F.silu(gate) * up
    if spec.activation in ("gelu", "gelu_tanh"):
        return F.gelu(gate, approximate="tanh" if spec.activation == "gelu_tanh" else "none") * up
    alpha, limit = spec.activation_params
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def reference(case: Case, rows: Tensor | None = None) -> Tensor:
    """The meaning of the call in float32, expert by expert; of all tokens or of ``rows``."""
    x, ids, weights = (t if rows is None else t[rows] for t in (case.x.float(), case.ids, case.weights.float()))
    spec = case.spec
    outputs = torch.zeros(*ids.shape, x.shape[1], device=x.device)
    for expert in ids.unique().tolist():
        local = expert - spec.expert_offset
        if not 0 <= local < case.gate_up.shape[0]:
            continue
        tokens, choices = (ids == expert).nonzero(as_tuple=True)
        gate_up, down = case.gate_up[local].float(), case.down[local].float()
        if spec.weight_layout == "in_out":
            gate_up, down = gate_up.mT, down.mT
        scale = weights[tokens, choices, None]
        hidden = (x[tokens] * scale if spec.weight_on == "input" else x[tokens]) @ gate_up.mT
        if case.gate_up_bias is not None:
            hidden = hidden + case.gate_up_bias[local].float()
        gate, up = (hidden[:, ::2], hidden[:, 1::2]) if spec.gate_layout == "interleaved" else hidden.chunk(2, -1)
        output = activate(gate, up, spec).bfloat16().float() @ down.mT
        if case.down_bias is not None:
            output = output + case.down_bias[local].float()
        outputs[tokens, choices] = output if spec.weight_on == "input" else output * scale
    return outputs.sum(1)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||; NaN where either has one."""
    return float((actual.float() - expected).norm() / expected.norm().clamp_min(1e-20))
