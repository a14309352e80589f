"""What can the matcher know about values of expert-parallel code? More meanings, as in ``values.py``.

Axes: W ranks of L experts each, T tokens, K choices per token, R rows that this rank sends, S rows that it receives.
"""

from __future__ import annotations

import dataclasses

from torch.fx import Node

from .values import ExpertOutput


@dataclasses.dataclass(frozen=True)
class RankCounts:
    """[W, L], or flat [W*L]: rows by rank and by expert of that rank.

    Attributes:
        ids: the [T, K] ids that are counted.
        exchange: None: rows that this rank sends. Else the all-to-all that brought the counts: rows that it receives,
            from rank w for its own expert l.
        group: name of the process group of ``exchange``.
    """

    ids: Node
    num_experts: int  # W*L
    num_ranks: int
    exchange: Node | None = None
    group: str | None = None
    flat: bool = False

    def as_table(self) -> RankCounts:
        return dataclasses.replace(self, flat=False)


@dataclasses.dataclass(frozen=True)
class RankTotals:
    """[W]: rows by rank, the sum of ``counts`` over the experts."""

    counts: RankCounts


@dataclasses.dataclass(frozen=True)
class StackedTotals:
    """[N, W]: several ``RankTotals`` in one tensor, to be read by the host at once."""

    parts: tuple[RankTotals, ...]


@dataclasses.dataclass(frozen=True)
class RankTotal:
    """One entry of ``RankTotals``, as a tensor without axes or as a number of the host."""

    counts: RankCounts
    rank: int


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """How rows came to this rank.

    ``counts``: the counts of the rows received. Received rows are first ordered by rank and, inside a rank, by expert;
    the ``order`` of such rows is ``counts.exchange``. ``sent_order``: the sort that ordered the rows when they left.
    """

    counts: RankCounts
    sent_order: Node


@dataclasses.dataclass(frozen=True)
class ReceivedIds:
    """[S]: the expert of each row received, counted from this rank's first expert if ``is_local``."""

    counts: RankCounts
    order: Node
    is_local: bool


@dataclasses.dataclass(frozen=True)
class ReceivedSort:
    """The (values, permutation) pair of sorting received ids."""

    ids: ReceivedIds
    sort: Node


@dataclasses.dataclass(frozen=True)
class ReceivedPermutation:
    """[S]: the place, as it was received, of each row in ``order``; or the inverse of that."""

    counts: RankCounts
    order: Node
    inverse: bool = False


@dataclasses.dataclass(frozen=True)
class ReceivedPerExpert:
    """[L]: rows received for each expert; or, with ``ends``, one past the last such row where they are sorted."""

    counts: RankCounts
    ends: bool = False


# ---- the choices of other ranks are marked, and every rank runs its own experts on all tokens


@dataclasses.dataclass(frozen=True)
class OwnersOfIds:
    """[T, K]: the rank that owns the expert of each choice, where each rank has ``num_local``."""

    ids: Node
    num_local: int


@dataclasses.dataclass(frozen=True)
class LocalIds:
    """[T, K]: each id counted from the first expert of its owner."""

    ids: Node
    num_local: int


@dataclasses.dataclass(frozen=True)
class ForeignMask:
    """[T, K]: True where another rank than ``rank`` owns the expert."""

    ids: Node
    num_local: int
    rank: int


@dataclasses.dataclass(frozen=True)
class OwnIds:
    """[T, K]: local ids of this rank's experts; ``num_local``, which is no expert, where ``mask`` is True."""

    mask: ForeignMask


@dataclasses.dataclass(frozen=True)
class OwnWeights:
    """[T, K]: routing weights, 0 where ``mask`` is True."""

    weights: Node
    mask: ForeignMask


@dataclasses.dataclass(frozen=True)
class ForeignRows:
    """[R] or [R, 1]: ``mask`` for each routed row in ``order``."""

    mask: ForeignMask
    order: Node | None


@dataclasses.dataclass(frozen=True)
class PendingSum:
    """[T, D]: weighted sums of this rank's experts, on their way to being summed over the ranks of ``group``."""

    output: ExpertOutput
    group: str
