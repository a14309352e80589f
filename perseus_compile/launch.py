"""How does a ``KernelSpec`` run on the CPU? Hit experts only, one GEMM per expert on its rows, no copy of a weight.

Axes: T tokens, K choices per token, E local experts, D model width, F expert width, R routed rows ordered by expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from perseus_compile import activations
from perseus_compile.facts import KernelSpec


class Segments(NamedTuple):
    """The routed rows of a call, ordered by expert and inside an expert by (token, choice)."""

    tokens_R: Tensor  # int64, the token of each row
    flat_R: Tensor  # int64, token * K + choice of each row
    slots_TK: Tensor  # int64 [T, K], the row of each choice; R for a skipped one
    hit: list[tuple[int, int, int]]  # (local expert, first row, end row) of every expert that has rows


def sort_by_expert(ids_TK: Tensor, expert_offset: int, num_local: int) -> Segments:
    num_choices = ids_TK.shape[1]
    local = ids_TK.reshape(-1).long() - expert_offset
    local = torch.where((local < 0) | (local >= num_local), num_local, local)
    order = torch.argsort(local, stable=True)
    counts = torch.bincount(local, minlength=num_local + 1)[:num_local].tolist()
    num_rows = sum(counts)
    flat_R = order[:num_rows]
    slots = torch.full_like(local, num_rows)
    slots[flat_R] = torch.arange(num_rows)
    hit = []
    start = 0
    for expert, count in enumerate(counts):
        if count:
            hit.append((expert, start, start + count))
        start += count
    return Segments(flat_R // num_choices, flat_R, slots.view(ids_TK.shape), hit)


def run_experts(
    spec: KernelSpec,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
) -> Tensor:
    """The output of ``perseus::experts``, [T, D], fresh and contiguous."""
    experts = spec.experts
    segments = sort_by_expert(ids_TK, experts.expert_offset, spec.num_local_experts)
    x_RD = x_TD.index_select(0, segments.tokens_R)
    weights_R1 = weights_TK.reshape(-1, 1).index_select(0, segments.flat_R).to(spec.combine_dtype)
    if experts.weight_on == "input":
        x_RD = (x_RD * weights_R1).to(spec.dtype)
    hidden_RF = activations.activate(
        *activations.split_gate_up(_grouped_linear(spec, x_RD, gate_up, gate_up_bias, segments), experts), experts
    )
    y_RD = _grouped_linear(spec, hidden_RF, down, down_bias, segments)
    scale = weights_TK if experts.weight_on == "output" else None
    return combine(spec, y_RD, segments.slots_TK, scale)


def combine(spec: KernelSpec, rows_RD: Tensor, slots_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Sum of each token's rows, times its weights if given, in choice order and in ``combine_dtype``."""
    rows_RD = torch.cat([rows_RD, rows_RD.new_zeros(1, rows_RD.shape[1])])
    total_TD = torch.zeros(slots_TK.shape[0], rows_RD.shape[1], dtype=spec.combine_dtype)
    for choice in range(slots_TK.shape[1]):
        slots_T = slots_TK[:, choice]
        term_TD = rows_RD.index_select(0, slots_T).to(spec.combine_dtype)
        if weights_TK is not None:
            skipped_T1 = (slots_T == rows_RD.shape[0] - 1).unsqueeze(1)
            term_TD = term_TD * weights_TK[:, choice, None].to(spec.combine_dtype).masked_fill(skipped_T1, 0)
        total_TD += term_TD
    return total_TD.to(spec.dtype)


def _as_in_out(spec: KernelSpec, weight: Tensor) -> Tensor:
    """A view with the input features on the axis before the last."""
    return weight.transpose(-1, -2) if spec.experts.weight_layout == "out_in" else weight


def _grouped_linear(
    spec: KernelSpec, rows_RI: Tensor, weight: Tensor, bias: Tensor | None, segments: Segments
) -> Tensor:
    weight_EIO = _as_in_out(spec, weight)
    out_RO = rows_RI.new_empty(rows_RI.shape[0], weight_EIO.shape[2])
    for expert, start, end in segments.hit:
        torch.mm(rows_RI[start:end], weight_EIO[expert], out=out_RO[start:end])
        if bias is not None:
            out_RO[start:end].add_(bias[expert])
    return out_RO


def run_experts_backward(
    spec: KernelSpec,
    grad_TD: Tensor,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    needs_grad: tuple[bool, ...],
) -> list[Tensor]:
    """Gradients of those of x, weights, gate_up, gate_up_bias, down, down_bias that are asked for, in that order."""
    experts = spec.experts
    need_x, need_weights, need_gate_up, need_gate_up_bias, need_down, need_down_bias = needs_grad
    on_input = experts.weight_on == "input"
    segments = sort_by_expert(ids_TK, experts.expert_offset, spec.num_local_experts)
    weights_R1 = weights_TK.reshape(-1, 1).index_select(0, segments.flat_R).to(spec.combine_dtype)
    grad_RD = grad_TD.index_select(0, segments.tokens_R)
    scaled_grad_RD = grad_RD if on_input else (grad_RD * weights_R1).to(spec.dtype)
    grads: list[Tensor] = []

    x_RD = x_TD.index_select(0, segments.tokens_R)
    scaled_x_RD = (x_RD * weights_R1).to(spec.dtype) if on_input else x_RD
    hidden = _grouped_linear(spec, scaled_x_RD, gate_up, gate_up_bias, segments)
    gate_RF, up_RF = activations.split_gate_up(hidden, experts)
    active_RF = activations.activate(gate_RF, up_RF, experts)
    unweighted_RF = _grouped_linear_backward(spec, grad_RD, down, segments)
    grad_active_RF = unweighted_RF if on_input else (unweighted_RF * weights_R1).to(spec.dtype)
    grad_hidden = torch.empty_like(hidden)
    grad_gate, grad_up = activations.split_gate_up(grad_hidden, experts)
    new_gate, new_up = activations.activate_backward(grad_active_RF, gate_RF, up_RF, experts)
    grad_gate.copy_(new_gate)
    grad_up.copy_(new_up)

    grad_x_RD = _grouped_linear_backward(spec, grad_hidden, gate_up, segments) if need_x or on_input else None
    if need_x:
        assert grad_x_RD is not None
        grads.append(combine(spec, grad_x_RD, segments.slots_TK, weights_TK if on_input else None))
    if need_weights:
        if on_input:
            assert grad_x_RD is not None
            dot_R = (grad_x_RD.to(spec.combine_dtype) * x_RD).sum(-1)
        else:
            dot_R = (unweighted_RF.to(spec.combine_dtype) * active_RF).sum(-1)
            if down_bias is not None:
                for expert, start, end in segments.hit:
                    dot_R[start:end] += grad_RD[start:end].to(spec.combine_dtype) @ down_bias[expert].to(
                        spec.combine_dtype
                    )
        flat = torch.zeros(weights_TK.numel(), dtype=spec.combine_dtype)
        flat[segments.flat_R] = dot_R
        grads.append(flat.view(weights_TK.shape).to(weights_TK.dtype))
    if need_gate_up:
        grads.append(_grouped_weight_grad(spec, scaled_x_RD, grad_hidden, gate_up, segments))
    if need_gate_up_bias:
        assert gate_up_bias is not None
        grads.append(_grouped_bias_grad(spec, grad_hidden, gate_up_bias, segments))
    if need_down:
        grads.append(_grouped_weight_grad(spec, active_RF, scaled_grad_RD, down, segments))
    if need_down_bias:
        assert down_bias is not None
        grads.append(_grouped_bias_grad(spec, scaled_grad_RD, down_bias, segments))
    return grads


def _grouped_linear_backward(spec: KernelSpec, grad_RO: Tensor, weight: Tensor, segments: Segments) -> Tensor:
    weight_EOI = _as_in_out(spec, weight).transpose(1, 2)
    grad_RI = grad_RO.new_empty(grad_RO.shape[0], weight_EOI.shape[2])
    for expert, start, end in segments.hit:
        torch.mm(grad_RO[start:end], weight_EOI[expert], out=grad_RI[start:end])
    return grad_RI


def _grouped_weight_grad(
    spec: KernelSpec, rows_RI: Tensor, grad_RO: Tensor, weight: Tensor, segments: Segments
) -> Tensor:
    grad = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    for expert, start, end in segments.hit:
        left, right = rows_RI[start:end], grad_RO[start:end]
        if spec.experts.weight_layout == "out_in":
            left, right = right, left
        torch.mm(left.t(), right, out=grad[expert])
    return grad


def _grouped_bias_grad(spec: KernelSpec, grad_RO: Tensor, bias: Tensor, segments: Segments) -> Tensor:
    grad = torch.zeros_like(bias, memory_format=torch.contiguous_format)
    for expert, start, end in segments.hit:
        grad[expert] = grad_RO[start:end].sum(0, dtype=spec.combine_dtype)
    return grad
