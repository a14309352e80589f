"""How do experts run whose weights are separate tensors? One expert after the other, on its own rows.

The rows are sorted by expert on the device, and their counts are read once per call: on a GPU, the one wait for the
device. Plain torch ops, for every device and floating dtype. No weight is copied or stacked.

Axes: T tokens, K choices per token, E local experts, D model width, F expert width, R routed rows (T * K) ordered by
expert, N rows of one expert, H = 2F, or F without a gate, I and O input and output features of a linear map.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from perseus_compile.activations import activate, activate_backward
from perseus_compile.facts import ExpertsSpec
from perseus_compile.grouped import Rows, combine, row_dots, row_weights, scale, sort_rows, sum_dtype


@dataclasses.dataclass(frozen=True)
class _Linear:
    """One linear map of one expert; ``place`` and ``bias_place`` count through all lists of weights."""

    matrix_OI: Tensor
    bias_O: Tensor | None
    place: int
    bias_place: int


@dataclasses.dataclass(frozen=True)
class ListedWeights:
    """The weights of all experts, one tensor each.

    Attributes:
        gate_up: E matrices for the first linear map, or 2E: those of all gates, then those of all up halves.
        gate_up_bias: as many biases, or none.
        down, down_bias: E of each, or no biases.
        in_out: matrices are stored as [I, O], not as [O, I].
    """

    gate_up: Sequence[Tensor]
    gate_up_bias: Sequence[Tensor]
    down: Sequence[Tensor]
    down_bias: Sequence[Tensor]
    in_out: bool

    @property
    def num_experts(self) -> int:
        return len(self.down)

    def lists(self) -> tuple[Sequence[Tensor], ...]:
        """As the op takes them."""
        return self.gate_up, self.gate_up_bias, self.down, self.down_bias

    def all(self) -> list[Tensor]:
        return [tensor for each in self.lists() for tensor in each]

    def first(self, expert: int) -> list[_Linear]:
        """The first linear map of an expert: one, or the gate's and the up half's."""
        return [
            self._linear(self.gate_up, self.gate_up_bias, index, 0)
            for index in range(expert, len(self.gate_up), self.num_experts)
        ]

    def second(self, expert: int) -> list[_Linear]:
        return [self._linear(self.down, self.down_bias, expert, len(self.gate_up) + len(self.gate_up_bias))]

    def _linear(self, matrices: Sequence[Tensor], biases: Sequence[Tensor], index: int, start: int) -> _Linear:
        matrix = matrices[index].t() if self.in_out else matrices[index]
        return _Linear(matrix, biases[index] if biases else None, start + index, start + len(matrices) + index)


def forward(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: ListedWeights, spec: ExpertsSpec) -> Tensor:
    """The output of ``perseus::experts_list``, [T, D], fresh and contiguous."""
    if ids_TK.numel() == 0:
        return x_TD.new_zeros(x_TD.shape)
    rows = sort_rows(ids_TK, spec.expert_offset, experts.num_experts)
    weights_R1 = row_weights(weights_TK, rows, x_TD.dtype)
    y_RD = x_TD.new_empty(ids_TK.numel(), x_TD.shape[1])
    for expert, own in _hit(rows):
        x_ND = x_TD.index_select(0, rows.tokens_R[own])
        if spec.weight_on == "input":
            x_ND = scale(x_ND, weights_R1[own])
        active_NF = activate(_apply(experts.first(expert), x_ND), spec)
        y_RD[own] = _apply(experts.second(expert), active_NF)
    return combine(y_RD, weights_TK if spec.weight_on == "output" else None, rows)


def backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: ListedWeights,
    spec: ExpertsSpec,
    needs_grad: Sequence[bool],
) -> list[Tensor]:
    """Gradients of those of x, weights, and the tensors of the lists in the op's order, that are asked for.

    Computes the first linear map and the activation again. Each is contiguous, in the dtype of its tensor, zero for an
    expert without rows, and the same from run to run.
    """
    need_x, need_weights, *need_lists = needs_grad
    grads = [
        tensor.new_zeros(tensor.shape) if needed else None
        for tensor, needed in zip(experts.all(), need_lists, strict=True)
    ]
    grad_x_TD, grad_weights_TK = torch.zeros_like(x_TD), torch.zeros_like(weights_TK)
    if ids_TK.numel():
        on_output = spec.weight_on == "output"
        rows = sort_rows(ids_TK, spec.expert_offset, experts.num_experts)
        weights_R1 = row_weights(weights_TK, rows, x_TD.dtype)
        grad_in_RD = x_TD.new_empty(ids_TK.numel(), x_TD.shape[1])
        dots_R = weights_R1.new_empty(ids_TK.numel())  # the gradient of each row's weight
        for expert, own in _hit(rows):
            first, (second,) = experts.first(expert), experts.second(expert)
            weights_N1, tokens_N = weights_R1[own], rows.tokens_R[own]
            x_ND, grad_ND = x_TD.index_select(0, tokens_N), grad_TD.index_select(0, tokens_N)  # grad: not yet weighted
            in_ND, grad_y_ND = (x_ND, scale(grad_ND, weights_N1)) if on_output else (scale(x_ND, weights_N1), grad_ND)
            hidden_NH = _apply(first, in_ND)
            active_NF = activate(hidden_NH, spec)
            back_NF = grad_ND @ second.matrix_OI
            grad_hidden_NH = activate_backward(scale(back_NF, weights_N1) if on_output else back_NF, hidden_NH, spec)
            grad_in_RD[own] = _apply_backward(first, grad_hidden_NH)
            if on_output:
                dots_R[own] = row_dots(back_NF, active_NF)
                if second.bias_O is not None:
                    dots_R[own] += row_dots(grad_ND, second.bias_O.expand_as(grad_ND))
            else:
                dots_R[own] = row_dots(grad_in_RD[own], x_ND)
            _write_grads(grads, [second], active_NF, grad_y_ND, experts.in_out)
            _write_grads(grads, first, in_ND, grad_hidden_NH, experts.in_out)
        grad_x_TD = combine(grad_in_RD, None if on_output else weights_TK, rows)
        dots_TK = dots_R.index_select(0, rows.slots_R).view(ids_TK.shape)
        grad_weights_TK = dots_TK.masked_fill_(rows.skipped_TK, 0).to(weights_TK.dtype)
    of_tokens = [grad for grad, needed in ((grad_x_TD, need_x), (grad_weights_TK, need_weights)) if needed]
    return of_tokens + [grad for grad in grads if grad is not None]


def _hit(rows: Rows) -> Iterator[tuple[int, slice]]:
    """Every expert that has rows, and its rows."""
    start = 0
    for expert, end in enumerate(rows.ends_E.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


def _apply(linears: Sequence[_Linear], rows_NI: Tensor) -> Tensor:
    """[N, O]: the outputs of the linear maps side by side."""
    num_outs = [linear.matrix_OI.shape[0] for linear in linears]
    out_NO = rows_NI.new_empty(rows_NI.shape[0], sum(num_outs))
    for linear, part_NO in zip(linears, out_NO.split(num_outs, dim=1), strict=True):
        if linear.bias_O is None:
            torch.mm(rows_NI, linear.matrix_OI.t(), out=part_NO)
        else:
            torch.addmm(linear.bias_O, rows_NI, linear.matrix_OI.t(), out=part_NO)
    return out_NO


def _apply_backward(linears: Sequence[_Linear], grad_NO: Tensor) -> Tensor:
    """[N, I]: the gradient of the rows."""
    parts = grad_NO.split([linear.matrix_OI.shape[0] for linear in linears], dim=1)
    grad_NI = parts[0] @ linears[0].matrix_OI
    for linear, part_NO in zip(linears[1:], parts[1:], strict=True):
        grad_NI.addmm_(part_NO, linear.matrix_OI)
    return grad_NI


def _write_grads(
    grads: list[Tensor | None], linears: Sequence[_Linear], rows_NI: Tensor, grad_NO: Tensor, in_out: bool
) -> None:
    """Fills in the gradients of the weights of ``linears`` that are asked for."""
    parts = grad_NO.split([linear.matrix_OI.shape[0] for linear in linears], dim=1)
    for linear, part_NO in zip(linears, parts, strict=True):
        grad = grads[linear.place]
        if grad is not None:
            left, right = (rows_NI, part_NO) if in_out else (part_NO, rows_NI)
            torch.mm(left.t(), right, out=grad)
        bias_grad = grads[linear.bias_place] if linear.bias_O is not None else None
        if bias_grad is not None:
            bias_grad.copy_(part_NO.sum(0, dtype=sum_dtype(part_NO.dtype)))
