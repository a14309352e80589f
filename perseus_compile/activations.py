"""What happens between an expert's two linear maps, and its derivative? Eager torch ops in the dtype of their input.

Axes: R routed rows, F expert width, H = 2F, the gate and up halves in the model's gate layout, or F without a gate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from perseus_compile.facts import ExpertsSpec

_GELU = {"gelu": "none", "gelu_tanh": "tanh"}  # activation -> the argument `approximate`


def activate(hidden_RH: Tensor, spec: ExpertsSpec) -> Tensor:
    """The activation, times the up half where there is a gate: [R, F], a fresh tensor."""
    if spec.gate_layout == "none":
        return _function(hidden_RH, spec.activation)
    gate_RF, up_RF = _split(hidden_RH, spec)
    if spec.activation == "clamped_swiglu":
        alpha, limit = spec.activation_params
        gate_RF = gate_RF.clamp(max=limit)
        return torch.sigmoid(gate_RF * alpha).mul_(gate_RF).mul_(up_RF.clamp(-limit, limit).add_(1))
    if spec.activation == "clamped_silu":
        (limit,) = spec.activation_params
        return F.silu(gate_RF.clamp(max=limit)).mul_(up_RF.clamp(-limit, limit))
    if spec.activation == "softcapped_silu":
        gate_cap, up_cap = spec.activation_params
        gate_RF, up_RF = _at_least_float32(gate_RF), _at_least_float32(up_RF)
        product_RF = torch.sigmoid(gate_RF).mul_(_softcap(gate_RF, gate_cap)).mul_(_softcap(up_RF, up_cap))
        return product_RF.to(hidden_RH.dtype)
    return _function(gate_RF, spec.activation).mul_(up_RF)


def activate_backward(grad_RF: Tensor, hidden_RH: Tensor, spec: ExpertsSpec) -> Tensor:
    """The gradient of ``hidden_RH`` from the gradient of ``activate``'s output."""
    if spec.gate_layout == "none":
        return _function_backward(grad_RF, hidden_RH, spec.activation)
    gate_RF, up_RF = _split(hidden_RH, spec)
    grad_hidden_RH = torch.empty_like(hidden_RH)
    grad_gate_RF, grad_up_RF = _split(grad_hidden_RH, spec)
    if spec.activation == "clamped_swiglu":
        alpha, limit = spec.activation_params
        clamped_RF = gate_RF.clamp(max=limit)
        sigmoid_RF = torch.sigmoid(clamped_RF * alpha)
        slope_RF = sigmoid_RF * (1 + alpha * clamped_RF * (1 - sigmoid_RF))
        scaled_RF = grad_RF * (up_RF.clamp(-limit, limit) + 1)
        torch.mul(scaled_RF * slope_RF, gate_RF <= limit, out=grad_gate_RF)
        torch.mul(grad_RF * clamped_RF * sigmoid_RF, up_RF.abs() <= limit, out=grad_up_RF)
    elif spec.activation == "clamped_silu":
        (limit,) = spec.activation_params
        clamped_RF = gate_RF.clamp(max=limit)
        inner_RF = torch.ops.aten.silu_backward(grad_RF * up_RF.clamp(-limit, limit), clamped_RF)
        torch.mul(inner_RF, gate_RF <= limit, out=grad_gate_RF)
        torch.mul(grad_RF * F.silu(clamped_RF), up_RF.abs() <= limit, out=grad_up_RF)
    elif spec.activation == "softcapped_silu":
        gate_cap, up_cap = spec.activation_params
        gate_RF, up_RF, grad_RF = map(_at_least_float32, (gate_RF, up_RF, grad_RF))
        sigmoid_RF = torch.sigmoid(gate_RF)
        capped_gate_RF, capped_up_RF = _softcap(gate_RF, gate_cap), _softcap(up_RF, up_cap)
        slope_RF = 1 - (capped_gate_RF / gate_cap).square() + capped_gate_RF * (1 - sigmoid_RF)
        grad_gate_RF.copy_(grad_RF * capped_up_RF * sigmoid_RF * slope_RF)
        grad_up_RF.copy_(grad_RF * capped_gate_RF * sigmoid_RF * (1 - (capped_up_RF / up_cap).square()))
    else:
        grad_gate_RF.copy_(_function_backward(grad_RF * up_RF, gate_RF, spec.activation))
        torch.mul(_function(gate_RF, spec.activation), grad_RF, out=grad_up_RF)
    return grad_hidden_RH


def _function(value: Tensor, activation: str) -> Tensor:
    """An activation of one value, a fresh tensor."""
    if activation == "silu":
        return F.silu(value)
    if activation == "relu":
        return F.relu(value)
    if activation == "relu2":
        return F.relu(value).square_()
    return F.gelu(value, approximate=_GELU[activation])


def _function_backward(grad: Tensor, value: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return torch.ops.aten.silu_backward(grad, value)
    if activation == "relu":
        return grad * (value > 0)
    if activation == "relu2":
        return F.relu(value).mul_(2).mul_(grad)
    return torch.ops.aten.gelu_backward(grad, value, approximate=_GELU[activation])


def _softcap(value: Tensor, cap: float) -> Tensor:
    return torch.tanh(value / cap).mul_(cap)


def _at_least_float32(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _split(hidden_RH: Tensor, spec: ExpertsSpec) -> tuple[Tensor, Tensor]:
    """Views of the gate and the up half."""
    if spec.gate_layout == "concatenated":
        gate_RF, up_RF = hidden_RH.chunk(2, dim=-1)
        return gate_RF, up_RF
    return hidden_RH[:, 0::2], hidden_RH[:, 1::2]
