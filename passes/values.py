"""What can the matcher know about a value? The small set of meanings that rules derive, one dataclass each.

A value is known exactly or not at all: a node without a meaning here stops the match. Nodes inside meanings are nodes
of the ATen view. Axes: T tokens, K choices per token, R = T*K routed rows, E experts, D model width, F expert width.

Row order: routed rows are either in choice order (row ``t*K + k``), written as ``order=None``, or permuted by one
``aten.sort``/``aten.argsort`` of the flat expert ids, written as that node, so that two sorts are never mixed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch.fx import Node

if TYPE_CHECKING:
    from .loop_values import LoopValue
    from .parallel_values import (
        Dispatch,
        ForeignMask,
        ForeignRows,
        LocalIds,
        OwnersOfIds,
        OwnIds,
        OwnWeights,
        PendingSum,
        RankCounts,
        RankTotal,
        RankTotals,
        ReceivedIds,
        ReceivedPerExpert,
        ReceivedPermutation,
        ReceivedSort,
        StackedTotals,
    )

RowOrder: TypeAlias = "Node | None"
# Elementwise expressions over one row of an expert's inner values: ("silu", x), ("mul", a, b); the leaves are HALVES
# and Numbers.
Expression: TypeAlias = "tuple[Any, ...] | str | Number | None"
HALVES = ("first", "second", "even", "odd", "all")


@dataclasses.dataclass(frozen=True)
class Number:
    """A constant of the graph. ``symbol`` is set where Dynamo made it an input; using it then takes a guard."""

    value: float
    symbol: torch.SymFloat | torch.SymInt | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class PerChoice:
    """[R] (or [R, 1]): an entry of a [T, K] tensor, ``of``, for each routed row."""

    of: Node
    order: RowOrder
    column: bool = False  # True: [R, 1], ready to multiply rows


@dataclasses.dataclass(frozen=True)
class NeverTrue:
    """A mask that is known to be False everywhere."""


@dataclasses.dataclass(frozen=True)
class SortResult:
    """The (values, permutation) pair of sorting flat ``ids``."""

    ids: Node
    sort: Node


@dataclasses.dataclass(frozen=True)
class Permutation:
    """[R]: flat choice index ``t*K + k`` of each row in ``order``."""

    order: Node


@dataclasses.dataclass(frozen=True)
class InversePermutation:
    """[R]: row in ``order`` of each flat choice."""

    order: Node


@dataclasses.dataclass(frozen=True)
class RowToken:
    """[R]: token index ``t`` of each row in ``order``."""

    order: RowOrder
    top_k: int


@dataclasses.dataclass(frozen=True)
class ExpertCounts:
    """[E]: how many entries of the [T, K] tensor ``ids`` name each expert 0 .. E-1."""

    ids: Node
    num_experts: int


@dataclasses.dataclass(frozen=True)
class ExpertEnds:
    """[E]: one past the last sorted row of each expert (the cumulative sum of the counts)."""

    ids: Node
    num_experts: int


@dataclasses.dataclass(frozen=True)
class SwappedMatrix:
    """[E, b, a]: a stacked weight [E, a, b] seen with its two last axes exchanged."""

    of: Node


@dataclasses.dataclass(frozen=True)
class SelectedByExpert:
    """[R, ...]: an entry of a stacked parameter, ``of`` [E, ...], for the expert of each row."""

    of: Node
    ids: Node
    order: RowOrder


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """[R, D]: the token of each routed row. ``unit_axis``: where a unit axis was inserted, for batched products.

    ``dispatch``: set where the rows are not this rank's choices but those that all ranks sent to it.
    """

    x: Node
    order: RowOrder
    top_k: int
    unit_axis: Literal[1, 2, None] = None
    dispatch: Dispatch | None = None


@dataclasses.dataclass(frozen=True)
class ExpertLinear:
    """One linear map with per-expert weights.

    ``transposed``: a view of the weight in the other layout, if the graph holds one.
    """

    weight: Node
    layout: Literal["out_in", "in_out"]
    bias: Node | None = None
    transposed: Node | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class Hidden:
    """[R, 2F], or [R, F] without a gate: the first expert linear applied to token rows."""

    rows: TokenRows
    ids: Node
    gate_up: ExpertLinear
    unit_axis: Literal[1, 2, None] = None


@dataclasses.dataclass(frozen=True)
class HiddenHalves:
    """The pair that ``chunk`` makes of a ``Hidden``."""

    hidden: Hidden


@dataclasses.dataclass(frozen=True)
class Gated:
    """[R, F]: an elementwise expression over the two halves of a ``Hidden``, or over all of it.

    Its dtype may be wider than that of the tokens; it is theirs again before the second linear.
    """

    hidden: Hidden
    expression: Expression
    unit_axis: Literal[1, 2, None] = None


@dataclasses.dataclass(frozen=True)
class ExpertOutput:
    """[R, D]: the second expert linear, and the routing weight once it has been multiplied in."""

    hidden: Hidden
    expression: Expression
    down: ExpertLinear
    order: RowOrder
    weights: Node | None = None
    unit_axis: Literal[1, 2, None] = None


@dataclasses.dataclass(frozen=True)
class UnweightedGrid:
    """[T, K, D]: expert outputs in choice order, before the routing weights."""

    output: ExpertOutput


@dataclasses.dataclass(frozen=True)
class ChoiceGrid:
    """[T, K, D]: weighted expert outputs in choice order."""

    output: ExpertOutput


@dataclasses.dataclass(frozen=True)
class Combined:
    """[T, D]: the sum over the choices; the whole MoE layer without its router.

    ``group``: set where it is the sum over the ranks of this process group, too.
    """

    output: ExpertOutput
    group: str | None = None


# ---- router ----


@dataclasses.dataclass(frozen=True)
class Logits:
    """[T, E]: a linear map of x [T, D], computed in ``dtype`` (x and weight are cast to it first).

    ``cast``: the dtype that the logits are cast to afterwards.
    """

    x: Node
    weight: Node
    bias: Node | None
    dtype: torch.dtype
    cast: torch.dtype | None = None


@dataclasses.dataclass(frozen=True)
class Scores:
    """[T, E]: softmax over the experts, or sigmoid, of logits."""

    kind: Literal["softmax", "sigmoid"]
    logits: Logits
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class ChoiceScores:
    """[T, E]: what the choice is made on: scores, plus a correction bias, limited to the best groups."""

    scores: Scores
    bias: Node | None = None
    num_groups: int = 1
    topk_groups: int = 1


@dataclasses.dataclass(frozen=True)
class GroupView:
    """[T, G, E/G]: choice scores seen by group."""

    scores: ChoiceScores
    num_groups: int


@dataclasses.dataclass(frozen=True)
class GroupTopK:
    """[T, G, k]: the k best scores of each group (with their ids, before they are told apart)."""

    view: GroupView
    k: int


@dataclasses.dataclass(frozen=True)
class GroupScores:
    """[T, G]: the sum of the two best choice scores of each group."""

    view: GroupView


@dataclasses.dataclass(frozen=True)
class GroupMask:
    """1 where a group (or, once spread over the experts, an expert's group) is among the best, else 0.

    ``shape``: groups [T, G], column [T, G, 1], spread [T, G, E/G], experts [T, E]; ``inverted``: True means not chosen.
    """

    scores: GroupScores
    topk_groups: int
    shape: Literal["groups", "column", "spread", "experts"]
    inverted: bool = False


@dataclasses.dataclass(frozen=True)
class TopK:
    """The (values, ids) pair of the top-k of ``of`` over its last axis."""

    of: Logits | Scores | ChoiceScores | GroupScores
    k: int
    node: Node


@dataclasses.dataclass(frozen=True)
class ChosenIds:
    """[T, K]: the chosen experts."""

    topk: TopK


@dataclasses.dataclass(frozen=True)
class ChosenScores:
    """[T, K]: the scores of the chosen experts on their way to being weights.

    The order of steps is fixed: renormalise, cast, scale. A step out of order has no meaning here.
    """

    topk: TopK
    softmax_dtype: torch.dtype | None = None  # set: softmax over the K chosen logits was applied, in this dtype
    renormalized: bool = False
    epsilon: Number | None = None
    cast: torch.dtype | None = None
    scale: Number | None = None


@dataclasses.dataclass(frozen=True)
class ChosenSum:
    """[T, 1]: the sum of chosen scores (+ eps), the divisor of renormalising."""

    scores: ChosenScores
    epsilon: Number | None = None


Value: TypeAlias = (
    "PerChoice | NeverTrue | SortResult | Permutation | InversePermutation | RowToken | ExpertCounts | ExpertEnds"
    " | SwappedMatrix | SelectedByExpert | TokenRows | Hidden | HiddenHalves | Gated | ExpertOutput | ChoiceGrid"
    " | Combined | Logits | Scores | ChoiceScores | GroupView | GroupTopK | GroupScores | GroupMask | TopK | ChosenIds"
    " | ChosenScores | ChosenSum | RankCounts | RankTotals | StackedTotals | RankTotal | ReceivedIds | ReceivedSort"
    " | ReceivedPermutation | ReceivedPerExpert | UnweightedGrid | PendingSum | OwnersOfIds | LocalIds"
    " | ForeignMask | OwnIds | OwnWeights | ForeignRows | LoopValue"
)

# The values that exist only inside an expert: a user outside the match keeps the whole layer alive, so it is refused.
INNER_VALUES = (TokenRows, Hidden, HiddenHalves, Gated, ExpertOutput, UnweightedGrid, ChoiceGrid)
