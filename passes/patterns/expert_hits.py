"""Which rows does one expert of a loop work on, and with which weights? Masks, indices, and what is taken by them."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch.fx import Node

from ..in_place import functional_form, is_written
from ..interpret import CASTS, INTEGERS, Reader, aten
from ..loop_values import (
    Axis,
    DenseWeights,
    ExpertMask,
    ExpertSum,
    ExpertWeights,
    HitIndex,
    HitRows,
    Hits,
    HitWeights,
    OneHot,
    SumAtHits,
    Zeros,
)
from ..rule import Rule, Spelling
from ..values import Value

AXES_OF_IDS: tuple[Axis, ...] = ("token", "choice")


def _equal_to_expert(read: Reader, node: Node) -> Value | None:
    """ids == e."""
    ids, expert = node.args
    axes = axes_of_ids(read, ids)
    return ExpertMask(read.root(ids), expert, axes) if axes and type(expert) is int else None


def axes_of_ids(read: Reader, ids: Any) -> tuple[Axis, ...]:
    """() for what cannot be ids [T, K], or [T] of one choice each."""
    is_integer = read.dim(ids) in (1, 2) and read.dtype(ids) in INTEGERS
    return AXES_OF_IDS[: read.dim(ids)] if is_integer else ()


def _one_hot(read: Reader, node: Node) -> Value | None:
    ids, num_experts = read.arguments(node, None, -1)
    axes = axes_of_ids(read, ids)
    return OneHot(read.root(ids), num_experts, (*axes, "expert")) if axes and num_experts > 0 else None


def _equal_to_all(read: Reader, node: Node) -> Value | None:
    """ids.unsqueeze(-1) == arange(E)."""
    column, iota = node.args
    if not isinstance(iota, Node) or read.root(iota).target is not aten.arange.default or read.dim(iota) != 1:
        return None
    column, num_experts = read.root(column), read.static_size(iota, 0)
    if column.target is not aten.unsqueeze.default or num_experts is None:
        return None
    axes = axes_of_ids(read, column.args[0])
    is_last = read.axis(column, column.args[1]) == read.dim(column) - 1
    return OneHot(read.root(column.args[0]), num_experts, (*axes, "expert")) if axes and is_last else None


def _moved_axes(read: Reader, node: Node) -> Value | None:
    """Of one-hot ids, or of the weights of all experts."""
    value = read.value(node.args[0])
    if not isinstance(value, (OneHot, DenseWeights)) or (isinstance(value, DenseWeights) and value.column):
        return None
    order = list(range(read.dim(node)))
    if functional_form(node) is aten.permute.default:
        order = [read.axis(node, axis) for axis in node.args[1]]
    elif functional_form(node) is aten.t.default:
        order.reverse()
    else:
        first, second = (read.axis(node, axis) for axis in node.args[1:3])
        order[first], order[second] = order[second], order[first]
    return dataclasses.replace(value, axes=tuple(value.axes[axis] for axis in order))


def _of_one_expert(read: Reader, node: Node) -> Value | None:
    """one_hot[e] or dense_weights[e], along the axis of the experts."""
    value, (source, axis, index) = read.value(node.args[0]), node.args
    if not isinstance(value, (OneHot, DenseWeights)) or not isinstance(index, int):
        return None
    axis = read.axis(source, axis)
    if axis >= len(value.axes) or value.axes[axis] != "expert":
        return None
    expert = index % value.num_experts
    if isinstance(value, DenseWeights):
        return ExpertWeights(value.weights, value.ids, expert, value.column)
    return ExpertMask(value.ids, expert, (*value.axes[:axis], *value.axes[axis + 1 :]))


def _any_choice(read: Reader, node: Node) -> Value | None:
    """Whether any choice of a token names the expert: any, sum or amax over the choices."""
    value, (source, axes, keepdim) = read.value(node.args[0]), read.arguments(node, None, None, False)[:3]
    if not isinstance(value, (OneHot, ExpertMask)) or keepdim or "choice" not in value.axes:
        return None
    axes = axes if isinstance(axes, (list, tuple)) else [axes]
    if [read.axis(source, axis) for axis in axes if axis is not None] != [value.axes.index("choice")]:
        return None
    return dataclasses.replace(value, axes=tuple(axis for axis in value.axes if axis != "choice"))


def _still_not_zero(read: Reader, node: Node) -> Value | None:
    """A cast of a mask, or mask > 0."""
    value = read.value(node.args[0])
    if not isinstance(value, (OneHot, ExpertMask)):
        return None
    is_cast = functional_form(node) in CASTS
    return value if is_cast or node.args[1] == 0 else None


def _hits(read: Reader, node: Node) -> Value | None:
    mask = read.value(node.args[0])
    return Hits(mask, table=functional_form(node) is aten.nonzero.default) if isinstance(mask, ExpertMask) else None


def _index_of_axis(read: Reader, node: Node) -> Value | None:
    """One axis of the hits: an entry of the tuple, or a column of the table."""
    hits = read.value(node.args[0])
    if not isinstance(hits, Hits):
        return None
    if node.target is operator.getitem:
        axis = node.args[1]
    elif functional_form(node) is aten.select.int:
        axis = node.args[2] if read.axis(node.args[0], node.args[1]) == 1 else None
    else:  # a reshape of a table of one column
        axis = 0 if len(hits.mask.axes) == 1 and read.dim(node) == 1 else None
    if axis is None or hits.table == (node.target is operator.getitem) or axis >= len(hits.mask.axes):
        return None
    return HitIndex(hits.mask, hits.mask.axes[axis])


def _take(read: Reader, node: Node) -> Value | str | None:
    """x, weights or sums at the hits of one expert."""
    source, indices = node.args[:2]
    if functional_form(node) is aten.index_select.default:
        if node.args[1] not in (0, -read.dim(source)):
            return None
        indices = [node.args[2]]
    if not isinstance(indices, (list, tuple)) or read.dim(source) < 1 or not read.dtype(source).is_floating_point:
        return None
    if len(indices) == 1:
        return _take_weights_by_mask(read, source, indices[0]) or _take_tokens(read, source, indices[0])
    if len(indices) != 2 or not isinstance(second := read.value(indices[1]), HitIndex):
        return None
    if indices[0] is None:
        inner = before_unit_axis(read, source, axis=0)
        is_token = inner is not None and second.axis == "token" and read.dim(inner) == 2
        return HitRows(read.root(inner), second.mask, leading=True) if inner is not None and is_token else None
    if not isinstance(first := read.value(indices[0]), HitIndex):
        return None
    if first != HitIndex(second.mask, "token") or second.axis != "choice":
        return f"{read.describe(node)} must take the weights of an expert by the token and the choice of each hit"
    inner = before_unit_axis(read, source, axis=2)
    weights = source if inner is None else inner
    return HitWeights(read.root(weights), second.mask, inner is not None) if read.dim(weights) == 2 else None


def before_unit_axis(read: Reader, node: Node, axis: int) -> Node | None:
    """What ``node`` was before a unit axis was put in at ``axis``."""
    node = read.root(node)
    if node.target is not aten.unsqueeze.default or read.axis(node, node.args[1]) != axis:
        return None
    return node.args[0]


def _take_weights_by_mask(read: Reader, source: Node, index: Node) -> Value | None:
    """weights[ids == e]: in the order of the tokens, then of their choices."""
    mask = read.value(index)
    if not isinstance(mask, ExpertMask) or mask.axes != AXES_OF_IDS or read.dtype(index) != torch.bool:
        return None
    return HitWeights(read.root(source), mask, column=False) if read.dim(source) == 2 else None


def token_hits(read: Reader, index: Any) -> ExpertMask | None:
    """The mask whose hits an index along the tokens takes: the tokens of its places, or the mask of tokens itself."""
    value = read.value(index)
    if isinstance(value, HitIndex) and value.axis == "token":
        return value.mask
    if isinstance(value, ExpertMask) and value.axes == ("token",) and read.dtype(index) == torch.bool:
        return value
    return None


def _take_tokens(read: Reader, source: Node, index: Node) -> Value | str | None:
    mask, value = token_hits(read, index), read.value(source)
    if mask is None:
        return None
    if isinstance(value, (Zeros, ExpertSum)) and not value.is_empty:
        return SumAtHits(read.root(source), mask)
    if isinstance(value, ExpertWeights):
        if (value.ids, value.expert) != (mask.ids, mask.expert):
            return f"the weights of expert {value.expert} are taken at the hits of expert {mask.expert}"
        if "choice" in mask.axes and not has_distinct_experts(read, mask.ids):
            return f"the weights of expert {value.expert} are sums over choices, and the hits are single choices"
        return HitWeights(value.weights, mask, value.column)
    if read.dim(mask.ids) == 1 and (read.dim(source) == 1 or read.same_sizes(read.shape(source)[1:], (1,))):
        return HitWeights(read.root(source), mask, column=read.dim(source) == 2)
    return HitRows(read.root(source), mask) if read.dim(source) == 2 else None


def hit_rows(read: Reader, node: Node) -> HitRows | None:
    """The tokens of hits that ``node`` holds."""
    value = read.value(node)
    if isinstance(value, SumAtHits):
        return value.as_rows()
    return value if isinstance(value, HitRows) else None


def has_distinct_experts(read: Reader, ids: Node) -> bool:
    """Whether no token names an expert twice."""
    if read.dim(ids) == 1 or read.static_size(ids, 1) == 1:
        return True
    topk = ids.args[0] if ids.target is operator.getitem and ids.args[1] == 1 else None
    if not isinstance(topk, Node) or topk.target is not aten.topk.default or is_written(ids):
        return False
    return read.axis(ids, read.arguments(topk, None, None, -1)[2]) == 1


def _without_unit_axis(read: Reader, node: Node) -> Value | None:
    """[1, N, D] -> [N, D]."""
    rows = read.value(node.args[0])
    if not isinstance(rows, HitRows) or not rows.leading or read.dim(node) != 2:
        return None
    is_same = read.same_sizes(read.shape(node)[1:], read.shape(node.args[0])[2:])
    return HitRows(rows.x, rows.mask) if is_same else None


_RESHAPES = (aten.view.default, aten.reshape.default, aten.squeeze.dim)
EXPERT_HITS = Spelling(
    name="expert_hits",
    part="rows of one expert",
    chain="ids == e, one_hot(ids)[e] or any(ids == e); [where or nonzero]; x[token], weights[token, choice]",
    rules=(
        Rule("ids of one expert", (aten.eq.Scalar,), _equal_to_expert),
        Rule("one-hot ids", (aten.one_hot.default,), _one_hot),
        Rule("ids of every expert", (aten.eq.Tensor,), _equal_to_all),
        Rule("moved axes", (aten.permute.default, aten.transpose.int, aten.t.default), _moved_axes),
        Rule("part of one expert", (aten.select.int,), _of_one_expert),
        Rule("any choice", (aten.any.dim, aten.sum.dim_IntList, aten.amax.default), _any_choice),
        Rule("mask not 0", (*CASTS, aten.gt.Scalar, aten.ne.Scalar), _still_not_zero),
        Rule("hits", (aten.where.default, aten.nonzero_numpy.default, aten.nonzero.default), _hits),
        Rule(
            "index of an axis",
            (operator.getitem, aten.select.int, aten.flatten.using_ints, *_RESHAPES),
            _index_of_axis,
        ),
        Rule("values at hits", (aten.index.Tensor, aten.index_select.default), _take),
        Rule("rows without a unit axis", _RESHAPES, _without_unit_axis),
    ),
    source="hand-written layers; Mixtral and its successors in transformers before 5",
)
