"""What can the matcher know about a value of code that runs its experts one by one? As in ``values``.

Axes: T tokens, K choices per token, E experts, D model width, N rows of one expert.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

from torch.fx import Node

from .values import ExpertLinear, Expression

Axis: TypeAlias = Literal["token", "choice", "expert"]


@dataclasses.dataclass(frozen=True)
class Zeros:
    """A floating-point tensor of zeros. ``is_empty``: it holds anything, until it is written to."""

    is_empty: bool = False


@dataclasses.dataclass(frozen=True)
class OneHot:
    """1 (or True) where a choice names an expert, else 0: [T, K, E] with its axes in any order.

    Without the axis of the choices: not 0 where any choice of the token names the expert.
    """

    ids: Node
    num_experts: int
    axes: tuple[Axis, ...]


@dataclasses.dataclass(frozen=True)
class ExpertMask:
    """The part of a ``OneHot`` that belongs to one expert."""

    ids: Node
    expert: int
    axes: tuple[Axis, ...]


@dataclasses.dataclass(frozen=True)
class Hits:
    """The places at which ``mask`` is not 0: a tuple with the indices along each axis, or one [N, axes] table."""

    mask: ExpertMask
    table: bool


@dataclasses.dataclass(frozen=True)
class HitIndex:
    """[N]: the token, or the choice, of each place at which ``mask`` is not 0, in the order of its elements."""

    mask: ExpertMask
    axis: Axis


@dataclasses.dataclass(frozen=True)
class HitRows:
    """[N, D]: the tokens of those places. ``leading``: [1, N, D]."""

    x: Node
    mask: ExpertMask
    leading: bool = False


@dataclasses.dataclass(frozen=True)
class HitWeights:
    """[N] (or [N, 1]): the routing weights of those places; where the mask has tokens alone, the sum of a token's."""

    weights: Node
    mask: ExpertMask
    column: bool


@dataclasses.dataclass(frozen=True)
class MaskedWeights:
    """The routing weights where ``mask`` is True, else 0; its axes are those of the mask."""

    weights: Node
    mask: ExpertMask | OneHot


@dataclasses.dataclass(frozen=True)
class DenseWeights:
    """[T, E], or [E, T]: the sum of a token's routing weights that name an expert, 0 where it is not chosen.

    ``column``: with a unit axis behind.
    """

    weights: Node
    ids: Node
    num_experts: int
    axes: tuple[Axis, ...]
    column: bool = False


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """[T] (or [T, 1]): the ``DenseWeights`` of one expert."""

    weights: Node
    ids: Node
    expert: int
    column: bool


@dataclasses.dataclass(frozen=True)
class ExpertBody:
    """What one expert computes from its rows: the outputs of ``down`` on ``expression``.

    Leaves of the expression are (number of a linear map, half of its output). ``rows``: what each first linear map
    reads, in the order of ``first``.
    """

    rows: tuple[Node, ...]
    first: tuple[ExpertLinear, ...]
    expression: Expression
    down: ExpertLinear


@dataclasses.dataclass(frozen=True)
class ExpertTerm:
    """[N, D] for the places of ``mask``, or [T, D] where it is None: what one expert adds to the sums of its tokens."""

    body: ExpertBody
    ids: Node
    expert: int
    mask: ExpertMask | None
    weights: Node | None  # None: every weight is 1


@dataclasses.dataclass(frozen=True)
class ExpertSum:
    """[T, D]: ``term`` added to what the node ``previous`` holds, a sum or a first term, or to nothing.

    ``is_empty``: tokens of no expert hold anything. Each token is then written once, by the term of its expert.
    ``replaces``: the term is not added to what its tokens held, but replaces it.
    """

    previous: Node | None
    term: ExpertTerm | None
    is_empty: bool = False
    replaces: bool = False


@dataclasses.dataclass(frozen=True)
class SumAtHits:
    """[N, D]: the sums of the tokens of ``mask``, as the node ``total`` holds them, and what is added to them."""

    total: Node
    mask: ExpertMask
    term: ExpertTerm | None = None

    def as_rows(self) -> HitRows | None:
        """The sums as the tokens of another layer, which they may be too."""
        return HitRows(self.total, self.mask) if self.term is None else None


@dataclasses.dataclass(frozen=True)
class DenseTerm:
    """[T, E, D], or [E, T, D], as the axes of ``weights`` say: the outputs of all experts on all tokens, weighted.

    ``bodies``: of each expert, or one with stacked weights for all.
    """

    bodies: tuple[ExpertBody, ...]
    weights: DenseWeights


@dataclasses.dataclass(frozen=True)
class DenseSum:
    """[T, D]: the sum of a ``DenseTerm`` over the experts."""

    bodies: tuple[ExpertBody, ...]
    weights: DenseWeights


LoopValue: TypeAlias = (
    "Zeros | OneHot | ExpertMask | Hits | HitIndex | HitRows | HitWeights | MaskedWeights | DenseWeights"
    " | ExpertWeights | ExpertTerm | ExpertSum | SumAtHits | DenseTerm | DenseSum"
)
