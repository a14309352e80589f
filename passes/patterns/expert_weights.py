"""What does each expert's output count in each token's sum? Routing weights by expert, and as columns beside rows."""

from __future__ import annotations

import dataclasses

from torch.fx import Node

from ..in_place import functional_form
from ..interpret import CASTS, Reader, aten
from ..loop_values import DenseWeights, ExpertMask, ExpertWeights, HitWeights, MaskedWeights, OneHot, Zeros
from ..rule import Rule, Spelling
from ..values import Value
from .expert_hits import AXES_OF_IDS, axes_of_ids, before_unit_axis, has_distinct_experts


def _slice_of_one_expert(read: Reader, node: Node) -> Value | None:
    """dense_weights[:, e : e + 1]."""
    source, axis, start, end, step = read.arguments(node, None, 0, None, None, 1)
    value = read.value(source)
    if not isinstance(value, DenseWeights) or value.column or value.axes != ("token", "expert"):
        return None
    if read.axis(source, axis) != 1 or step != 1 or not isinstance(start, int) or end != start + 1 or start < 0:
        return None
    return ExpertWeights(value.weights, value.ids, start, column=True) if start < value.num_experts else None


def _as_column(read: Reader, node: Node) -> Value | None:
    """A unit axis behind weights of hits, of one expert, or of all."""
    value, dim = read.value(node.args[0]), read.dim(node)
    if not isinstance(value, (HitWeights, ExpertWeights, DenseWeights)) or value.column:
        return None
    if dim != read.dim(node.args[0]) + 1 or not read.same_sizes(read.shape(node)[-1:], (1,)):
        return None
    is_last = functional_form(node) is not aten.unsqueeze.default or read.axis(node, node.args[1]) == dim - 1
    is_last = is_last and (dim == 2 or functional_form(node) is aten.unsqueeze.default)
    return dataclasses.replace(value, column=True) if is_last else None


def _wider_weights(read: Reader, node: Node) -> Value | str | None:
    value = read.value(node.args[0])
    if not isinstance(value, (HitWeights, ExpertWeights, DenseWeights, MaskedWeights)):
        return None
    if read.holds(node, read.dtype(node.args[0])):
        return value
    return f"{read.describe(node)} rounds the routing weights of an expert to {read.dtype(node)}"


def _masked_weights(read: Reader, node: Node) -> Value | None:
    """weights * (ids == e), weights.unsqueeze(-1) * one_hot."""
    for mask_node, weights in (node.args[:2], node.args[1::-1]):
        mask, mask_axes = read.value(mask_node), AXES_OF_IDS
        if isinstance(mask, OneHot) and isinstance(weights, Node):
            weights, mask_axes = before_unit_axis(read, weights, axis=2), (*AXES_OF_IDS, "expert")
        if not isinstance(mask, (OneHot, ExpertMask)) or not isinstance(weights, Node) or read.dim(weights) < 1:
            continue
        if mask.axes != mask_axes[: read.dim(mask.ids)] + mask_axes[2:] or not read.dtype(weights).is_floating_point:
            continue
        if not read.same_sizes(read.shape(weights), read.shape(mask.ids)):
            continue
        if isinstance(mask, ExpertMask) and len(mask.axes) == 1:
            return ExpertWeights(read.root(weights), mask.ids, mask.expert, column=False)
        return MaskedWeights(read.root(weights), mask)
    return None


def _sum_of_choices(read: Reader, node: Node) -> Value | None:
    """(weights * (ids == e)).sum(-1), (weights.unsqueeze(-1) * one_hot).sum(1)."""
    value, (_, axes, keepdim) = read.value(node.args[0]), read.arguments(node, None, None, False)[:3]
    if not isinstance(value, MaskedWeights) or [read.axis(node.args[0], axis) for axis in axes or ()] != [1]:
        return None
    if not read.holds(node, read.dtype(node.args[0])):
        return None
    mask = value.mask
    if isinstance(mask, ExpertMask):
        return ExpertWeights(value.weights, mask.ids, mask.expert, column=bool(keepdim))
    return None if keepdim else DenseWeights(value.weights, mask.ids, mask.num_experts, ("token", "expert"))


def _scattered_weights(read: Reader, node: Node) -> Value | str | None:
    """zeros(T, E).scatter(1, ids, weights)."""
    base, axis, ids, weights = node.args[:4]
    num_experts = read.static_size(base, 1) if read.dim(base) == 2 else None
    if read.value(base) != Zeros() or not axes_of_ids(read, ids) or num_experts is None:
        return None
    if read.axis(base, axis) != 1 or read.dim(ids) != 2 or node.args[4:] or node.kwargs:
        return None
    if functional_form(node) is aten.scatter.value:
        return OneHot(read.root(ids), num_experts, ("token", "expert")) if weights == 1 else None
    if not read.same_sizes(read.shape(ids), read.shape(weights)):
        return None
    if functional_form(node) is aten.scatter.src and not has_distinct_experts(read, read.root(ids)):
        return f"{read.describe(node)} keeps one weight where a token names an expert twice; use scatter_add"
    return DenseWeights(read.root(weights), read.root(ids), num_experts, ("token", "expert"))


EXPERT_WEIGHTS = Spelling(
    name="expert_weights",
    part="weights by expert",
    chain="(weights * (ids == e)).sum(-1); zeros.scatter(1, ids, weights) or (weights * one_hot).sum(1), [:, e]",
    rules=(
        Rule("column of one expert", (aten.slice.Tensor,), _slice_of_one_expert),
        Rule("column of weights", (aten.unsqueeze.default, aten.view.default, aten.reshape.default), _as_column),
        Rule("cast of an expert's weights", CASTS, _wider_weights),
        Rule("masked weights", (aten.mul.Tensor,), _masked_weights),
        Rule("sum of masked weights", (aten.sum.dim_IntList,), _sum_of_choices),
        Rule(
            "scattered weights",
            (aten.scatter.src, aten.scatter.value, aten.scatter_add.default),
            _scattered_weights,
        ),
    ),
    source="hand-written layers",
)
