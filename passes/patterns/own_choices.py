"""Every rank runs its own experts on all tokens: the choices of other ranks get an id that is no expert, and weight 0.

Rows of those choices go through the experts, or not, and are masked here and there. None of that matters: their weight
is 0. So masks of such rows read as nothing, and the match demands that the weights of the same choices are 0.

Axes: L experts per rank, T tokens, K choices per token, R routed rows.
"""

from __future__ import annotations

from torch.fx import Node

from ..in_place import functional_form
from ..interpret import Reader, aten
from ..parallel_values import ForeignMask, ForeignRows, LocalIds, OwnersOfIds, OwnIds, OwnWeights, PendingSum
from ..rule import Rule, Spelling
from ..values import (
    INNER_VALUES,
    Combined,
    ExpertOutput,
    Gated,
    Hidden,
    HiddenHalves,
    PerChoice,
    RowOrder,
    TokenRows,
    Value,
)
from .all_to_all import WAIT_OPS, collective


def _are_ids(read: Reader, node: object) -> bool:
    return isinstance(node, Node) and read.dim(node) == 2 and not read.dtype(node).is_floating_point


def _owners(read: Reader, node: Node) -> Value | None:
    """ids // L."""
    ids, num_local = node.args[:2]
    if not _are_ids(read, ids) or not isinstance(num_local, int):
        return None
    if functional_form(node) is aten.div.Tensor_mode and node.kwargs.get("rounding_mode") != "floor":
        return None
    return OwnersOfIds(read.root(ids), num_local)


def _local_ids(read: Reader, node: Node) -> Value | None:
    """ids % L."""
    ids, num_local = node.args[:2]
    return LocalIds(read.root(ids), num_local) if _are_ids(read, ids) and isinstance(num_local, int) else None


def _foreign(read: Reader, node: Node) -> Value | None:
    """ids // L != rank."""
    owners, rank = read.value(node.args[0]), node.args[1]
    if not isinstance(owners, OwnersOfIds) or not isinstance(rank, int):
        return None
    return ForeignMask(owners.ids, owners.num_local, rank)


def _mark(read: Reader, node: Node) -> Value | str | None:
    """where(foreign, L, ids % L), or the same by masked_fill."""
    mask, mark, local = node.args[:3]
    if functional_form(node) is aten.masked_fill.Scalar:
        local, mask, mark = node.args[:3]
    foreign, ids = read.value(mask), read.value(local)
    if not isinstance(foreign, ForeignMask) or not isinstance(ids, LocalIds):
        return None
    if (foreign.ids, foreign.num_local) != (ids.ids, ids.num_local):
        return f"{read.describe(node)} marks the choices of other ranks by other ids than those that it makes local"
    if mark != ids.num_local:
        return f"{read.describe(node)} must mark the choices of other ranks by {ids.num_local}, got {mark}"
    return OwnIds(foreign)


def _weigh_nothing(read: Reader, node: Node) -> Value | str | None:
    """weights.masked_fill(foreign, 0)."""
    weights, mask, value = node.args[:3]
    foreign = read.value(mask)
    if not isinstance(foreign, ForeignMask) or not read.dtype(weights).is_floating_point:
        return None
    if value != 0:
        return f"{read.describe(node)} must give the choices of other ranks the weight 0, got {value}"
    return OwnWeights(read.root(weights), foreign)


def _mask_of(read: Reader, value: Value | None) -> ForeignMask | None:
    ids = read.value(value.of) if isinstance(value, PerChoice) else None
    return ids.mask if isinstance(ids, OwnIds) else None


def _foreign_rows(read: Reader, node: Node) -> Value | None:
    """ids >= L, for rows."""
    ids = read.value(node.args[0])
    mask = _mask_of(read, ids)
    if mask is None or not isinstance(ids, PerChoice) or node.args[1] != mask.num_local:
        return None
    return ForeignRows(mask, ids.order)


def _still_foreign_rows(read: Reader, node: Node) -> Value | None:
    value = read.value(node.args[0])
    return value if isinstance(value, ForeignRows) else None


def _clamp(read: Reader, node: Node) -> Value | None:
    """Marked ids become those of some expert; the weight of the choice is 0."""
    ids = read.value(node.args[0])
    mask = _mask_of(read, ids)
    low, high = read.arguments(node, None, None, None)[1:3]
    if functional_form(node) is aten.clamp_max.default:
        low, high = None, node.args[1]
    low, high = node.kwargs.get("min", low), node.kwargs.get("max", high)
    if mask is None or (low is not None and low > 0) or high != mask.num_local - 1:
        return None
    return ids


def _masked(read: Reader, node: Node) -> Value | str | None:
    """Rows, or row weights, of other ranks' choices become 0."""
    masked, (mask, value) = read.value(node.args[0]), node.args[1:3]
    foreign = read.value(mask)
    if not isinstance(foreign, ForeignRows) or not isinstance(masked, (PerChoice, *INNER_VALUES)):
        return None
    if value != 0 or _order(masked) is not foreign.order:
        return f"{read.describe(node)} must set the rows of other ranks' choices to 0, in the order of the rows"
    return masked


def _order(value: Value) -> RowOrder:
    if isinstance(value, (PerChoice, TokenRows, ExpertOutput)):
        return value.order
    if isinstance(value, (Gated, HiddenHalves)):
        value = value.hidden
    return value.rows.order if isinstance(value, Hidden) else None


def _sum_over_ranks(read: Reader, node: Node) -> Value | str | None:
    """all_reduce of the sums of this rank's experts.

    Where gradients flow, it stays: code differs in what it takes for the gradient of a sum over ranks.
    """
    partial, operation, group = node.args
    value = read.value(partial)
    if not isinstance(value, Combined) or not isinstance(read.value(value.output.hidden.ids), OwnIds):
        return None
    if read.records_gradients(node):
        return None
    if operation != "sum" or value.group is not None:
        return f"{read.describe(node)} must add up the outputs of all ranks once, got {operation!r}"
    return PendingSum(value.output, str(group))


def _arrived(read: Reader, node: Node) -> Value | None:
    pending = read.value(node.args[0])
    return Combined(pending.output, pending.group) if isinstance(pending, PendingSum) else None


OWN_CHOICES = Spelling(
    name="own_choices",
    part="routed rows",
    chain=(
        "ids // L != rank, where(foreign, L, ids % L), weights.masked_fill(foreign, 0), "
        "[ids >= L, clamp of ids, masked_fill of rows, outputs and weights], experts, all_reduce"
    ),
    rules=(
        Rule("owners of ids", (aten.floor_divide.default, aten.div.Tensor_mode), _owners),
        Rule("ids of owners", (aten.remainder.Scalar,), _local_ids),
        Rule("choices of other ranks", (aten.ne.Scalar,), _foreign),
        Rule("marked choices", (aten.where.ScalarSelf, aten.masked_fill.Scalar), _mark),
        Rule("weights of own choices", (aten.masked_fill.Scalar,), _weigh_nothing),
        Rule("rows of other ranks", (aten.ge.Scalar, aten.eq.Scalar), _foreign_rows),
        Rule(
            "rows of other ranks as a column",
            (aten.unsqueeze.default, aten.view.default, aten.reshape.default),
            _still_foreign_rows,
        ),
        Rule("marked ids as ids", (aten.clamp.default, aten.clamp_max.default), _clamp),
        Rule("mask of rows of other ranks", (aten.masked_fill.Scalar,), _masked),
        Rule("sum over ranks", collective("all_reduce"), _sum_over_ranks),
        Rule("arrival of the sum over ranks", WAIT_OPS, _arrived),
    ),
    source="transformers' expert-parallel plan on tokens that all ranks hold",
)
