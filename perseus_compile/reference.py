"""What do the perseus ops mean? One token and one choice at a time, in plain differentiable torch; never fast.

The oracle of the tests: it works in every floating dtype, float64 included, and autograd differentiates it.

Axes: T tokens, K choices per token, E experts, D model width, F expert width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from perseus_compile.facts import RoutingSpec
from perseus_compile.routing import route

__all__ = ["activate", "experts", "moe", "route"]

_ROUTING_FIELDS = frozenset(RoutingSpec.__dataclass_fields__)


def activate(gate: Tensor, up: Tensor | float, activation: str, params: tuple[float, ...] | list[float]) -> Tensor:
    """The activation between an expert's two linear maps, in the dtype of its inputs; ``up`` is 1 without a gate."""
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "gelu":
        return F.gelu(gate) * up
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if activation == "relu":
        return F.relu(gate) * up
    if activation == "relu2":
        return F.relu(gate) ** 2 * up
    assert isinstance(up, Tensor), "the others have a gate and an up half"
    if activation == "softcapped_silu":
        gate_cap, up_cap = params
        return gate_cap * torch.tanh(gate / gate_cap) * torch.sigmoid(gate) * (up_cap * torch.tanh(up / up_cap))
    if activation == "clamped_silu":
        (limit,) = params
        return F.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)
    alpha, limit = params
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))


def experts(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    *,
    weight_layout: str,
    gate_layout: str,
    activation: str,
    activation_params: tuple[float, ...] | list[float] = (),
    weight_on: str = "output",
    num_experts: int,
    expert_offset: int = 0,
) -> Tensor:
    """Sum over the choices of each token, in choice order, of weight * expert(token); foreign ids are skipped."""
    del num_experts  # only the experts at hand decide which ids are skipped
    num_tokens, num_choices = ids_TK.shape
    sum_dtype = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
    rows = []
    for token in range(num_tokens):
        total_D = torch.zeros(x_TD.shape[1], dtype=sum_dtype, device=x_TD.device)
        for choice in range(num_choices):
            expert = int(ids_TK[token, choice]) - expert_offset
            if not 0 <= expert < gate_up.shape[0]:
                continue
            weight = weights_TK[token, choice].to(sum_dtype)
            x_D = x_TD[token]
            if weight_on == "input":
                x_D = (x_D * weight).to(x_TD.dtype)
            hidden_H = _linear(x_D, gate_up, gate_up_bias, expert, weight_layout)
            active_F = activate(*_halves(hidden_H, gate_layout), activation, activation_params)
            y_D = _linear(active_F, down, down_bias, expert, weight_layout)
            total_D = total_D + (y_D.to(sum_dtype) * weight if weight_on == "output" else y_D.to(sum_dtype))
        rows.append(total_D.to(x_TD.dtype))
    return torch.stack(rows) if rows else torch.zeros_like(x_TD)


def moe(
    x_TD: Tensor,
    router_weight_ED: Tensor,
    router_bias_E: Tensor | None,
    correction_bias_E: Tensor | None,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    **numbers: Any,
) -> Tensor:
    """The router, then the experts; ``numbers`` are the keyword arguments of ``perseus::moe``."""
    routing = {name: value for name, value in numbers.items() if name in _ROUTING_FIELDS}
    rest = {name: value for name, value in numbers.items() if name not in _ROUTING_FIELDS}
    weights_TK, ids_TK = route(x_TD, router_weight_ED, router_bias_E, correction_bias_E, **routing)
    return experts(x_TD, ids_TK, weights_TK, gate_up, gate_up_bias, down, down_bias, **rest)


def _halves(hidden: Tensor, gate_layout: str) -> tuple[Tensor, Tensor | float]:
    """Gate and up; all of ``hidden`` and 1 where there is no gate."""
    if gate_layout == "none":
        return hidden, 1.0
    if gate_layout == "concatenated":
        gate_F, up_F = hidden.chunk(2)
        return gate_F, up_F
    return hidden[0::2], hidden[1::2]


def _linear(x: Tensor, weights: Tensor, biases: Tensor | None, expert: int, weight_layout: str) -> Tensor:
    weight = weights[expert] if weight_layout == "out_in" else weights[expert].t()
    return F.linear(x, weight, None if biases is None else biases[expert])
