"""The gated activation between an expert's two linear maps, and its derivative, as eager torch ops."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from perseus_compile.facts import ExpertsSpec

_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def split_gate_up(hidden: Tensor, spec: ExpertsSpec) -> tuple[Tensor, Tensor]:
    """Views of the gate and the up half along the last axis."""
    if spec.gate_layout == "concatenated":
        gate, up = hidden.chunk(2, dim=-1)
        return gate, up
    return hidden[..., 0::2], hidden[..., 1::2]


def activate(gate: Tensor, up: Tensor, spec: ExpertsSpec) -> Tensor:
    """The activation in the dtype of its inputs; a fresh tensor."""
    if spec.activation == "silu":
        return F.silu(gate).mul_(up)
    if spec.activation in _APPROXIMATE:
        return F.gelu(gate, approximate=_APPROXIMATE[spec.activation]).mul_(up)
    alpha, limit = spec.activation_params
    gate = gate.clamp(max=limit)
    return torch.sigmoid(gate * alpha).mul_(gate).mul_(up.clamp(-limit, limit).add_(1))


def activate_backward(grad: Tensor, gate: Tensor, up: Tensor, spec: ExpertsSpec) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up from the gradient of the activation's output."""
    if spec.activation == "silu":
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
    if spec.activation in _APPROXIMATE:
        approximate = _APPROXIMATE[spec.activation]
        grad_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate=approximate)
        return grad_gate, F.gelu(gate, approximate=approximate).mul_(grad)
    alpha, limit = spec.activation_params
    clamped = gate.clamp(max=limit)
    sigmoid = torch.sigmoid(clamped * alpha)
    slope = sigmoid * (1 + alpha * clamped * (1 - sigmoid))
    grad_gate = (grad * (up.clamp(-limit, limit) + 1) * slope).masked_fill(gate > limit, 0)
    grad_up = (grad * clamped * sigmoid).masked_fill(up.abs() > limit, 0)
    return grad_gate, grad_up
