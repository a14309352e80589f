"""How does a ``KernelSpec`` run on the CPU? Hit experts only, each on its own rows, no copy of a weight.

An expert with few rows is a stream of its weights: the loops of ``_C`` run it at memory speed. One with more rows is a
GEMM. Which of the two is decided per call from the counts, so no token count is ever in a compile key.

Axes: T tokens, K choices per token, E local experts, D model width, F expert width, H = 2F, R routed rows ordered by
expert, I and O input and output features of a linear map.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perseus_compile import _C
from perseus_compile.activations import activate, activate_backward
from perseus_compile.facts import KernelSpec
from perseus_compile.segments import Segments, sort_by_expert


class CpuExperts:
    """A spec, ready to run. Tensors are checked by the caller; the sizes other than T are those of the spec."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.experts = spec.experts
        self.on_output = spec.experts.weight_on == "output"
        self.stages: _C.CpuExperts | None = None  # None: every stage is torch ops
        if spec.few_rows:
            alpha, limit = spec.experts.activation_params or (0.0, 0.0)
            self.stages = _C.CpuExperts(
                dtype=str(spec.dtype).removeprefix("torch."),
                activation=spec.experts.activation,
                interleaved=spec.experts.gate_layout == "interleaved",
                alpha=alpha,
                limit=limit,
                first_expert=spec.experts.expert_offset,
                num_local=spec.num_local_experts,
                max_rows=spec.few_rows,
            )

    def forward(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        gate_up: Tensor,
        gate_up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
    ) -> Tensor:
        """The output of ``perseus::experts``, [T, D], fresh and dense."""
        gate_up_EHD, down_EDF = self._as_EOI(gate_up), self._as_EOI(down)
        if self._streams(gate_up_EHD) and self._streams(down_EDF) and self.on_output:
            out_TD = self._forward_few_rows(x_TD, ids_TK, weights_TK, gate_up_EHD, gate_up_bias, down_EDF, down_bias)
            if out_TD is not None:
                return out_TD
        segments = self._sort(ids_TK)
        x_RD = x_TD.index_select(0, segments.tokens_R)
        if not self.on_output:
            x_RD = self._scale(x_RD, self._row_weights(weights_TK, segments))
        hidden_RH = self._linear(x_RD, gate_up_EHD, gate_up_bias, segments)
        y_RD = self._linear(self._activate(hidden_RH), down_EDF, down_bias, segments)
        return self._combine(y_RD, weights_TK if self.on_output else None, segments)

    def backward(
        self,
        needs_grad: list[bool],
        grad_TD: Tensor,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        gate_up: Tensor,
        gate_up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
    ) -> list[Tensor]:
        """Gradients of those of x, weights, gate_up, gate_up_bias, down, down_bias that are asked for, in that order.

        The forward saves only its inputs, so the first linear map and the activation are computed again. The second is
        not: a routing weight's gradient is <grad, down(a)> = <grad @ down.weight, a> + <grad, down.bias>.
        """
        need_x, need_weights, need_gate_up, need_gate_up_bias, need_down, need_down_bias = needs_grad
        gate_up_EHD, down_EDF = self._as_EOI(gate_up), self._as_EOI(down)
        segments = self._sort(ids_TK)
        weights_R1 = self._row_weights(weights_TK, segments)
        x_RD = x_TD.index_select(0, segments.tokens_R)
        expert_in_RD = x_RD if self.on_output else self._scale(x_RD, weights_R1)
        hidden_RH = self._linear(expert_in_RD, gate_up_EHD, gate_up_bias, segments)
        active_RF = self._activate(hidden_RH)

        grad_RD = grad_TD.index_select(0, segments.tokens_R)  # of the token's output, not yet weighted
        grad_y_RD = self._scale(grad_RD, weights_R1) if self.on_output else grad_RD
        if need_x or need_weights or need_gate_up or need_gate_up_bias:
            back_RF = self._linear(grad_RD, down_EDF.transpose(1, 2), None, segments)
            grad_active_RF = self._scale(back_RF, weights_R1) if self.on_output else back_RF
            grad_hidden_RH = activate_backward(grad_active_RF, hidden_RH, self.experts)
        if need_x or (need_weights and not self.on_output):
            grad_in_RD = self._linear(grad_hidden_RH, gate_up_EHD.transpose(1, 2), None, segments)

        grads: list[Tensor] = []
        if need_x:
            grads.append(self._combine(grad_in_RD, None if self.on_output else weights_TK, segments))
        if need_weights:
            grad_weights_R = self._row_dots(back_RF, active_RF) if self.on_output else self._row_dots(grad_in_RD, x_RD)
            if self.on_output and down_bias is not None:
                grad_weights_R += self._row_dots(grad_RD, down_bias.index_select(0, segments.experts_R))
            grads.append(_scatter_choices(grad_weights_R, weights_TK, segments))
        if need_gate_up:
            grads.append(self._weight_grad(expert_in_RD, grad_hidden_RH, gate_up, segments))
        if need_gate_up_bias:
            grads.append(self._bias_grad(grad_hidden_RH, segments))
        if need_down:
            grads.append(self._weight_grad(active_RF, grad_y_RD, down, segments))
        if need_down_bias:
            grads.append(self._bias_grad(grad_y_RD, segments))
        return grads

    def _forward_few_rows(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        gate_up_EHD: Tensor,
        gate_up_bias: Tensor | None,
        down_EDF: Tensor,
        down_bias: Tensor | None,
    ) -> Tensor | None:
        """``forward`` in one call, since at one token every torch call counts; None if an expert has too many rows."""
        assert self.stages is not None
        num_tokens, num_choices = ids_TK.shape
        # NOTE: _C sees addresses only, so dense copies must live in a name until the call is over.
        x_TD, ids_TK, weights_TK = x_TD.contiguous(), ids_TK.contiguous(), self._weights_of_c(weights_TK)
        gate_up_bias = None if gate_up_bias is None else gate_up_bias.contiguous()
        down_bias = None if down_bias is None else down_bias.contiguous()
        out_TD = torch.empty_like(x_TD)
        done = self.stages.forward(
            x=x_TD.data_ptr(),
            ids=ids_TK.data_ptr(),
            id_bytes=ids_TK.element_size(),
            weights=weights_TK.data_ptr(),
            weights_are_float32=weights_TK.dtype == torch.float32,
            gate_up=gate_up_EHD.data_ptr(),
            gate_up_strides=gate_up_EHD.stride(),
            gate_up_bias=0 if gate_up_bias is None else gate_up_bias.data_ptr(),
            down=down_EDF.data_ptr(),
            down_strides=down_EDF.stride(),
            down_bias=0 if down_bias is None else down_bias.data_ptr(),
            out=out_TD.data_ptr(),
            num_tokens=num_tokens,
            num_choices=num_choices,
            model_width=self.spec.model_width,
            expert_width=self.spec.expert_width,
            num_threads=torch.get_num_threads(),
        )
        return out_TD if done else None

    def _sort(self, ids_TK: Tensor) -> Segments:
        return sort_by_expert(ids_TK, self.experts.expert_offset, self.spec.num_local_experts)

    def _linear(self, rows_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, segments: Segments) -> Tensor:
        """Every expert's rows times its weight, plus its bias, [R, O]."""
        out_RO = rows_RI.new_empty(rows_RI.shape[0], weight_EOI.shape[1])
        few_rows = 0
        if self._streams(weight_EOI):
            assert self.stages is not None
            few_rows = self.spec.few_rows
            self.stages.linear(
                rows=rows_RI.data_ptr(),
                row_index=0,
                offsets=segments.table.data_ptr(),
                weight=weight_EOI.data_ptr(),
                strides=weight_EOI.stride(),
                num_outs=weight_EOI.shape[1],
                depth=weight_EOI.shape[2],
                out=out_RO.data_ptr(),
                num_threads=torch.get_num_threads(),
            )
        for expert, start, end in segments.hit:
            if end - start > few_rows:
                torch.mm(rows_RI[start:end], weight_EOI[expert].t(), out=out_RO[start:end])
        return out_RO if bias_EO is None else out_RO.add_(bias_EO.index_select(0, segments.experts_R))

    def _activate(self, hidden_RH: Tensor) -> Tensor:
        """The gated activation, [R, F]."""
        if self.stages is None:
            return activate(hidden_RH, self.experts)
        active_RF = hidden_RH.new_empty(hidden_RH.shape[0], self.spec.expert_width)
        self.stages.activate(
            hidden=hidden_RH.data_ptr(),
            active=active_RF.data_ptr(),
            num_rows=hidden_RH.shape[0],
            width=self.spec.expert_width,
            num_threads=torch.get_num_threads(),
        )
        return active_RF

    def _combine(self, rows_RD: Tensor, weights_TK: Tensor | None, segments: Segments) -> Tensor:
        """Sum of each token's rows, times its weights if given, in choice order and in ``combine_dtype``; [T, D]."""
        num_tokens, num_choices = segments.ids_shape
        out_TD = rows_RD.new_empty(num_tokens, rows_RD.shape[1])
        slots_TK = segments.slots_TK
        if self.stages is not None:
            weights_TK = None if weights_TK is None else self._weights_of_c(weights_TK)
            self.stages.combine(
                rows=rows_RD.data_ptr(),
                slots=slots_TK.data_ptr(),
                weights=0 if weights_TK is None else weights_TK.data_ptr(),
                weights_are_float32=weights_TK is None or weights_TK.dtype == torch.float32,
                out=out_TD.data_ptr(),
                num_tokens=num_tokens,
                num_choices=num_choices,
                width=rows_RD.shape[1],
                num_threads=torch.get_num_threads(),
            )
            return out_TD
        total_TD = torch.zeros(out_TD.shape, dtype=self.spec.combine_dtype)
        for choice in range(num_choices):
            kept = (slots_TK[:, choice] >= 0).nonzero().squeeze(1)
            term = rows_RD.index_select(0, slots_TK[kept, choice]).to(self.spec.combine_dtype)
            if weights_TK is not None:
                term *= weights_TK[kept, choice, None]
            total_TD.index_add_(0, kept, term)
        return out_TD.copy_(total_TD)

    def _weight_grad(self, rows_RI: Tensor, grad_RO: Tensor, weight: Tensor, segments: Segments) -> Tensor:
        """The gradient of ``weight`` in its own layout; zero for experts that were not hit."""
        grad = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        left, right = (grad_RO, rows_RI) if self.experts.weight_layout == "out_in" else (rows_RI, grad_RO)
        for expert, start, end in segments.hit:
            torch.mm(left[start:end].t(), right[start:end], out=grad[expert])
        return grad

    def _bias_grad(self, grad_RO: Tensor, segments: Segments) -> Tensor:
        """The gradient of a bias, [E, O]; zero for experts that were not hit."""
        grad = grad_RO.new_zeros(self.spec.num_local_experts, grad_RO.shape[1])
        for expert, start, end in segments.hit:
            grad[expert] = grad_RO[start:end].sum(0, dtype=self.spec.combine_dtype)
        return grad

    def _as_EOI(self, weight: Tensor) -> Tensor:
        """A view [E, O, I] of a weight in the model's layout."""
        return weight if self.experts.weight_layout == "out_in" else weight.transpose(1, 2)

    def _streams(self, weight_EOI: Tensor) -> bool:
        """Whether the few-row loops can read the weight: it is contiguous along outputs or inputs."""
        return self.stages is not None and 1 in weight_EOI.stride()[1:]

    def _weights_of_c(self, weights_TK: Tensor) -> Tensor:
        """Routing weights in a dtype that ``_C`` reads: that of the rows, or float32."""
        return (weights_TK if weights_TK.dtype == self.spec.dtype else weights_TK.float()).contiguous()

    def _scale(self, rows_RX: Tensor, weights_R1: Tensor) -> Tensor:
        """Rows times their routing weights, rounded once."""
        return (rows_RX * weights_R1).to(self.spec.dtype)

    def _row_weights(self, weights_TK: Tensor, segments: Segments) -> Tensor:
        """The routing weight of each row in ``combine_dtype``, [R, 1]."""
        return weights_TK.reshape(-1, 1).index_select(0, segments.choices_R).to(self.spec.combine_dtype)

    def _row_dots(self, left_RX: Tensor, right_RX: Tensor) -> Tensor:
        """Dot product of each pair of rows in ``combine_dtype``, [R]."""
        return (left_RX.to(self.spec.combine_dtype) * right_RX).sum(-1)


def _scatter_choices(values_R: Tensor, weights_TK: Tensor, segments: Segments) -> Tensor:
    """One value per row, put where the row came from, like ``weights_TK``; zero for skipped choices."""
    out = torch.zeros(weights_TK.numel(), dtype=values_R.dtype)
    out[segments.choices_R] = values_R
    return out.view(weights_TK.shape).to(weights_TK.dtype)
