"""How does one get the MoE layer of a case, inputs for it, and values to check it against?

Axes: B sequences (1), T tokens, K choices per token, E experts, D model width, S sampled tokens.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perseus_compile import reference
from perseus_compile.testing.models import config_for, random_causal_lm
from perseus_compile.testing.moe_cases import Case

_MAX_SAMPLES = 16
# A sampled token's last choice is ahead of the best expert not chosen by this share of the token's largest logit, four
# times what rounding a logit to bfloat16 can move it.
_CLEAR_SHARE = 2**-6


class MoELayer(nn.Module):
    """Hugging Face's block with random weights, the same at each call.

    The output is a tensor; some blocks also return their routing weights, which no model reads.
    """

    def __init__(
        self, case: Case, dtype: torch.dtype, device: torch.device, implementation: str = "grouped_mm"
    ) -> None:
        super().__init__()
        config = config_for(case.model_type, num_layers=1, **case.config)
        model = random_causal_lm(config, dtype=dtype, device=device, implementation=implementation)
        self.block: Any = model.model.layers[0].mlp
        self.case = case
        self.spec = case.experts

    def forward(self, x_BTD: Tensor) -> Tensor:
        output = self.block(x_BTD)
        return output[0] if isinstance(output, tuple) else output

    @property
    def router(self) -> Any:
        return next(child for child in self.block.children() if child is not self.block.experts)

    @property
    def weights(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """gate_up, gate_up_bias, down, down_bias, as ``perseus::experts`` takes them."""
        experts = self.block.experts
        biases = (getattr(experts, f"{name}_proj_bias", None) for name in ("gate_up", "down"))
        return experts.gate_up_proj, next(biases), experts.down_proj, next(biases)

    def route(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """ids and weights [T, K] by the block's own router."""
        _, weights_TK, ids_TK = self.router(x_BTD[0])
        return ids_TK, weights_TK


def inputs(layer: MoELayer, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Random x [1, T, D], and up to 16 positions [S] of tokens whose choice of experts does not hang on rounding."""
    router_ED = layer.router.weight
    bias_E = getattr(layer.router, "bias", None)
    for seed in itertools.count():
        generator = torch.Generator(router_ED.device).manual_seed(seed)
        shape = (1, num_tokens, router_ED.shape[1])
        x_BTD = torch.randn(shape, generator=generator, device=router_ED.device).to(router_ED.dtype)
        best_TK = F.linear(x_BTD[0], router_ED, bias_E).float().topk(layer.case.top_k + 1).values
        lead_T = best_TK[:, -2] - best_TK[:, -1]
        samples_S = (lead_T > _CLEAR_SHARE * best_TK.abs().amax(-1)).nonzero()[:_MAX_SAMPLES, 0]
        if samples_S.numel():
            return x_BTD, samples_S
    raise AssertionError("count() does not end")


def expected(layer: MoELayer, x_BTD: Tensor, samples_S: Tensor) -> Tensor:
    """The output [S, D] of the sampled tokens: the block's own routing, the experts in float32."""
    ids_TK, weights_TK = layer.route(x_BTD)
    routed = ids_TK[samples_S], weights_TK[samples_S].float()
    weights: Any = (None if tensor is None else tensor.float() for tensor in layer.weights)
    return reference.experts(x_BTD[0, samples_S].float(), *routed, *weights, **layer.spec.as_kwargs())
