"""Losses that read the router's logits, ids or counts: the same gradients flow, and the experts are one node."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from eager_twin import train_beside_eager, weighted_sum
from spellings import BatchedMM, Experts, GroupedMM
from torch import Tensor, nn

from perseus_compile.testing.models import tiny_causal_lm

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
Loss = Callable[[Tensor, Tensor], Tensor]  # of logits [T, E] and ids [T, K]


def z_loss(logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """The square of the log of the sum of the exponentials, per token."""
    return logits_TE.logsumexp(dim=-1).square().mean()


def load_balance(logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Share of the choices times mean probability, summed over the experts."""
    share_E = F.one_hot(ids_TK, logits_TE.shape[-1]).float().mean(dim=(0, 1))
    return logits_TE.shape[-1] * (share_E * logits_TE.softmax(dim=-1).mean(dim=0)).sum()


def counted_load_balance(logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    num_experts = logits_TE.shape[-1]
    counts_E = torch.histc(ids_TK.float(), bins=num_experts, min=0, max=num_experts - 1)
    return (counts_E / ids_TK.numel() * logits_TE.softmax(dim=-1).mean(dim=0)).sum()


class WithLoss(nn.Module):
    """Experts and one loss of their router, as blocks return it beside their output."""

    def __init__(self, spelling: type[Experts], loss: Loss) -> None:
        super().__init__()
        self.layer, self.loss = spelling(), loss

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits_TE = F.linear(x, self.layer.router)
        weights_TK, ids_TK = torch.topk(logits_TE.softmax(dim=-1), self.layer.top_k, dim=-1)
        return self.layer.experts(x, ids_TK, weights_TK), self.loss(logits_TE, ids_TK)


@pytest.mark.parametrize("spelling", (GroupedMM, BatchedMM))
@pytest.mark.parametrize("loss", (z_loss, load_balance, counted_load_balance))
def test_loss_of_a_router(loss: Loss, spelling: type[Experts]) -> None:
    torch.manual_seed(0)

    def total(model: nn.Module) -> Tensor:
        output, auxiliary = model(X)
        return weighted_sum(output) + 0.5 * auxiliary

    outcome = train_beside_eager(WithLoss(spelling, loss), total, fullgraph=True)
    assert (outcome.ops, outcome.refusals) == (["experts"], [])
    assert "of the router is also read by" in outcome.whys[0]


@pytest.mark.parametrize("model_type", ("qwen3_moe", "mixtral", "gpt_oss"))
def test_router_logits_of_hugging_face(model_type: str) -> None:
    """output_router_logits adds transformers' load balancing loss to the model's own."""
    model = tiny_causal_lm(model_type, num_layers=2, router_aux_loss_coef=0.5).train()
    ids = torch.arange(12).view(2, 6)
    auxiliary = []

    def loss(each: nn.Module) -> Tensor:
        output = each(ids, labels=ids, use_cache=False, output_router_logits=True)
        auxiliary.append(output.aux_loss.detach())
        return output.loss

    outcome = train_beside_eager(model, loss)
    assert (outcome.ops, outcome.refusals) == (["experts", "experts"], [])
    assert len(auxiliary) == 2 and auxiliary[0] > 0
    torch.testing.assert_close(*auxiliary)
