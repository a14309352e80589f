"""How does a ``KernelSpec`` run on the CPU? Hit experts only, each on its own rows, no copy of a weight.

An expert with few rows is a stream of its weights: the loops of ``_C`` run it at memory speed. One with more rows is a
GEMM. Which of the two is decided per call from the counts, so no token count is ever in a compile key.

Axes: T tokens, K choices per token, E local experts, D model width, F expert width, H = 2F, R routed rows ordered by
expert, I and O input and output features of a linear map.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from perseus_compile import _C
from perseus_compile.activations import activate, activate_backward
from perseus_compile.facts import KernelSpec

_DTYPES_OF_C = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclasses.dataclass(frozen=True)
class Segments:
    """The routed rows of a call, ordered by expert and inside an expert by (token, choice).

    Its arrays are int64 and lie one after the other in ``table``, where ``_C`` finds them by address; views of them are
    made only when asked for, since at one token every torch call counts.
    """

    table: Tensor  # offsets [E + 1], tokens [T*K], choices [T*K], slots [T*K]
    num_local: int  # E
    ids_shape: torch.Size  # [T, K]
    hit: list[tuple[int, int, int]]  # (local expert, first row, end row) of every expert that has rows

    @property
    def num_rows(self) -> int:
        return self.hit[-1][2] if self.hit else 0

    @property
    def offsets(self) -> Tensor:
        """[E + 1], the first row of each expert, and the number of rows."""
        return self.table[: self.num_local + 1]

    @property
    def tokens_R(self) -> Tensor:
        """The token of each row."""
        return self._array(0)[: self.num_rows]

    @property
    def choices_R(self) -> Tensor:
        """token * K + choice of each row."""
        return self._array(1)[: self.num_rows]

    @property
    def slots_TK(self) -> Tensor:
        """The row of each choice; -1 for a skipped one."""
        return self._array(2).view(self.ids_shape)

    def address(self, index: int) -> int:
        """Of tokens (0), choices (1) or slots (2)."""
        return self.table.data_ptr() + self._start(index) * self.table.element_size()

    def _start(self, index: int) -> int:
        return self.num_local + 1 + index * self.ids_shape.numel()

    def _array(self, index: int) -> Tensor:
        return self.table[self._start(index) : self._start(index + 1)]


def sort_by_expert(ids_TK: Tensor, first_expert: int, num_local: int) -> Segments:
    """The segments of ids [T, K], int32 or int64; ids outside [first_expert, first_expert + num_local) are skipped."""
    ids_TK = ids_TK.contiguous()
    num_tokens, num_choices = ids_TK.shape
    table = torch.empty(num_local + 1 + 3 * num_tokens * num_choices, dtype=torch.int64)
    hit = _C.sort_by_expert(
        ids=ids_TK.data_ptr(),
        id_bytes=ids_TK.element_size(),
        num_tokens=num_tokens,
        num_choices=num_choices,
        first_expert=first_expert,
        num_local=num_local,
        table=table.data_ptr(),
    )
    return Segments(table, num_local, ids_TK.shape, hit)


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
    on_output = spec.experts.weight_on == "output"
    segments = sort_by_expert(ids_TK, spec.experts.expert_offset, spec.num_local_experts)
    if on_output:
        hidden_RH = _linear(spec, x_TD, _as_EOI(spec, gate_up), gate_up_bias, segments, gather=True)
    else:
        x_RD = _scale(spec, x_TD.index_select(0, segments.tokens_R), _row_weights(spec, weights_TK, segments))
        hidden_RH = _linear(spec, x_RD, _as_EOI(spec, gate_up), gate_up_bias, segments)
    y_RD = _linear(spec, activate(hidden_RH, spec.experts), _as_EOI(spec, down), down_bias, segments)
    return _combine(spec, y_RD, weights_TK if on_output else None, segments)


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
    needs_grad: list[bool],
) -> list[Tensor]:
    """Gradients of those of x, weights, gate_up, gate_up_bias, down, down_bias that are asked for, in that order.

    The forward saves only its inputs, so the first linear map and the activation are computed again. The second is not:
    the gradient of a routing weight is <grad, down(a)> = <grad @ down.weight, a> + <grad, down.bias>.
    """
    need_x, need_weights, need_gate_up, need_gate_up_bias, need_down, need_down_bias = needs_grad
    on_output = spec.experts.weight_on == "output"
    segments = sort_by_expert(ids_TK, spec.experts.expert_offset, spec.num_local_experts)
    weights_R1 = _row_weights(spec, weights_TK, segments)
    x_RD = x_TD.index_select(0, segments.tokens_R)
    expert_in_RD = x_RD if on_output else _scale(spec, x_RD, weights_R1)
    hidden_RH = _linear(spec, expert_in_RD, _as_EOI(spec, gate_up), gate_up_bias, segments)
    active_RF = activate(hidden_RH, spec.experts)

    grad_RD = grad_TD.index_select(0, segments.tokens_R)  # of the token's output, not yet weighted
    grad_y_RD = _scale(spec, grad_RD, weights_R1) if on_output else grad_RD
    if need_x or need_weights or need_gate_up or need_gate_up_bias:
        back_RF = _linear(spec, grad_RD, _as_EOI(spec, down).transpose(1, 2), None, segments)
        grad_active_RF = _scale(spec, back_RF, weights_R1) if on_output else back_RF
        grad_hidden_RH = activate_backward(grad_active_RF, hidden_RH, spec.experts)

    grads: list[Tensor] = []
    if need_x or (need_weights and not on_output):
        grad_in_RD = _linear(spec, grad_hidden_RH, _as_EOI(spec, gate_up).transpose(1, 2), None, segments)
    if need_x:
        grads.append(_combine(spec, grad_in_RD, None if on_output else weights_TK, segments))
    if need_weights:
        grad_weights_R = _row_dots(spec, back_RF, active_RF) if on_output else _row_dots(spec, grad_in_RD, x_RD)
        if on_output and down_bias is not None:
            grad_weights_R += _row_dots(spec, grad_RD, _row_biases(down_bias, segments))
        grads.append(_scatter_choices(grad_weights_R, weights_TK, segments))
    if need_gate_up:
        grads.append(_weight_grad(spec, expert_in_RD, grad_hidden_RH, gate_up, segments))
    if need_gate_up_bias:
        assert gate_up_bias is not None
        grads.append(_bias_grad(spec, grad_hidden_RH, gate_up_bias, segments))
    if need_down:
        grads.append(_weight_grad(spec, active_RF, grad_y_RD, down, segments))
    if need_down_bias:
        assert down_bias is not None
        grads.append(_bias_grad(spec, grad_y_RD, down_bias, segments))
    return grads


def _linear(
    spec: KernelSpec,
    rows: Tensor,
    weight_EOI: Tensor,
    bias: Tensor | None,
    segments: Segments,
    gather: bool = False,
) -> Tensor:
    """Every expert's rows times its weight, plus its bias, [R, O]. ``rows`` are [R, I], or [T, I] to gather from."""
    rows = rows.contiguous()
    depth = rows.shape[1]
    num_outs = weight_EOI.shape[1]
    out_RO = rows.new_empty(segments.num_rows, num_outs)
    expert_stride, out_stride, depth_stride = weight_EOI.stride()
    few_rows = spec.few_rows if 1 in (out_stride, depth_stride) and depth > 0 and num_outs > 0 else 0
    if few_rows:
        _C.few_rows_linear(
            rows=rows.data_ptr(),
            row_index=segments.address(0) if gather else 0,
            weight=weight_EOI.data_ptr(),
            out=out_RO.data_ptr(),
            dtype=_DTYPES_OF_C[spec.dtype],
            offsets=segments.table.data_ptr(),
            num_experts=segments.num_local,
            max_rows=few_rows,
            depth=depth,
            num_outs=num_outs,
            expert_stride=expert_stride,
            out_stride=out_stride,
            depth_stride=depth_stride,
            num_threads=torch.get_num_threads(),
        )
    for expert, start, end in segments.hit:
        if end - start > few_rows:
            expert_rows = rows.index_select(0, segments.tokens_R[start:end]) if gather else rows[start:end]
            torch.mm(expert_rows, weight_EOI[expert].t(), out=out_RO[start:end])
    return out_RO if bias is None else out_RO.add_(_row_biases(bias, segments))


def _combine(spec: KernelSpec, rows_RD: Tensor, weights_TK: Tensor | None, segments: Segments) -> Tensor:
    """Sum of each token's rows, times its weights if given, in choice order and in ``combine_dtype``; [T, D]."""
    num_tokens, num_choices = segments.ids_shape
    if weights_TK is None:
        weights_TK = torch.ones(segments.ids_shape, dtype=spec.combine_dtype)
    elif weights_TK.dtype != spec.dtype:
        weights_TK = weights_TK.to(spec.combine_dtype)
    weights_TK = weights_TK.contiguous()
    out_TD = rows_RD.new_empty(num_tokens, rows_RD.shape[1])
    if spec.dtype in _DTYPES_OF_C:
        _C.combine(
            rows=rows_RD.data_ptr(),
            slots=segments.address(2),
            weights=weights_TK.data_ptr(),
            out=out_TD.data_ptr(),
            dtype=_DTYPES_OF_C[spec.dtype],
            weights_dtype=_DTYPES_OF_C[weights_TK.dtype],
            num_tokens=num_tokens,
            num_choices=num_choices,
            width=rows_RD.shape[1],
            num_threads=torch.get_num_threads(),
        )
        return out_TD
    slots_TK = segments.slots_TK
    total_TD = torch.zeros(out_TD.shape, dtype=spec.combine_dtype)
    for choice in range(num_choices):
        kept = (slots_TK[:, choice] >= 0).nonzero().squeeze(1)
        rows = rows_RD.index_select(0, slots_TK[kept, choice]).to(spec.combine_dtype)
        total_TD.index_add_(0, kept, rows * weights_TK[kept, choice, None])
    return out_TD.copy_(total_TD)


def _weight_grad(spec: KernelSpec, rows_RI: Tensor, grad_RO: Tensor, weight: Tensor, segments: Segments) -> Tensor:
    """The gradient of ``weight`` in its own layout; zero for experts that were not hit."""
    grad = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    left, right = (grad_RO, rows_RI) if spec.experts.weight_layout == "out_in" else (rows_RI, grad_RO)
    for expert, start, end in segments.hit:
        torch.mm(left[start:end].t(), right[start:end], out=grad[expert])
    return grad


def _bias_grad(spec: KernelSpec, grad_RO: Tensor, bias: Tensor, segments: Segments) -> Tensor:
    """The gradient of ``bias`` [E, O]; zero for experts that were not hit."""
    grad = torch.zeros_like(bias, memory_format=torch.contiguous_format)
    for expert, start, end in segments.hit:
        grad[expert] = grad_RO[start:end].sum(0, dtype=spec.combine_dtype)
    return grad


def _as_EOI(spec: KernelSpec, weight: Tensor) -> Tensor:
    """A view [E, O, I] of a weight in the model's layout."""
    return weight if spec.experts.weight_layout == "out_in" else weight.transpose(1, 2)


def _scale(spec: KernelSpec, rows_RX: Tensor, weights_R1: Tensor) -> Tensor:
    """Rows times their routing weights, rounded once."""
    return (rows_RX * weights_R1).to(spec.dtype)


def _row_weights(spec: KernelSpec, weights_TK: Tensor, segments: Segments) -> Tensor:
    """The routing weight of each row in ``combine_dtype``, [R, 1]."""
    return weights_TK.reshape(-1, 1).index_select(0, segments.choices_R).to(spec.combine_dtype)


def _row_biases(bias: Tensor, segments: Segments) -> Tensor:
    """The bias of each row's expert, [R, O]."""
    expert_R = torch.repeat_interleave(segments.offsets.diff(), output_size=segments.num_rows)
    return bias.index_select(0, expert_R)


def _row_dots(spec: KernelSpec, left_RX: Tensor, right_RX: Tensor) -> Tensor:
    """Dot product of each pair of rows in ``combine_dtype``, [R]."""
    return (left_RX.to(spec.combine_dtype) * right_RX).sum(-1)


def _scatter_choices(values_R: Tensor, weights_TK: Tensor, segments: Segments) -> Tensor:
    """One value per row, put where the row came from, in shape and dtype of ``weights_TK``; zero for skipped choices."""
    out = torch.zeros(weights_TK.numel(), dtype=values_R.dtype)
    out[segments.choices_R] = values_R
    return out.view(weights_TK.shape).to(weights_TK.dtype)
