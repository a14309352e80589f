"""How do the rows of tokens reach the ranks that own their experts, and how do results come back and add up?

Wire format: one row per (token, choice), grouped by the rank that owns the expert, in choice order. Sums are in the
order that ``perseus::experts_parallel`` promises, so no reduction of a communication library is used: its order of
terms depends on message sizes and topology.

Axes: T tokens, K choices per token, R routed rows that this rank sends, S rows that it receives, D model width.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from perseus_compile.comm.group import RankGroup
from perseus_compile.grouped import sum_dtype


@dataclasses.dataclass(frozen=True)
class Choices:
    """The choices of this rank's tokens by owner.

    ``owners_TK`` is the owning rank, or the number of ranks where the id names no expert. ``sent_R``: flat index
    ``t*K + k`` of each row that is sent; ``num_sent``: rows for each rank.
    """

    owners_TK: Tensor
    sent_R: Tensor
    num_sent: list[int]

    def of_rank(self, rank: int) -> Tensor:
        """Flat indices of the choices of one rank's experts, in choice order."""
        start = sum(self.num_sent[:rank])
        return self.sent_R[start : start + self.num_sent[rank]]


def by_owner(ids_TK: Tensor, num_local: int, num_ranks: int) -> Choices:
    """Groups choices by the rank that owns their expert; rank r owns the ids from ``r * num_local`` on."""
    owners_TK = ids_TK.div(num_local, rounding_mode="floor")
    owners_TK = owners_TK.masked_fill((ids_TK < 0) | (owners_TK >= num_ranks), num_ranks)
    num_sent = owners_TK.reshape(-1).bincount(minlength=num_ranks + 1)[:num_ranks].tolist()
    sent_R = owners_TK.reshape(-1).argsort(stable=True)[: sum(num_sent)]
    return Choices(owners_TK, sent_R, num_sent)


@dataclasses.dataclass(frozen=True)
class Route:
    """How many rows go to and come from each rank of ``group`` in one call."""

    group: RankGroup
    num_sent: list[int]
    num_received: list[int]

    def to_owners(self, rows_R: Tensor) -> Tensor:
        """Sends each row to its owner; the rows received, [S, ...], by sending rank."""
        return self._all_to_all(rows_R, self.num_sent, self.num_received)

    def back(self, rows_S: Tensor) -> Tensor:
        """Sends a result for each row received to where the row came from; [R, ...], in the order of sending."""
        return self._all_to_all(rows_S, self.num_received, self.num_sent)

    def _all_to_all(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        collectives = torch.ops._c10d_functional
        pending = collectives.all_to_all_single(rows.contiguous(), received, sent, self.group.name)
        return collectives.wait_tensor(pending)


def sum_by_token(rows_RD: Tensor, choices_R: Tensor, owners_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Sum of each token's rows, times their weights if given, over the choices of each rank, then over the ranks.

    Args:
        rows_RD: the rows; choices that have none add nothing.
        choices_R: the flat index ``t*K + k`` of each row.
        owners_TK: the rank that owns the expert of each choice.
        weights_TK: routing weights; where there is no row, they may be anything, NaN included.

    Returns:
        [T, D], in float32 (float64 for float64 rows).
    """
    num_tokens, num_choices = owners_TK.shape
    total_dtype = sum_dtype(rows_RD.dtype)
    grid = rows_RD.new_zeros(num_tokens * num_choices, rows_RD.shape[1]).index_copy_(0, choices_R, rows_RD)
    if weights_TK is not None:
        has_row = torch.zeros(num_tokens * num_choices, dtype=torch.bool, device=grid.device)
        has_row[choices_R] = True
        weights_column = weights_TK.reshape(-1, 1).masked_fill(~has_row.unsqueeze(1), 0).to(total_dtype)
    owners_TK, order_TK = owners_TK.sort(dim=1, stable=True)
    first_choice_T = torch.arange(num_tokens, device=grid.device) * num_choices
    total_TD = torch.zeros(num_tokens, grid.shape[1], dtype=total_dtype, device=grid.device)
    partial_TD = torch.zeros_like(total_TD)  # of the rank whose choices are being added
    for position in range(num_choices):
        choice_T = first_choice_T + order_TK[:, position]
        term_TD = grid.index_select(0, choice_T).to(total_dtype)
        if weights_TK is not None:
            term_TD = term_TD * weights_column.index_select(0, choice_T)
        if position:
            begins_rank_T1 = (owners_TK[:, position] != owners_TK[:, position - 1]).unsqueeze(1)
            total_TD = torch.where(begins_rank_T1, total_TD + partial_TD, total_TD)
            partial_TD = torch.where(begins_rank_T1, term_TD, partial_TD + term_TD)
        else:
            partial_TD = term_TD
    return total_TD + partial_TD


def sum_over_ranks(group: RankGroup, partial_TD: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of all ranks' partials in rank order, rounded to ``dtype`` once; the same bits on every rank.

    Every rank adds up a slice of the tokens and all gather the slices, so that it moves what an all-reduce moves.
    """
    num_tokens = partial_TD.shape[0]
    slice_length = -(-num_tokens // group.size)
    padded_TD = partial_TD.new_zeros(slice_length * group.size, *partial_TD.shape[1:])
    padded_TD[:num_tokens] = partial_TD
    route = Route(group, [slice_length] * group.size, [slice_length] * group.size)
    by_rank = route.to_owners(padded_TD).view(group.size, slice_length, *partial_TD.shape[1:])
    total = by_rank[0].clone()
    for rank in range(1, group.size):
        total += by_rank[rank]
    collectives = torch.ops._c10d_functional
    gathered = collectives.all_gather_into_tensor(total.to(dtype), group.size, group.name)
    return collectives.wait_tensor(gathered)[:num_tokens]
