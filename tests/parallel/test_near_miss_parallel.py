"""Is what is nearly expert parallelism refused, with the sentence that says why?

Matching needs no other rank: a group of torch's "fake" backend stands for two ranks, this process for the first.
"""

from __future__ import annotations

import near_miss_layers as near
import pytest
import torch
import torch.distributed as dist
from matching import found_in, reason_of
from spelled_layers import SPELLINGS, D, Grouped, SplitExperts

from perseus_compile.facts import MoEMatch

NEAR_MISSES: dict[type[SplitExperts], str] = {
    near.BackInAnotherGroup: "runs in group '1', but the counts were exchanged in group '0'",
    near.CountsInAnotherGroup: "runs in group '0', but the counts were exchanged in group '1'",
    near.SwappedSplits: "has the split sizes of what it sends and of what it receives swapped",
    near.SwappedSplitsBack: "are not those of rows that go back from the owners of the experts",
    near.ReversedSplits: "are not those of rows that go to the owners of the experts",
    near.EqualSplits: "must be sums by rank of counts of the expert ids that the ranks exchanged; equal splits of",
    near.CountsOfOtherIds: "must be sums by rank of counts of the expert ids that the ranks exchanged",
    near.RowsInChoiceOrder: "multiplies selected expert weights by rows that are not gathered tokens",
    near.DescendingOrder: "aten.argsort.stable must sort expert ids in ascending order",
    near.SortedAgain: "aten.index_put_.default must undo the permutation that ordered the rows",
    near.NotPutBack: "must send expert outputs in the order in which their rows were received",
    near.IdsNotReordered: "multiplies rows by weights of experts in another row order",
    near.OffsetOfNextRank: "aten.sub.Tensor must subtract the first expert of rank 0, 0, got 3",
    near.ModuloAnotherNumber: "aten.remainder.Scalar must take ids modulo the 3 experts of each rank, got 2",
    near.GlobalIds: "aten.index.Tensor must select from the 3 experts of this rank by local ids",
    near.RanksForExperts: "aten.repeat_interleave.self_Tensor must repeat the local experts 0 .. 2, once per rank",
    near.WeightsTravel: "aten.mul.Tensor has no meaning between the expert linears and the sum over choices",
    near.ScaledOnArrival: "multiplies selected expert weights by rows that are not gathered tokens",
    near.ReadOnArrival: "aten.squeeze.dim inside it is also read by aten.abs.default",
    near.SentBackTwice: "sends expert outputs that were sent back already",
    near.NeverSentBack: "aten.index_put_.default must undo the permutation that ordered the rows",
    near.WithoutWeights: "aten.sum.dim_IntList sums expert outputs before the routing weight is multiplied in",
    near.WidthLeftOpen: "; write the width and not -1",
    near.TooFewExperts: "aten.index.Tensor must select from the 3 experts of this rank by local ids",
    near.EndsOfRowsSent: "aten._grouped_mm.default are not the cumulative counts of the expert ids",
    near.GroupedByRank: "aten._grouped_mm.default are ordered by the rank that sent them, not by expert",
    near.EndsOfAllCounts: "aten._grouped_mm.default are not the cumulative counts of the expert ids",
    near.TokenOfAnotherCount: "aten.floor_divide.default must divide by the 2 choices per token, got 3",
}


@pytest.mark.parametrize("kind", NEAR_MISSES, ids=lambda kind: kind.__name__)
def test_near_miss(group: dist.ProcessGroup, kind: type[SplitExperts]) -> None:
    assert NEAR_MISSES[kind] in reason_of(found_in(kind(group), torch.randn(6, D, dtype=kind.dtype)))


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 6])
@pytest.mark.parametrize("kind", [*SPELLINGS, Grouped])
def test_all_token_counts_are_matched_alike(
    group: dist.ProcessGroup, kind: type[SplitExperts], num_tokens: int
) -> None:
    """Ranks have different token counts and compile apart: one that keeps its own code would wait for the others."""
    (match,) = found_in(kind(group), torch.randn(num_tokens, D, dtype=kind.dtype))
    assert isinstance(match, MoEMatch)
    assert match.parallel is not None and match.parallel.group_name == group.group_name
    assert (match.spec.num_experts, match.spec.expert_offset) == (6, 0)
