"""How routing tensors [T, K] become one entry per routed row: flattening, sorting by expert, counting.

Shared by every spelling that works on routed rows.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from ..in_place import functional_form
from ..interpret import CASTS, Reader, aten
from ..rule import Rule, Spelling
from ..values import (
    ExpertCounts,
    ExpertEnds,
    InversePermutation,
    PerChoice,
    Permutation,
    RowToken,
    SortResult,
    Value,
)

_EXACT_FOR_IDS = (torch.int32, torch.int64, torch.float32, torch.float64)


def _flatten(read: Reader, node: Node) -> Value | None:
    """[T, K] -> [R], in choice order."""
    source = node.args[0]
    if isinstance(source, Node) and read.dim(source) == 2 and read.dim(node) == 1:
        return PerChoice(read.root(source), order=None)
    return None


def _column(read: Reader, node: Node) -> Value | None:
    """[R] -> [R, 1]."""
    value = read.value(node.args[0])
    if isinstance(value, PerChoice) and not value.column and read.same_sizes(read.shape(node)[1:], (1,)):
        return PerChoice(value.of, value.order, column=True)
    return None


def _sort(read: Reader, node: Node) -> Value | str | None:
    """Sort of the flat ids: rows grouped by expert. Stable or not: rows of one expert are independent."""
    flat = read.value(node.args[0])
    if not isinstance(flat, PerChoice) or read.dtype(flat.of).is_floating_point:
        return None
    if flat.order is not None:
        return f"{read.describe(node)} sorts ids that are not in choice order"
    if node.kwargs.get("descending") or any(arg is True for arg in node.args[1:]):
        return f"{read.describe(node)} must sort expert ids in ascending order"
    is_pair = functional_form(node) in (aten.sort.default, aten.sort.stable)
    return SortResult(flat.of, node) if is_pair else Permutation(node)


def _sorted_part(read: Reader, node: Node) -> Value | None:
    value = read.value(node.args[0])
    part = node.args[1]
    if not isinstance(value, SortResult) or part not in (0, 1):
        return None
    return PerChoice(value.ids, order=value.sort) if part == 0 else Permutation(value.sort)


def _invert_by_write(read: Reader, node: Node) -> Value | str | None:
    """inverse[permutation] = arange(R): every entry is written once, so what was there before does not matter."""
    indices = node.args[1]
    permutation = read.value(indices[0]) if isinstance(indices, (list, tuple)) and len(indices) == 1 else None
    if not isinstance(permutation, Permutation):
        return None
    is_iota = _is_iota(read, node.args[2]) and read.same_sizes(read.shape(node.args[2]), read.shape(indices[0]))
    if not is_iota or node.args[3:] not in ((), (False,)):
        return f"{read.describe(node)} must write 0, 1, 2, ... at the permutation to invert it"
    return InversePermutation(permutation.order)


def _invert_by_sort(read: Reader, node: Node) -> Value | str | None:
    permutation = read.value(node.args[0])
    if not isinstance(permutation, Permutation):
        return None
    if any(arg is True for arg in node.args[1:]):
        return f"{read.describe(node)} must sort the permutation in ascending order to invert it"
    return InversePermutation(permutation.order)


def _is_iota(read: Reader, arg: object) -> bool:
    if not isinstance(arg, Node):
        return False
    node = read.root(arg)
    if node.target is aten.arange.default:
        return True
    return node.target is aten.arange.start and node.args[0] == 0


def _row_token(read: Reader, node: Node) -> Value | str | None:
    """permutation // K: the token of each row."""
    permutation = read.value(node.args[0])
    if not isinstance(permutation, Permutation):
        return None
    if functional_form(node) is aten.div.Tensor_mode and node.kwargs.get("rounding_mode") not in ("floor", "trunc"):
        return None
    ids = sorted_ids(read, permutation.order)
    top_k = read.static_size(ids, 1)
    if top_k is None or node.args[1] != top_k:
        return f"{read.describe(node)} must divide by the {top_k} choices per token, got {node.args[1]}"
    return RowToken(permutation.order, top_k)


def sorted_ids(read: Reader, sort: Node) -> Node:
    """The [T, K] ids whose flat form ``sort`` sorts."""
    flat = read.value(sort.args[0])
    assert isinstance(flat, PerChoice), "a sort is an order only where it sorts flat ids"
    return flat.of


def _cast_ids(read: Reader, node: Node) -> Value | str | None:
    """A cast of ids or counts that keeps every value that an expert id or a row count can have."""
    value = read.value(node.args[0])
    if isinstance(value, PerChoice) and not read.dtype(value.of).is_floating_point:
        if read.dtype(node) in _EXACT_FOR_IDS:
            return value
        return f"{read.describe(node)} casts expert ids to {read.dtype(node)}, which cannot hold every id"
    if isinstance(value, (ExpertCounts, ExpertEnds)) and read.dtype(node) in _EXACT_FOR_IDS:
        return value
    return None


def _histogram(read: Reader, node: Node) -> Value | str | None:
    ids = read.value(node.args[0])
    if not isinstance(ids, PerChoice) or read.dtype(ids.of).is_floating_point:
        return None
    _, bins, low, high = read.arguments(node, None, 100, 0, 0)
    if not isinstance(bins, int) or low != 0 or high != bins - 1:
        return f"{read.describe(node)} must count ids 0 .. E-1 in E bins, got bins={bins}, min={low}, max={high}"
    return ExpertCounts(ids.of, bins)


def _ends(read: Reader, node: Node) -> Value | None:
    counts = read.value(node.args[0])
    if isinstance(counts, ExpertCounts) and read.dtype(node) in _EXACT_FOR_IDS:
        return ExpertEnds(counts.ids, counts.num_experts)
    return None


def _reorder(read: Reader, node: Node) -> Value | str | None:
    """flat[permutation]: a routing tensor in the order of the sorted rows."""
    source, indices = node.args[0], node.args[1]
    flat = read.value(source)
    permutation = read.value(indices[0]) if isinstance(indices, (list, tuple)) and len(indices) == 1 else None
    if not isinstance(flat, PerChoice) or not isinstance(permutation, Permutation):
        return None
    if flat.order is not None:
        return f"{read.describe(node)} permutes routing values that are already permuted"
    return PerChoice(flat.of, permutation.order, flat.column)


CHOICES = Spelling(
    name="choices",
    part="routed rows",
    chain="reshape(-1), sort or argsort, // K, histc, cumsum, inverse by index_put or argsort",
    rules=(
        Rule("flatten choices", (aten.reshape.default, aten.view.default, aten.flatten.using_ints), _flatten),
        Rule("weights as a column", (aten.unsqueeze.default, aten.view.default, aten.reshape.default), _column),
        Rule("sort by expert", (aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable), _sort),
        Rule("part of a sort", (operator.getitem,), _sorted_part),
        Rule("inverse by write", (aten.index_put.default,), _invert_by_write),
        Rule("inverse by sort", (aten.argsort.default,), _invert_by_sort),
        Rule("token of a row", (aten.floor_divide.default, aten.div.Tensor_mode), _row_token),
        Rule("cast of ids", CASTS, _cast_ids),
        Rule("rows per expert", (aten.histc.default,), _histogram),
        Rule("ends of experts", (aten.cumsum.default,), _ends),
        Rule("reorder choices", (aten.index.Tensor,), _reorder),
    ),
    source="transformers grouped_mm and batched_mm experts",
)
