"""Clamps and masks of expert ids that change nothing, since the ids are known to lie in [0, E).

Code that can also run expert-parallel marks the choices of other ranks by ids from E on, and writes these steps always.
Where the ids may be out of range, the steps have a meaning that no rule reads, and the layer is refused.
"""

from __future__ import annotations

from torch.fx import Node

from ..id_bound import id_bound
from ..interpret import Reader, aten
from ..rule import Rule, Spelling
from ..values import INNER_VALUES, NeverTrue, PerChoice, Value


def _clamp(read: Reader, node: Node) -> Value | str | None:
    ids = read.value(node.args[0])
    if not isinstance(ids, PerChoice) or read.dtype(ids.of).is_floating_point:
        return None
    low, high = read.arguments(node, None, None, None)[1:3]
    low, high = node.kwargs.get("min", low), node.kwargs.get("max", high)
    bound = id_bound(read, ids.of)
    if bound is not None and (low is None or low <= 0) and (high is None or high >= bound - 1):
        return ids
    known = "ids of unknown range" if bound is None else f"ids in [0, {bound})"
    return f"{read.describe(node)} must leave expert ids as they are, got a clamp of {known} to [{low}, {high}]"


def _out_of_range(read: Reader, node: Node) -> Value | None:
    """ids >= n, for ids that are known to be less."""
    ids, limit = read.value(node.args[0]), node.args[1]
    if not isinstance(ids, PerChoice) or read.dtype(ids.of).is_floating_point or not isinstance(limit, int):
        return None
    bound = id_bound(read, ids.of)
    return NeverTrue() if bound is not None and limit >= bound else None


def _still_never_true(read: Reader, node: Node) -> Value | None:
    value = read.value(node.args[0])
    return value if isinstance(value, NeverTrue) else None


def _masked_nowhere(read: Reader, node: Node) -> Value | str | None:
    """masked_fill of rows under a mask that is False everywhere."""
    rows = read.value(node.args[0])
    if not isinstance(rows, INNER_VALUES):
        return None
    if isinstance(read.value(node.args[1]), NeverTrue):
        return rows
    return f"{read.describe(node)} masks rows, and the mask is not known to be False for all ids of a top-k"


SENTINELS = Spelling(
    name="sentinels",
    part="routed rows",
    chain="[clamp of ids], [ids >= E, masked_fill of rows and outputs], all without effect",
    rules=(
        Rule("clamp of ids", (aten.clamp.default, aten.clamp_max.default), _clamp),
        Rule("ids out of range", (aten.ge.Scalar,), _out_of_range),
        Rule("mask by row", (aten.unsqueeze.default, aten.view.default, aten.reshape.default), _still_never_true),
        Rule("mask without effect", (aten.masked_fill.Scalar,), _masked_nowhere),
    ),
    source="transformers 5.17 grouped_mm and batched_mm experts",
)
