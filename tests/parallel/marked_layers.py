"""MoE layers in which every rank runs its own experts on all tokens, and others that are nearly so.

Axes: L experts per rank, T tokens, K choices per token, R routed rows, D model width, F expert width.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce

L, K, D, WIDTH = 3, 2, 16, 8


class OwnExperts(nn.Module):
    """Choices of other ranks are marked by the id L and weigh nothing; outputs are added up over the ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.rank = group, group.rank()
        self.router = nn.Linear(D, group.size() * L, bias=False)
        self.gate_up = nn.Parameter(torch.randn(L, 2 * WIDTH, D) / 4)
        self.down = nn.Parameter(torch.randn(L, D, WIDTH) / 3)

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, ids_TK = self.router(x_TD).softmax(-1).topk(K, dim=-1)
        foreign_TK = ids_TK // L != self.rank
        marked_R = self.mark(foreign_TK, ids_TK).reshape(-1)
        weights_R1 = self.weigh(foreign_TK, weights_TK).reshape(-1).unsqueeze(1)
        foreign_R1 = (marked_R >= L).unsqueeze(1)
        local_R = self.clamp(marked_R)
        hidden_RF = torch.bmm(self.gate_up[local_R], x_TD.repeat_interleave(K, 0).unsqueeze(2)).squeeze(2)
        gate_RF, up_RF = hidden_RF.chunk(2, dim=1)
        y_RD = torch.bmm(self.down[local_R], (F.silu(gate_RF) * up_RF).unsqueeze(2)).squeeze(2)
        weighted_RD = self.mask(y_RD, foreign_R1) * weights_R1
        return self.reduce(weighted_RD.view(-1, K, D).sum(1))

    def mark(self, foreign_TK: Tensor, ids_TK: Tensor) -> Tensor:
        return torch.where(foreign_TK, L, ids_TK % L)

    def weigh(self, foreign_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return weights_TK.masked_fill(foreign_TK, 0.0)

    def clamp(self, marked_R: Tensor) -> Tensor:
        return marked_R.clamp(0, L - 1)

    def mask(self, y_RD: Tensor, foreign_R1: Tensor) -> Tensor:
        return y_RD.masked_fill(foreign_R1, 0.0)

    def reduce(self, y_TD: Tensor) -> Tensor:
        return all_reduce(y_TD, "sum", self.group)


class NotReduced(OwnExperts):
    """A layer of this rank's experts: what becomes of their sum is not its concern."""

    def reduce(self, y_TD: Tensor) -> Tensor:
        return y_TD


class Averaged(OwnExperts):
    def reduce(self, y_TD: Tensor) -> Tensor:
        return all_reduce(y_TD, "sum", self.group) / self.group.size()


class LargestOfRanks(OwnExperts):
    def reduce(self, y_TD: Tensor) -> Tensor:
        return all_reduce(y_TD, "max", self.group)


class ReducedTwice(OwnExperts):
    def reduce(self, y_TD: Tensor) -> Tensor:
        return all_reduce(all_reduce(y_TD, "sum", self.group), "sum", self.group)


class WeightsKept(OwnExperts):
    """The choices of other ranks weigh what they weigh, and their rows are those of the last expert."""

    def weigh(self, foreign_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return weights_TK


class SmallWeights(OwnExperts):
    def weigh(self, foreign_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return weights_TK.masked_fill(foreign_TK, 0.5)


class OwnWeighNothing(OwnExperts):
    def weigh(self, foreign_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return weights_TK.masked_fill(~foreign_TK, 0.0)


class MarkedAsAnExpert(OwnExperts):
    def mark(self, foreign_TK: Tensor, ids_TK: Tensor) -> Tensor:
        return torch.where(foreign_TK, L - 1, ids_TK % L)


class LocalByAnotherNumber(OwnExperts):
    def mark(self, foreign_TK: Tensor, ids_TK: Tensor) -> Tensor:
        return torch.where(foreign_TK, L, ids_TK % (L - 1))


class ClampedTooFar(OwnExperts):
    def clamp(self, marked_R: Tensor) -> Tensor:
        return marked_R.clamp(0, L - 2)


class MaskedByOne(OwnExperts):
    def mask(self, y_RD: Tensor, foreign_R1: Tensor) -> Tensor:
        return y_RD.masked_fill(foreign_R1, 1.0)


class ExpertsOfAnotherRank(OwnExperts):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.rank = group.rank() + 1


class StepBeforeWeights(OwnExperts):
    """A step that no rule knows, after masks that were read as nothing."""

    def mask(self, y_RD: Tensor, foreign_R1: Tensor) -> Tensor:
        return F.normalize(super().mask(y_RD, foreign_R1) + 1)
