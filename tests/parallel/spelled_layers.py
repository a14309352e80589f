"""Hand-written expert-parallel MoE layers: one written out, others that spell single steps in another way.

Axes: W ranks, L experts per rank, E = W*L, T tokens, K choices per token, R rows sent, S rows received, D model width,
F expert width.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

L, K, D, WIDTH = 3, 2, 16, 8
Splits: TypeAlias = list[int]


class SplitExperts(nn.Module):
    """Counts by bincount, ids of received rows from the counts, batched products, outputs put back by writes."""

    dtype = torch.float32

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.num_ranks = group.size()
        torch.manual_seed(0)  # the same router on all ranks
        self.router = nn.Linear(D, self.num_ranks * L, bias=False, dtype=self.dtype)
        torch.manual_seed(1 + group.rank())
        self.gate_up = nn.Parameter(torch.randn(L, 2 * WIDTH, D, dtype=self.dtype) / 4)
        self.down = nn.Parameter(torch.randn(L, D, WIDTH, dtype=self.dtype) / 3)

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, ids_TK = self.router(x_TD).softmax(-1).topk(K, dim=-1)
        flat_R = ids_TK.reshape(-1)
        order_R = self.order(flat_R)
        sent_WL = self.counts(flat_R)
        received_WL = self.exchange(sent_WL)
        sent, received = self.splits(sent_WL, received_WL)
        rows_SD = self.to_owners(x_TD[order_R // K], received, sent)
        local_S = self.local_ids(flat_R[order_R], received_WL, received, sent)
        y_SD = self.experts(rows_SD, local_S, received_WL)
        y_RD = self.back(y_SD, sent, received)
        return self.combine(y_RD, order_R, weights_TK)

    def order(self, flat_R: Tensor) -> Tensor:
        return flat_R.argsort(stable=True)

    def counts(self, flat_R: Tensor) -> Tensor:
        return torch.bincount(flat_R, minlength=self.num_ranks * L).view(self.num_ranks, L)

    def exchange(self, sent_WL: Tensor) -> Tensor:
        with torch.no_grad():
            return all_to_all_single(sent_WL, None, None, self.group)

    def splits(self, sent_WL: Tensor, received_WL: Tensor) -> tuple[Splits, Splits]:
        return sent_WL.sum(1).tolist(), received_WL.sum(1).tolist()

    def to_owners(self, rows_RD: Tensor, received: Splits, sent: Splits) -> Tensor:
        return all_to_all_single_autograd(rows_RD, received, sent, self.group)

    def back(self, y_SD: Tensor, sent: Splits, received: Splits) -> Tensor:
        return all_to_all_single_autograd(y_SD, sent, received, self.group)

    def local_ids(self, sorted_R: Tensor, received_WL: Tensor, received: Splits, sent: Splits) -> Tensor:
        experts_E = torch.arange(L).repeat(self.num_ranks)
        return experts_E.repeat_interleave(received_WL.reshape(-1), output_size=sum(received))

    def experts(self, rows_SD: Tensor, local_S: Tensor, received_WL: Tensor) -> Tensor:
        hidden_SF = torch.bmm(self.gate_up[local_S], rows_SD.unsqueeze(2)).squeeze(2)
        gate_SF, up_SF = hidden_SF.chunk(2, dim=1)
        return torch.bmm(self.down[local_S], (F.silu(gate_SF) * up_SF).unsqueeze(2)).squeeze(2)

    def combine(self, y_RD: Tensor, order_R: Tensor, weights_TK: Tensor) -> Tensor:
        y_TKD = torch.empty_like(y_RD)
        y_TKD[order_R] = y_RD
        return (y_TKD.view(*weights_TK.shape, D) * weights_TK.unsqueeze(-1)).sum(1)


class CountsByScatter(SplitExperts):
    """As transformers counts; both split sizes are read at once, the exchange writes to its output."""

    def counts(self, flat_R: Tensor) -> Tensor:
        zeros_E = torch.zeros(self.num_ranks * L, dtype=torch.long)
        return zeros_E.scatter_add_(0, flat_R, torch.ones_like(flat_R)).view(self.num_ranks, L)

    def exchange(self, sent_WL: Tensor) -> Tensor:
        received_WL = torch.empty_like(sent_WL)
        dist.all_to_all_single(received_WL, sent_WL, group=self.group)
        return received_WL

    def splits(self, sent_WL: Tensor, received_WL: Tensor) -> tuple[Splits, Splits]:
        sent, received = torch.stack([sent_WL.sum(1), received_WL.sum(1)]).tolist()
        return sent, received


class FlatCounts(SplitExperts):
    """As torchtitan exchanges counts: [E] at once, seen by rank afterwards."""

    def exchange(self, sent_WL: Tensor) -> Tensor:
        with torch.no_grad():
            received_E = all_to_all_single(sent_WL.reshape(-1), None, None, self.group)
            received_E = torch.ops._c10d_functional.wait_tensor(received_E)
            return received_E.view(self.num_ranks, -1)


class CountsOfAllExperts(SplitExperts):
    """The flat counts are exchanged before they are seen by rank, and come from histc."""

    def counts(self, flat_R: Tensor) -> Tensor:
        num_experts = self.num_ranks * L
        return torch.histc(flat_R.float(), bins=num_experts, min=0, max=num_experts - 1).long()

    def exchange(self, sent_WL: Tensor) -> Tensor:
        return all_to_all_single(sent_WL, [L] * self.num_ranks, [L] * self.num_ranks, self.group)

    def splits(self, sent_WL: Tensor, received_WL: Tensor) -> tuple[Splits, Splits]:
        return sent_WL.view(self.num_ranks, L).sum(1).tolist(), received_WL.view(self.num_ranks, L).sum(1).tolist()


class IdsSentAlong(SplitExperts):
    """The ids travel with the rows, and are made local by the first expert of the rank."""

    def local_ids(self, sorted_R: Tensor, received_WL: Tensor, received: Splits, sent: Splits) -> Tensor:
        ids_S = all_to_all_single(sorted_R, received, sent, self.group)
        return ids_S - L * self.group.rank()


class IdsModuloExperts(IdsSentAlong):
    def local_ids(self, sorted_R: Tensor, received_WL: Tensor, received: Splits, sent: Splits) -> Tensor:
        return all_to_all_single(sorted_R, received, sent, self.group) % L


class WeightsOfRows(SplitExperts):
    """Routing weights are multiplied in row by row, and the inverse permutation gathers."""

    def combine(self, y_RD: Tensor, order_R: Tensor, weights_TK: Tensor) -> Tensor:
        weighted_RD = y_RD * weights_TK.reshape(-1)[order_R].unsqueeze(1)
        return weighted_RD[order_R.argsort()].view(*weights_TK.shape, D).sum(1)


class RowsByExpert(SplitExperts):
    """Rows are permuted by expert and back around batched products."""

    def experts(self, rows_SD: Tensor, local_S: Tensor, received_WL: Tensor) -> Tensor:
        permutation_S = local_S.argsort(stable=True)
        y_SD = super().experts(rows_SD[permutation_S], local_S[permutation_S], received_WL)
        return y_SD[permutation_S.argsort()]


class Grouped(SplitExperts):
    """Grouped GEMMs over rows sorted by expert; bfloat16, the only dtype that torch's grouped GEMM has."""

    dtype = torch.bfloat16

    def experts(self, rows_SD: Tensor, local_S: Tensor, received_WL: Tensor) -> Tensor:
        permutation_S = local_S.argsort(stable=True)
        ends_L = received_WL.sum(0).cumsum(0).to(torch.int32)
        hidden_SF = torch._grouped_mm(rows_SD[permutation_S], self.gate_up.transpose(1, 2), ends_L)
        gate_SF, up_SF = hidden_SF.chunk(2, dim=1)
        sorted_SD = torch._grouped_mm(F.silu(gate_SF) * up_SF, self.down.transpose(1, 2), ends_L)
        y_SD = torch.empty_like(sorted_SD)
        y_SD[permutation_S] = sorted_SD
        return y_SD


SPELLINGS: tuple[type[SplitExperts], ...] = (
    SplitExperts,
    CountsByScatter,
    FlatCounts,
    CountsOfAllExperts,
    IdsSentAlong,
    IdsModuloExperts,
    WeightsOfRows,
    RowsByExpert,
)
