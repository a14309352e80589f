"""How do the experts run out of torch's own ops? The plain path: sort, gather, two grouped GEMMs, ordered sum.

Works on every device that ``torch.nn.functional.grouped_mm`` has a kernel for. It never waits for the device, never
branches on a value, and its shapes depend on T * K alone, so a CUDA graph can capture it and replay it with other
routing. It never copies an expert weight. ``unsupported_reason`` says for which weights all of this holds.

A skipped choice (an id outside the local experts) has a row like any other, sorted behind the last expert. The grouped
GEMM leaves such rows uninitialised: whatever reads rows other than by expert must put a zero in their place.

Axes: T tokens, K choices per token, E local experts, D model width, F expert width, R routed rows (T * K) ordered by
expert, H = 2F, I and O input and output features of a linear map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import grouped_mm

from perseus_compile.activations import activate, activate_backward
from perseus_compile.facts import ExpertsSpec

# What torch 2.11 to 2.13 take (ATen: native/GroupedMMUtils.h, native/cuda/GroupedBlas.cpp and GroupMM.cu). On CUDA, any
# dtype but bfloat16 and any older GPU get a loop that reads the ends of the experts on the host.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CUDA_DTYPES = (torch.bfloat16,)
CUDA_MAJORS = (9, 10)  # of the compute capability
CUDA_MAX_EXPERTS = 1023  # one thread per expert prepares the grouped GEMM, and torch allows fewer than 1024
ROW_BYTES = 16  # TMA reads from addresses that are a multiple of it; torch asks for it on the CPU too


def unsupported_reason(x_TD: Tensor, gate_up: Tensor, down: Tensor, spec: ExpertsSpec) -> str | None:
    """Why the plain path cannot run with these tensors; None if it can, for every token count, forward and backward.

    Looks at no value, so it also takes fake tensors; for those the address is judged by the storage offset. Sizes must
    be plain ints. The arguments are taken to be legal (``lower.check_experts``).
    """
    dtype, device = x_TD.dtype, x_TD.device
    names = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
    allowed = CUDA_DTYPES if device.type == "cuda" else DTYPES
    if dtype not in allowed:
        wanted = ", ".join(names[one] for one in allowed)
        return f"a grouped GEMM on '{device.type}' without a host wait needs dtype {wanted}, got {dtype}"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if torch.version.hip is not None or major not in CUDA_MAJORS:
            return (
                "a grouped GEMM without a host wait needs an NVIDIA GPU of compute capability "
                f"{' or '.join(f'{one}.x' for one in CUDA_MAJORS)}, got {major}.{minor}"
            )
        if gate_up.shape[0] > CUDA_MAX_EXPERTS:
            return f"a grouped GEMM takes at most {CUDA_MAX_EXPERTS} local experts, got {gate_up.shape[0]}"
    multiple = ROW_BYTES // dtype.itemsize
    widths = {"D": x_TD.shape[1], "F": down.shape[2 if spec.weight_layout == "out_in" else 1]}
    for axis, width in widths.items():
        if width == 0 or width % multiple:
            return f"{axis} must be a positive multiple of {multiple} in {names[dtype]}, got {axis}={width}"
    for name, weight in (("gate_up", gate_up), ("down", down)):
        reason = _unreadable_in_place(name, weight)
        if reason is not None:
            return reason
    return None


def _unreadable_in_place(name: str, weight: Tensor) -> str | None:
    multiple = ROW_BYTES // weight.dtype.itemsize
    of_expert, of_row, of_column = weight.stride()
    _, num_rows, num_columns = weight.shape
    if of_row == 1 and of_column >= num_rows:
        pitch = of_column
    elif of_column == 1 and of_row >= num_columns:
        pitch = of_row
    else:
        return f"{name} must be dense along one of its two last axes, got strides {weight.stride()}"
    if pitch % multiple or of_expert % multiple:
        return f"{name} must have strides that are multiples of {multiple} elements, got {weight.stride()}"
    address = address_of(weight)
    if weight.is_cuda and address % ROW_BYTES:
        above = address % ROW_BYTES
        return f"{name} must start at a multiple of {ROW_BYTES} bytes, got an address {above} bytes above one"
    return None


def address_of(tensor: Tensor) -> int:
    """In bytes; of a fake tensor, which has none, as if its storage began at 0."""
    is_fake = isinstance(tensor, FakeTensor)
    return int(tensor.storage_offset()) * tensor.dtype.itemsize if is_fake else tensor.data_ptr()


class Rows(NamedTuple):
    """The routed rows of a call, ordered by expert and inside an expert by (token, choice); skipped choices last."""

    order_R: Tensor  # int64, token * K + choice of each row
    tokens_R: Tensor  # int64, the token of each row
    slots_R: Tensor  # int64, the row of each token * K + choice
    experts_R: Tensor  # the local expert of each row; that of a skipped one is E
    ends_E: Tensor  # int32, the end of each expert's rows
    skipped_TK: Tensor  # bool


def sort_rows(ids_TK: Tensor, first_expert: int, num_local: int) -> Rows:
    """The rows of ids [T, K], of any integer dtype, with at least one id and one local expert."""
    skipped_TK = (ids_TK < first_expert) | (ids_TK >= first_expert + num_local)
    # The time of a radix sort goes with the bytes of a key.
    key_dtype = torch.int16 if num_local < 2**15 else torch.int32
    keys_R = (ids_TK - first_expert).masked_fill_(skipped_TK, num_local).to(key_dtype).reshape(-1)
    experts_R, order_R = torch.sort(keys_R, stable=True)
    local_E = torch.arange(num_local, dtype=key_dtype, device=ids_TK.device)
    ends_E = torch.searchsorted(experts_R, local_E, right=True, out_int32=True)
    counted_R = torch.arange(order_R.shape[0], device=ids_TK.device)
    slots_R = torch.empty_like(order_R).scatter_(0, order_R, counted_R)
    return Rows(order_R, order_R // ids_TK.shape[1], slots_R, experts_R, ends_E, skipped_TK)


def forward(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    spec: ExpertsSpec,
) -> Tensor:
    """The output of ``perseus::experts``, [T, D], fresh and contiguous."""
    if ids_TK.numel() == 0 or gate_up.shape[0] == 0:
        return x_TD.new_zeros(x_TD.shape)
    rows = sort_rows(ids_TK, spec.expert_offset, gate_up.shape[0])
    y_RD = _linear(_active(x_TD, weights_TK, gate_up, gate_up_bias, spec, rows), _as_EIO(down, spec), down_bias, rows)
    return combine(y_RD, weights_TK if spec.weight_on == "output" else None, rows)


def _active(
    x_TD: Tensor, weights_TK: Tensor, gate_up: Tensor, bias: Tensor | None, spec: ExpertsSpec, rows: Rows
) -> Tensor:
    """[R, F]: what the second linear map reads. A function of its own, so that its temporaries end with it."""
    x_RD = x_TD.index_select(0, rows.tokens_R)
    if spec.weight_on == "input":
        x_RD = scale(x_RD, row_weights(weights_TK, rows, x_RD.dtype))
    return activate(_linear(x_RD, _as_EIO(gate_up, spec), bias, rows), spec)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which rows of ``dtype`` are weighted and summed: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def row_weights(weights_TK: Tensor, rows: Rows, dtype: torch.dtype) -> Tensor:
    """The routing weight of each row of ``dtype``, [R, 1]."""
    return weights_TK.reshape(-1, 1).index_select(0, rows.order_R).to(sum_dtype(dtype))


def scale(rows_RI: Tensor, weights_R1: Tensor) -> Tensor:
    """Rows times weights, rounded once."""
    return (rows_RI * weights_R1).to(rows_RI.dtype)


def _as_EIO(weight: Tensor, spec: ExpertsSpec) -> Tensor:
    """The weight as a view [E, I, O]."""
    return weight.transpose(1, 2) if spec.weight_layout == "out_in" else weight


def _linear(rows_RI: Tensor, weight_EIO: Tensor, bias_EO: Tensor | None, rows: Rows) -> Tensor:
    """Every expert's rows times its weight, [R, O]; skipped rows hold anything."""
    out_RO = grouped_mm(rows_RI, weight_EIO, offs=rows.ends_E)
    return out_RO if bias_EO is None else out_RO.add_(_row_biases(bias_EO, rows))


def _row_biases(bias_EO: Tensor, rows: Rows) -> Tensor:
    """[R, O]: the bias of each row's expert; of any expert for a skipped row."""
    return bias_EO.index_select(0, rows.experts_R.clamp(max=bias_EO.shape[0] - 1).to(torch.int32))


def combine(rows_RD: Tensor, weights_TK: Tensor | None, rows: Rows) -> Tensor:
    """Sum of each token's rows, times its weights if given, in choice order; skipped rows are zeros."""
    num_choices, dtype = rows.skipped_TK.shape[1], sum_dtype(rows_RD.dtype)
    slots_TKD = rows_RD.index_select(0, rows.slots_R).unflatten(0, rows.skipped_TK.shape)
    slots_TKD.masked_fill_(rows.skipped_TK.unsqueeze(-1), 0)
    if weights_TK is None:
        total_TD = slots_TKD[:, 0].to(dtype, copy=True)
        for choice in range(1, num_choices):
            total_TD.add_(slots_TKD[:, choice])
    else:
        # NOTE: zero times a NaN is a NaN, so the weight of a skipped choice must go too.
        weights_TK1 = weights_TK.to(dtype).masked_fill(rows.skipped_TK, 0).unsqueeze(-1)
        total_TD = slots_TKD[:, 0] * weights_TK1[:, 0]
        for choice in range(1, num_choices):
            total_TD.addcmul_(slots_TKD[:, choice], weights_TK1[:, choice])
    return total_TD.to(rows_RD.dtype)


def backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    spec: ExpertsSpec,
    needs_grad: Sequence[bool],
) -> list[Tensor]:
    """Gradients of those of x, weights, gate_up, gate_up_bias, down, down_bias that are asked for, in that order.

    Computes the first linear map and the activation again. Each gradient is contiguous, in the dtype of its tensor, and
    the same from run to run. The gradient of a routing weight is <grad, down(a)> = <grad @ down, a> + <grad, bias>.
    """
    need_x, need_weights, need_gate_up, need_gate_up_bias, need_down, need_down_bias = needs_grad
    if ids_TK.numel() == 0 or gate_up.shape[0] == 0:
        tensors = zip((x_TD, weights_TK, gate_up, gate_up_bias, down, down_bias), needs_grad, strict=True)
        return [tensor.new_zeros(tensor.shape) for tensor, needed in tensors if needed and tensor is not None]
    on_output = spec.weight_on == "output"
    rows = sort_rows(ids_TK, spec.expert_offset, gate_up.shape[0])
    weights_R1 = row_weights(weights_TK, rows, x_TD.dtype)
    x_RD = x_TD.index_select(0, rows.tokens_R)
    expert_in_RD = x_RD if on_output else scale(x_RD, weights_R1)
    hidden_RH = _linear(expert_in_RD, _as_EIO(gate_up, spec), gate_up_bias, rows)
    active_RF = activate(hidden_RH, spec)

    grad_RD = grad_TD.index_select(0, rows.tokens_R)  # of the token's output, not yet weighted
    grad_y_RD = scale(grad_RD, weights_R1) if on_output and (need_down or need_down_bias) else grad_RD
    if need_x or need_weights or need_gate_up or need_gate_up_bias:
        back_RF = _linear(grad_RD, _as_EIO(down, spec).transpose(1, 2), None, rows)
        grad_hidden_RH = activate_backward(scale(back_RF, weights_R1) if on_output else back_RF, hidden_RH, spec)

    grads: list[Tensor] = []
    if need_x or (need_weights and not on_output):
        grad_in_RD = _linear(grad_hidden_RH, _as_EIO(gate_up, spec).transpose(1, 2), None, rows)
    if need_x:
        grads.append(combine(grad_in_RD, None if on_output else weights_TK, rows))
    if need_weights:
        dot_R = row_dots(back_RF, active_RF) if on_output else row_dots(grad_in_RD, x_RD)
        if on_output and down_bias is not None:
            dot_R += row_dots(grad_RD, _row_biases(down_bias, rows))
        dot_TK = dot_R.index_select(0, rows.slots_R).view(ids_TK.shape)
        grads.append(dot_TK.masked_fill_(rows.skipped_TK, 0).to(weights_TK.dtype))
    if need_gate_up:
        grads.append(_weight_grad(expert_in_RD, grad_hidden_RH, spec, rows))
    if need_gate_up_bias:
        grads.append(_bias_grad(grad_hidden_RH, rows))
    if need_down:
        grads.append(_weight_grad(active_RF, grad_y_RD, spec, rows))
    if need_down_bias:
        grads.append(_bias_grad(grad_y_RD, rows))
    return grads


def row_dots(left_RI: Tensor, right_RI: Tensor) -> Tensor:
    """The dot product of each pair of rows, [R]; of a skipped row, anything."""
    return (left_RI.to(sum_dtype(left_RI.dtype)) * right_RI).sum(-1)


def _weight_grad(rows_RI: Tensor, grad_RO: Tensor, spec: ExpertsSpec, rows: Rows) -> Tensor:
    left, right = (grad_RO, rows_RI) if spec.weight_layout == "out_in" else (rows_RI, grad_RO)
    return _segment_products(left, right, rows)


def _bias_grad(grad_RO: Tensor, rows: Rows) -> Tensor:
    """[E, O]: sums of each expert's rows, as products with ones: deterministic, accumulated like any GEMM."""
    ones = grad_RO.new_ones(grad_RO.shape[0], ROW_BYTES // grad_RO.dtype.itemsize)  # as narrow as a GEMM may be
    return _segment_products(ones, grad_RO, rows)[:, 0].contiguous()


def _segment_products(left_RO: Tensor, right_RI: Tensor, rows: Rows) -> Tensor:
    """[E, O, I]: the transpose of each expert's left rows times its right rows; zeros for an expert without rows."""
    # NOTE: only this operand order (left column-major, right row-major) lets an expert have any number of rows, none
    # included; with another, torch's kernel asserts on the device.
    out_EOI = grouped_mm(left_RO.t(), right_RI, offs=rows.ends_E)
    if out_EOI.is_cuda and torch.cuda.get_device_capability(out_EOI.device)[0] != 9:
        # pytorch issue 172439: on Blackwell the product over no rows is not zero. Hopper writes zeros.
        empty_E = rows.ends_E.diff(prepend=rows.ends_E.new_zeros(1)) == 0
        out_EOI.masked_fill_(empty_E[:, None, None], 0)
    return out_EOI
