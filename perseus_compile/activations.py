"""What happens between an expert's two linear maps, and its derivative? Eager torch ops in the dtype of their input.

Axes: R routed rows, F expert width, H = 2F, the gate and up halves in the model's gate layout.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from perseus_compile.facts import ExpertsSpec

_GELU = {"gelu": "none", "gelu_tanh": "tanh"}  # activation -> the argument `approximate`


def activate(hidden_RH: Tensor, spec: ExpertsSpec) -> Tensor:
    """The gated activation, [R, F], a fresh tensor."""
    gate_RF, up_RF = _split(hidden_RH, spec)
    if spec.activation == "silu":
        return F.silu(gate_RF).mul_(up_RF)
    if spec.activation in _GELU:
        return F.gelu(gate_RF, approximate=_GELU[spec.activation]).mul_(up_RF)
    alpha, limit = spec.activation_params
    gate_RF = gate_RF.clamp(max=limit)
    return torch.sigmoid(gate_RF * alpha).mul_(gate_RF).mul_(up_RF.clamp(-limit, limit).add_(1))


def activate_backward(grad_RF: Tensor, hidden_RH: Tensor, spec: ExpertsSpec) -> Tensor:
    """The gradient of ``hidden_RH`` from the gradient of ``activate``'s output."""
    gate_RF, up_RF = _split(hidden_RH, spec)
    grad_hidden_RH = torch.empty_like(hidden_RH)
    grad_gate_RF, grad_up_RF = _split(grad_hidden_RH, spec)
    if spec.activation == "silu":
        grad_gate_RF.copy_(torch.ops.aten.silu_backward(grad_RF * up_RF, gate_RF))
        torch.mul(F.silu(gate_RF), grad_RF, out=grad_up_RF)
    elif spec.activation in _GELU:
        approximate = _GELU[spec.activation]
        grad_gate_RF.copy_(torch.ops.aten.gelu_backward(grad_RF * up_RF, gate_RF, approximate=approximate))
        torch.mul(F.gelu(gate_RF, approximate=approximate), grad_RF, out=grad_up_RF)
    else:
        alpha, limit = spec.activation_params
        clamped_RF = gate_RF.clamp(max=limit)
        sigmoid_RF = torch.sigmoid(clamped_RF * alpha)
        slope_RF = sigmoid_RF * (1 + alpha * clamped_RF * (1 - sigmoid_RF))
        scaled_RF = grad_RF * (up_RF.clamp(-limit, limit) + 1)
        torch.mul(scaled_RF * slope_RF, gate_RF <= limit, out=grad_gate_RF)
        torch.mul(grad_RF * clamped_RF * sigmoid_RF, up_RF.abs() <= limit, out=grad_up_RF)
    return grad_hidden_RH


def _split(hidden_RH: Tensor, spec: ExpertsSpec) -> tuple[Tensor, Tensor]:
    """Views of the gate and the up half."""
    if spec.gate_layout == "concatenated":
        gate_RF, up_RF = hidden_RH.chunk(2, dim=-1)
        return gate_RF, up_RF
    return hidden_RH[:, 0::2], hidden_RH[:, 1::2]
