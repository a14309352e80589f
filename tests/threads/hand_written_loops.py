"""Loops over experts as users wrote them in the threads, which Dynamo cannot capture whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from loops import ExpertLoop
from torch import Tensor


class NumelLoop(ExpertLoop):
    """Every expert, but those without tokens are left out by an ``if``."""

    def add(self, total: Tensor, rows: Tensor, hits: tuple[Tensor, Tensor]) -> Tensor:
        return super().add(total, rows, hits) if hits[0].numel() > 0 else total


class HitLoop(ExpertLoop):
    """Only the experts that were hit, found by ``nonzero``."""

    def loop(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = self.begin(x)
        mask_EKT = F.one_hot(ids, num_classes=self.num_experts).permute(2, 1, 0)
        hit = (mask_EKT.sum((-1, -2)) > 0).nonzero()
        for expert in hit[:]:
            with torch.no_grad():
                choices, tokens = torch.where(mask_EKT[expert[0]])
            rows = self.weigh(self.experts[expert[0]](x[tokens]), weights, (tokens, choices))
            total.index_add_(0, tokens, rows)
        return total
