"""Below which number do these expert ids lie? Reads the view; never edits."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from .in_place import is_written
from .interpret import Reader, aten

# Operators that move ids or change how they are stored; the ids themselves stay.
_MOVES = (
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.detach.default,
    aten.to.dtype,
    aten._to_copy.default,
)
# Operators that search along an axis: defaults of their arguments up to that axis.
_SEARCHES = {aten.topk.default: (None, None, -1), aten.max.dim: (None, None)}


def id_bound(read: Reader, ids: Node) -> int | None:
    """The smallest known n such that every id lies in [0, n): ids are positions along an axis, moved or replaced."""
    node = read.root(ids)
    if node.op != "call_function" or is_written(node):
        return None
    if node.target is operator.getitem:
        return _searched_size(read, node)
    if node.target in _MOVES:
        return id_bound(read, node.args[0]) if read.dtype(node) in (torch.int32, torch.int64) else None
    if node.target in (aten.cat.default, aten.concat.default):
        return _largest(read, node.args[0])
    if node.target is aten.where.self:
        return _largest(read, node.args[1:])
    if node.target is aten.masked_fill.Scalar:
        return _bound_without_last(read, *node.args[:3])
    return None


def _searched_size(read: Reader, node: Node) -> int | None:
    search, part = node.args
    if part != 1 or not isinstance(search, Node) or search.target not in _SEARCHES:
        return None
    values, *_, axis = read.arguments(search, *_SEARCHES[search.target])[: len(_SEARCHES[search.target])]
    return read.static_size(values, axis)


def _largest(read: Reader, sources: Any) -> int | None:
    bounds = [id_bound(read, source) if isinstance(source, Node) else None for source in sources]
    known = [bound for bound in bounds if bound is not None]
    return max(known) if len(known) == len(bounds) else None


def _bound_without_last(read: Reader, ids: Node, mask: Node, value: object) -> int | None:
    """ids.masked_fill(ids == n - 1, v): the last class is no expert, and its choices get a weight of zero elsewhere."""
    bound = id_bound(read, ids)
    is_last = mask.target is aten.eq.Scalar and mask.args[0] is ids and mask.args[1] == (bound or 0) - 1
    is_last = is_last and not is_written(mask)
    if bound is None or not isinstance(value, int) or not 0 <= value < bound:
        return None
    return bound - 1 if is_last and value < bound - 1 else bound
