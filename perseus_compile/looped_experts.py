"""How can experts be captured whose loop runs over those that were hit? By the same experts over ``range(E)``.

Each form is told by the parameters and modules that its code reads, and only where that code is of transformers: other
code can read the same ones and compute something else, such as an interleaved gate. It is replaced on the instance
alone: the class, the parameters and the state dict stay as they are. Capturing a loop over ``range(E)`` needs the
Dynamo settings that ``perseus_compile.compile`` sets.

Axes: T tokens, K choices per token, E experts, D model width, F expert width, N rows of one expert.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Expert = Callable[[int, Tensor], Tensor]


def replace_loop(module: nn.Module) -> bool:
    """Gives ``module`` a forward that runs over all experts, if its code is of a known form; whether it was."""
    if type(module).forward.__module__.partition(".")[0] != "transformers":
        return False
    for form in _FORMS:
        if form.fits(module):
            module.forward = types.MethodType(form.forward, module)
            return True
    return False


@dataclasses.dataclass(frozen=True)
class _Form:
    """``fits``: whether a module is of this form; ``forward``: what it computes, with a loop over all experts."""

    fits: Callable[[nn.Module], bool]
    forward: Callable[..., Any]


def _sum_over_experts(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, num_experts: int, expert: Expert) -> Tensor:
    """The weighted outputs of the chosen experts; ids from ``num_experts`` on are left out."""
    out_TD = torch.zeros_like(x_TD)
    for index in range(num_experts):
        tokens_N, choices_N = torch.where(ids_TK == index)
        y_ND = expert(index, x_TD[tokens_N]) * weights_TK[tokens_N, choices_N, None]
        out_TD.index_add_(0, tokens_N, y_ND.to(x_TD.dtype))
    return out_TD


def _takes(module: nn.Module, *names: str) -> bool:
    """Whether the class's own forward takes these arguments."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:] == names


def _dim(module: nn.Module, name: str) -> int:
    """Number of axes of a parameter of ``module``; 0 where it has none of this name."""
    parameter = getattr(module, name, None)
    return parameter.dim() if isinstance(parameter, nn.Parameter) else 0


# ---- stacked weights [E, 2F, D] and [E, D, F]: longcat_flash, step3


def _is_stacked(module: nn.Module) -> bool:
    is_stacked = _dim(module, "gate_up_proj") == 3 and _dim(module, "down_proj") == 3 and hasattr(module, "act_fn")
    is_switchable = hasattr(module, "has_gate")  # decorated by transformers
    return is_stacked and not is_switchable and _takes(module, "hidden_states", "top_k_index", "top_k_weights")


def _stacked_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    num_experts = self.down_proj.shape[0]
    gate_up = self.gate_up_proj[:num_experts]

    def expert(index: int, rows_ND: Tensor) -> Tensor:
        hidden = F.linear(rows_ND, gate_up[index])
        if hasattr(self, "_apply_gate"):
            return F.linear(self._apply_gate(hidden), self.down_proj[index])
        gate, up = hidden.chunk(2, dim=-1)
        return F.linear(self.act_fn(gate) * up, self.down_proj[index])

    out_TD = _sum_over_experts(hidden_states, top_k_index, top_k_weights, num_experts, expert)
    if getattr(self, "zero_expert_num", 0):
        # Experts without weights hand their tokens on.
        kept_T1 = top_k_weights.masked_fill(top_k_index < num_experts, 0).sum(dim=-1, keepdim=True)
        out_TD = out_TD + (hidden_states * kept_T1).to(hidden_states.dtype)
    return out_TD


# ---- three parameters [E * F, D]: dbrx


def _is_flat(module: nn.Module) -> bool:
    mlp = getattr(module, "mlp", None)
    is_flat = isinstance(mlp, nn.Module) and all(_dim(mlp, name) == 2 for name in ("w1", "v1", "w2"))
    return is_flat and _takes(module, "hidden_states", "top_k_index", "top_k_weights")


def _flat_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    num_experts, width = self.num_experts, self.hidden_size
    w1, v1, w2 = (weight.view(num_experts, -1, width) for weight in (self.mlp.w1, self.mlp.v1, self.mlp.w2))

    def expert(index: int, rows_ND: Tensor) -> Tensor:
        return self.mlp(rows_ND, w1[index], v1[index], w2[index])

    flat = hidden_states.reshape(-1, width)
    out = _sum_over_experts(flat, top_k_index, top_k_weights, num_experts, expert)
    return out.view(hidden_states.shape[0], -1, width)


# ---- a module for each expert, chosen by a one-hot mask [T, 1, E], all 0 for a dropped token: switch_transformers


def _is_chosen_by_mask(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleDict) and _takes(module, "hidden_states", "selected_experts", "routing_weights")


def _mask_forward(self: Any, hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Tensor:
    experts = list(self.children())
    is_dropped_TK = selected_experts.sum(dim=-1) == 0
    ids_TK = selected_experts.argmax(dim=-1).masked_fill(is_dropped_TK, len(experts))
    return _sum_over_experts(hidden_states, ids_TK, routing_weights, len(experts), lambda e, rows: experts[e](rows))


# ---- a module for each expert, and tokens dropped behind each: nllb-moe


def _has_token_dropout(module: nn.Module) -> bool:
    is_listed = isinstance(module, nn.ModuleDict) and hasattr(module, "token_dropout")
    return is_listed and _takes(module, "hidden_states", "router_mask", "router_probs")


def _token_dropout_forward(self: Any, hidden_states: Tensor, router_mask: Tensor, router_probs: Tensor) -> Tensor:
    def expert(index: int, rows_ND: Tensor) -> Tensor:
        y_ND = self[f"expert_{index}"](rows_ND)
        return self.token_dropout(y_ND) if self.training and self.moe_token_dropout > 0 else y_ND

    if not self.training and self.moe_token_dropout > 0:
        router_probs = router_probs * (1 - self.moe_token_dropout)
    return _sum_over_experts(hidden_states, router_mask, router_probs, self.num_experts, expert)


# ---- a router and two modules with stacked weights: jetmoe


def _is_parallel(module: nn.Module) -> bool:
    linears = [getattr(module, name, None) for name in ("input_linear", "output_linear")]
    is_parallel = all(isinstance(linear, nn.Module) and _dim(linear, "weight") == 3 for linear in linears)
    return is_parallel and hasattr(getattr(module, "router", None), "top_k") and _takes(module, "layer_input")


def _parallel_forward(self: Any, layer_input: Tensor) -> Tensor:
    x_TD = layer_input.reshape(-1, layer_input.shape[-1])
    logits_TE = self.router.layer(x_TD).float()
    top_logits_TK, ids_TK = logits_TE.topk(self.router.top_k, dim=1)
    weights_TK = torch.softmax(top_logits_TK, dim=1).type_as(x_TD)

    def expert(index: int, rows_ND: Tensor) -> Tensor:
        gate, up = F.linear(rows_ND, self.input_linear.weight[index]).chunk(2, dim=-1)
        return F.linear(self.activation(gate) * up, self.output_linear.weight[index])

    out_TD = _sum_over_experts(x_TD, ids_TK, weights_TK, self.input_linear.weight.shape[0], expert)
    return out_TD.view(layer_input.shape) + self.bias


_FORMS = (
    _Form(_is_stacked, _stacked_forward),
    _Form(_is_flat, _flat_forward),
    _Form(_is_chosen_by_mask, _mask_forward),
    _Form(_has_token_dropout, _token_dropout_forward),
    _Form(_is_parallel, _parallel_forward),
)
