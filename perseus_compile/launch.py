"""How does a ``KernelSpec`` run on the CPU? Hit experts only, each on its own rows, no copy of a weight.

An expert with few rows is a stream of its weights: the few-row loops of ``_C`` run at memory speed. One with more rows is
a GEMM. Which of the two is decided per call from the counts, so no token count is ever in a compile key.

Axes: T tokens, K choices per token, E local experts, D model width, F expert width, R routed rows ordered by expert,
I and O input and output features of a linear map.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from perseus_compile import _C, activations
from perseus_compile.facts import KernelSpec

_IN_C = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Segments(NamedTuple):
    """The routed rows of a call, ordered by expert and inside an expert by (token, choice). All int64."""

    offsets: Tensor  # [E + 1], the segment of each expert
    tokens_R: Tensor  # the token of each row
    choices_R: Tensor  # token * K + choice of each row
    slots_TK: Tensor  # the row of each choice; -1 for a skipped one
    hit: list[tuple[int, int, int]]  # (local expert, first row, end row) of every expert that has rows


def sort_by_expert(ids_TK: Tensor, first_expert: int, num_local: int) -> Segments:
    """The segments of ids [T, K], int32 or int64; ids outside [first_expert, first_expert + num_local) are skipped."""
    ids_TK = ids_TK.contiguous()
    num_choices = ids_TK.numel()
    table = torch.empty(num_local + 1 + 3 * num_choices, dtype=torch.int64)
    offsets, tokens, choices, slots = table.split([num_local + 1, num_choices, num_choices, num_choices])
    hit = _C.sort_by_expert(
        ids=ids_TK.data_ptr(),
        id_bytes=ids_TK.element_size(),
        num_tokens=ids_TK.shape[0],
        num_choices=ids_TK.shape[1],
        first_expert=first_expert,
        num_local=num_local,
        offsets=offsets.data_ptr(),
        tokens=tokens.data_ptr(),
        rows=choices.data_ptr(),
        slots=slots.data_ptr(),
    )
    num_rows = hit[-1][2] if hit else 0
    return Segments(offsets, tokens[:num_rows], choices[:num_rows], slots.view(ids_TK.shape), hit)


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
    if experts.weight_on == "input":
        x_RD = (x_RD * _row_weights(spec, weights_TK, segments)).to(spec.dtype)
    hidden_R2F = _linear(spec, x_RD, _out_in(spec, gate_up), gate_up_bias, segments)
    active_RF = activations.activate(*activations.split_gate_up(hidden_R2F, experts), experts)
    y_RD = _linear(spec, active_RF, _out_in(spec, down), down_bias, segments)
    return combine(spec, y_RD, segments.slots_TK, weights_TK if experts.weight_on == "output" else None)


def combine(spec: KernelSpec, rows_RD: Tensor, slots_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Sum of each token's rows, times its weights if given, in choice order and in ``combine_dtype``."""
    if weights_TK is None:
        weights_TK = torch.ones(slots_TK.shape, dtype=spec.combine_dtype)
    weights_TK = weights_TK.to(spec.combine_dtype).contiguous()
    out_TD = rows_RD.new_empty(slots_TK.shape[0], rows_RD.shape[1])
    if spec.dtype in _IN_C:
        _C.combine(
            rows=rows_RD.data_ptr(),
            slots=slots_TK.data_ptr(),
            weights=weights_TK.data_ptr(),
            out=out_TD.data_ptr(),
            dtype=_IN_C[spec.dtype],
            num_tokens=slots_TK.shape[0],
            num_choices=slots_TK.shape[1],
            width=rows_RD.shape[1],
            num_threads=torch.get_num_threads(),
        )
        return out_TD
    total_TD = torch.zeros(out_TD.shape, dtype=spec.combine_dtype)
    for choice in range(slots_TK.shape[1]):
        kept = (slots_TK[:, choice] >= 0).nonzero().squeeze(1)
        rows = rows_RD.index_select(0, slots_TK[kept, choice]).to(spec.combine_dtype)
        total_TD.index_add_(0, kept, rows * weights_TK[kept, choice, None])
    return out_TD.copy_(total_TD)


def _row_weights(spec: KernelSpec, weights_TK: Tensor, segments: Segments) -> Tensor:
    """[R, 1] in ``combine_dtype``."""
    return weights_TK.reshape(-1, 1).index_select(0, segments.choices_R).to(spec.combine_dtype)


def _row_biases(bias: Tensor, segments: Segments) -> Tensor:
    """[R, O]: the bias row of each row's expert."""
    counts = segments.offsets.diff()
    return bias.index_select(0, torch.repeat_interleave(counts, output_size=segments.tokens_R.shape[0]))


def _out_in(spec: KernelSpec, weight: Tensor) -> Tensor:
    """The weight as a view [E, O, I]."""
    return weight if spec.experts.weight_layout == "out_in" else weight.transpose(1, 2)


def _linear(spec: KernelSpec, rows_RI: Tensor, weight_EOI: Tensor, bias: Tensor | None, segments: Segments) -> Tensor:
    """Every expert's rows times its weight, [R, O]."""
    num_rows, depth = rows_RI.shape
    num_outs = weight_EOI.shape[1]
    out_RO = rows_RI.new_empty(num_rows, num_outs)
    few_rows = spec.few_rows if weight_EOI.stride(2) == 1 and depth and num_outs else 0
    if few_rows:
        _C.few_rows_linear(
            rows=rows_RI.data_ptr(),
            weight=weight_EOI.data_ptr(),
            out=out_RO.data_ptr(),
            dtype=_IN_C[spec.dtype],
            offsets=segments.offsets.data_ptr(),
            num_experts=spec.num_local_experts,
            max_rows=few_rows,
            depth=depth,
            num_outs=num_outs,
            expert_stride=weight_EOI.stride(0),
            out_stride=weight_EOI.stride(1),
            num_threads=torch.get_num_threads(),
        )
    for expert, start, end in segments.hit:
        if end - start > few_rows:
            torch.mm(rows_RI[start:end], weight_EOI[expert].t(), out=out_RO[start:end])
    return out_RO if bias is None else out_RO.add_(_row_biases(bias, segments))


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
    weights_R1 = _row_weights(spec, weights_TK, segments)
    grad_RD = grad_TD.index_select(0, segments.tokens_R)
    scaled_grad_RD = grad_RD if on_input else (grad_RD * weights_R1).to(spec.dtype)
    grads: list[Tensor] = []

    x_RD = x_TD.index_select(0, segments.tokens_R)
    scaled_x_RD = (x_RD * weights_R1).to(spec.dtype) if on_input else x_RD
    hidden = _linear(spec, scaled_x_RD, _out_in(spec, gate_up), gate_up_bias, segments)
    gate_RF, up_RF = activations.split_gate_up(hidden, experts)
    active_RF = activations.activate(gate_RF, up_RF, experts)
    unweighted_RF = _linear(spec, grad_RD, _out_in(spec, down).transpose(1, 2), None, segments)
    grad_active_RF = unweighted_RF if on_input else (unweighted_RF * weights_R1).to(spec.dtype)
    grad_hidden = torch.empty_like(hidden)
    grad_gate, grad_up = activations.split_gate_up(grad_hidden, experts)
    new_gate, new_up = activations.activate_backward(grad_active_RF, gate_RF, up_RF, experts)
    grad_gate.copy_(new_gate)
    grad_up.copy_(new_up)

    grad_x_RD = None
    if need_x or on_input:
        grad_x_RD = _linear(spec, grad_hidden, _out_in(spec, gate_up).transpose(1, 2), None, segments)
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
                dot_R += (grad_RD.to(spec.combine_dtype) * _row_biases(down_bias, segments)).sum(-1)
        flat = torch.zeros(weights_TK.numel(), dtype=spec.combine_dtype)
        flat[segments.choices_R] = dot_R
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
