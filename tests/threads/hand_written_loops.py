"""Loops over experts as users wrote them in the threads: D = 16, E = 4, K = 2, experts with a gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Loop(nn.Module):
    """Tokens of one expert after the other; ``chosen`` says which experts are visited."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, ids_TK = self.router(x_TD).softmax(dim=-1).topk(2, dim=-1)
        out_TD = torch.zeros_like(x_TD)
        self.add_experts(out_TD, x_TD, ids_TK, weights_TK)
        return out_TD

    def add_experts(self, out_TD: Tensor, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        raise NotImplementedError

    def add_expert(self, out_TD: Tensor, x_TD: Tensor, expert: int | Tensor, tokens: Tensor, weights: Tensor) -> None:
        out_TD.index_add_(0, tokens, self.experts[expert](x_TD[tokens]) * weights[:, None])


class WhereLoop(Loop):
    """Every expert, with ``torch.where``."""

    def add_experts(self, out_TD: Tensor, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        for expert in range(4):
            tokens, choices = torch.where(ids_TK == expert)
            self.add_expert(out_TD, x_TD, expert, tokens, weights_TK[tokens, choices])


class NumelLoop(Loop):
    """Every expert, but those without tokens are left out by an ``if``."""

    def add_experts(self, out_TD: Tensor, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        for expert in range(4):
            tokens, choices = torch.where(ids_TK == expert)
            if tokens.numel() > 0:
                self.add_expert(out_TD, x_TD, expert, tokens, weights_TK[tokens, choices])


class HitLoop(Loop):
    """Only the experts that were hit, found by ``nonzero``."""

    def add_experts(self, out_TD: Tensor, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        mask_EKT = F.one_hot(ids_TK, num_classes=4).permute(2, 1, 0)
        hit = (mask_EKT.sum((-1, -2)) > 0).nonzero()
        for expert in hit[:]:
            with torch.no_grad():
                choices, tokens = torch.where(mask_EKT[expert[0]])
            self.add_expert(out_TD, x_TD, expert[0], tokens, weights_TK[tokens, choices])
