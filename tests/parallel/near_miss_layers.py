"""Layers that are nearly a spelling of expert parallelism: one changed step each makes the whole mean another thing.

Axes as in ``spelled_layers.py``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from spelled_layers import D, Grouped, IdsModuloExperts, IdsSentAlong, K, L, RowsByExpert, SplitExperts, Splits
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd


class BackInAnotherGroup(SplitExperts):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.other = dist.new_group([0, 1])

    def back(self, y_SD: Tensor, sent: Splits, received: Splits) -> Tensor:
        return all_to_all_single_autograd(y_SD, sent, received, self.other)


class CountsInAnotherGroup(BackInAnotherGroup):
    def exchange(self, sent_WL: Tensor) -> Tensor:
        return all_to_all_single(sent_WL, None, None, self.other)

    def back(self, y_SD: Tensor, sent: Splits, received: Splits) -> Tensor:
        return all_to_all_single_autograd(y_SD, sent, received, self.group)


class SwappedSplits(SplitExperts):
    def to_owners(self, rows_RD: Tensor, received: Splits, sent: Splits) -> Tensor:
        return super().to_owners(rows_RD, sent, received)


class SwappedSplitsBack(SplitExperts):
    def back(self, y_SD: Tensor, sent: Splits, received: Splits) -> Tensor:
        return super().back(y_SD, received, sent)


class ReversedSplits(SplitExperts):
    def splits(self, sent_WL: Tensor, received_WL: Tensor) -> tuple[Splits, Splits]:
        sent, received = super().splits(sent_WL, received_WL)
        return sent[::-1], received[::-1]


class EqualSplits(SplitExperts):
    def to_owners(self, rows_RD: Tensor, received: Splits, sent: Splits) -> Tensor:
        return all_to_all_single_autograd(rows_RD, None, None, self.group)


class CountsOfOtherIds(SplitExperts):
    def counts(self, flat_R: Tensor) -> Tensor:
        return super().counts((flat_R + 1) % (self.num_ranks * L))


class RowsInChoiceOrder(SplitExperts):
    def order(self, flat_R: Tensor) -> Tensor:
        return torch.arange(flat_R.shape[0])


class DescendingOrder(SplitExperts):
    def order(self, flat_R: Tensor) -> Tensor:
        return flat_R.argsort(descending=True, stable=True)


class SortedAgain(SplitExperts):
    def combine(self, y_RD: Tensor, order_R: Tensor, weights_TK: Tensor) -> Tensor:
        return super().combine(y_RD, order_R.argsort(), weights_TK)


class NotPutBack(RowsByExpert):
    def experts(self, rows_SD: Tensor, local_S: Tensor, received_WL: Tensor) -> Tensor:
        permutation_S = local_S.argsort(stable=True)
        return SplitExperts.experts(self, rows_SD[permutation_S], local_S[permutation_S], received_WL)


class IdsNotReordered(RowsByExpert):
    def experts(self, rows_SD: Tensor, local_S: Tensor, received_WL: Tensor) -> Tensor:
        permutation_S = local_S.argsort(stable=True)
        return SplitExperts.experts(self, rows_SD[permutation_S], local_S, received_WL)[permutation_S.argsort()]


class OffsetOfNextRank(IdsSentAlong):
    def local_ids(self, sorted_R: Tensor, received_WL: Tensor, received: Splits, sent: Splits) -> Tensor:
        ids_S = all_to_all_single(sorted_R, received, sent, self.group)
        return ids_S - L * (self.group.rank() + 1)


class ModuloAnotherNumber(IdsModuloExperts):
    def local_ids(self, sorted_R: Tensor, received_WL: Tensor, received: Splits, sent: Splits) -> Tensor:
        return all_to_all_single(sorted_R, received, sent, self.group) % (L - 1)


class GlobalIds(IdsSentAlong):
    def local_ids(self, sorted_R: Tensor, received_WL: Tensor, received: Splits, sent: Splits) -> Tensor:
        return all_to_all_single(sorted_R, received, sent, self.group)


class RanksForExperts(SplitExperts):
    def local_ids(self, sorted_R: Tensor, received_WL: Tensor, received: Splits, sent: Splits) -> Tensor:
        experts_E = torch.arange(self.num_ranks).repeat(L)
        return experts_E.repeat_interleave(received_WL.reshape(-1), output_size=sum(received))


class WeightsTravel(SplitExperts):
    def local_ids(self, sorted_R: Tensor, received_WL: Tensor, received: Splits, sent: Splits) -> Tensor:
        weights_S = all_to_all_single_autograd(self.flat_weights_R, received, sent, self.group)
        self.received_weights_S1 = weights_S.unsqueeze(1)
        return super().local_ids(sorted_R, received_WL, received, sent)

    def order(self, flat_R: Tensor) -> Tensor:
        order_R = super().order(flat_R)
        self.flat_weights_R = torch.rand(flat_R.shape[0])[order_R]
        return order_R

    def back(self, y_SD: Tensor, sent: Splits, received: Splits) -> Tensor:
        return super().back(y_SD * self.received_weights_S1, sent, received)


class ScaledOnArrival(SplitExperts):
    def to_owners(self, rows_RD: Tensor, received: Splits, sent: Splits) -> Tensor:
        return super().to_owners(rows_RD, received, sent) * 2


class ReadOnArrival(SplitExperts):
    def experts(self, rows_SD: Tensor, local_S: Tensor, received_WL: Tensor) -> Tensor:
        y_SD = super().experts(rows_SD, local_S, received_WL)
        self.largest = y_SD.abs().sum()
        return y_SD

    def combine(self, y_RD: Tensor, order_R: Tensor, weights_TK: Tensor) -> Tensor:
        return super().combine(y_RD, order_R, weights_TK) + self.largest


class SentBackTwice(SplitExperts):
    def back(self, y_SD: Tensor, sent: Splits, received: Splits) -> Tensor:
        return super().back(super().back(y_SD, sent, received), sent, received)


class NeverSentBack(SplitExperts):
    def back(self, y_SD: Tensor, sent: Splits, received: Splits) -> Tensor:
        return y_SD


class WithoutWeights(SplitExperts):
    def combine(self, y_RD: Tensor, order_R: Tensor, weights_TK: Tensor) -> Tensor:
        y_TKD = torch.empty_like(y_RD)
        y_TKD[order_R] = y_RD
        return y_TKD.view(*weights_TK.shape, D).sum(1)


class WidthLeftOpen(SplitExperts):
    def combine(self, y_RD: Tensor, order_R: Tensor, weights_TK: Tensor) -> Tensor:
        y_TKD = torch.empty_like(y_RD)
        y_TKD[order_R] = y_RD
        return (y_TKD.view(*weights_TK.shape, -1) * weights_TK.unsqueeze(-1)).sum(1)


class TooFewExperts(SplitExperts):
    """One expert fewer on each rank than the counts say."""

    def experts(self, rows_SD: Tensor, local_S: Tensor, received_WL: Tensor) -> Tensor:
        hidden_SF = torch.bmm(self.gate_up[: L - 1][local_S], rows_SD.unsqueeze(2)).squeeze(2)
        gate_SF, up_SF = hidden_SF.chunk(2, dim=1)
        return torch.bmm(self.down[: L - 1][local_S], (gate_SF.sigmoid() * up_SF).unsqueeze(2)).squeeze(2)


class EndsOfRowsSent(Grouped):
    def exchange(self, sent_WL: Tensor) -> Tensor:
        self.sent_WL = sent_WL
        return super().exchange(sent_WL)

    def experts(self, rows_SD: Tensor, local_S: Tensor, received_WL: Tensor) -> Tensor:
        return super().experts(rows_SD, local_S, self.sent_WL)


class GroupedByRank(Grouped):
    def experts(self, rows_SD: Tensor, local_S: Tensor, received_WL: Tensor) -> Tensor:
        ends_L = received_WL.sum(0).cumsum(0).to(torch.int32)
        hidden_SF = torch._grouped_mm(rows_SD, self.gate_up.transpose(1, 2), ends_L)
        gate_SF, up_SF = hidden_SF.chunk(2, dim=1)
        return torch._grouped_mm(gate_SF.sigmoid() * up_SF, self.down.transpose(1, 2), ends_L)


class EndsOfAllCounts(Grouped):
    """Ends of the counts by rank, where those by expert are needed."""

    def experts(self, rows_SD: Tensor, local_S: Tensor, received_WL: Tensor) -> Tensor:
        return super().experts(rows_SD, local_S, received_WL[:1].expand(self.num_ranks, L))


class TokenOfAnotherCount(SplitExperts):
    """Rows are of token ``order // (K + 1)``."""

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, ids_TK = self.router(x_TD).softmax(-1).topk(K, dim=-1)
        flat_R = ids_TK.reshape(-1)
        order_R = self.order(flat_R)
        sent_WL = self.counts(flat_R)
        received_WL = self.exchange(sent_WL)
        sent, received = self.splits(sent_WL, received_WL)
        rows_SD = self.to_owners(x_TD[order_R // (K + 1)], received, sent)
        local_S = self.local_ids(flat_R[order_R], received_WL, received, sent)
        return self.combine(self.back(self.experts(rows_SD, local_S, received_WL), sent, received), order_R, weights_TK)
