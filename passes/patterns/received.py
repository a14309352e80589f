"""What a rank does with rows that it received: orders them by expert and back, and finds each row's own weights.

Received rows are ordered by the rank that sent them and, inside a rank, by expert (``all_to_all.py``).

Axes: W ranks, L experts per rank, S rows received, T tokens, K choices per token, D model width.
"""

from __future__ import annotations

import dataclasses
import operator

from torch.fx import Node

from ...process_groups import rank_in
from ..in_place import functional_form
from ..interpret import CASTS, INTEGERS, Reader, aten
from ..parallel_values import RankCounts, ReceivedIds, ReceivedPerExpert, ReceivedPermutation, ReceivedSort
from ..rule import Rule, Spelling
from ..values import ExpertOutput, Permutation, SelectedByExpert, TokenRows, Value


def _per_rank(counts: RankCounts) -> int:
    return counts.num_experts // counts.num_ranks


def _ids_from_counts(read: Reader, node: Node) -> Value | str | None:
    """Each (rank, local expert) as often as rows were received for it."""
    experts, counts = node.args[:2]
    received = read.value(counts)
    if not isinstance(received, RankCounts) or received.exchange is None or not received.flat:
        return None
    if not _is_local_experts(read, experts, received):
        return f"{read.describe(node)} must repeat the local experts 0 .. {_per_rank(received) - 1}, once per rank"
    return ReceivedIds(received.as_table(), received.exchange, is_local=True)


def _is_local_experts(read: Reader, node: Node, counts: RankCounts) -> bool:
    """arange(L).repeat(W), arange(W*L) % L, or arange(L).expand(W, L).reshape(-1)."""
    num_local, root = _per_rank(counts), read.root(node)
    if not read.same_sizes(read.shape(root), (counts.num_experts,)):
        return False
    if root.target is aten.repeat.default:
        return _is_arange(read, root.args[0], num_local)
    if root.target is aten.remainder.Scalar:
        return _is_arange(read, root.args[0], counts.num_experts) and root.args[1] == num_local
    if root.target in (aten.reshape.default, aten.view.default, aten.flatten.using_ints):
        table = root.args[0]
        return table.target is aten.expand.default and _is_arange(read, table.args[0], num_local)
    return False


def _is_arange(read: Reader, node: Node, length: int) -> bool:
    """0, 1, ... length - 1; unit axes in front of it do not matter to an expand."""
    while node.target is aten.unsqueeze.default and node.args[1] == 0:
        node = node.args[0]
    starts_at_0 = node.target is aten.arange.default or (node.target is aten.arange.start and node.args[0] == 0)
    return starts_at_0 and read.same_sizes(read.shape(node), (length,))


def _local_ids(read: Reader, node: Node) -> Value | str | None:
    """Global ids that were received, less the id of this rank's first expert."""
    ids, number = read.value(node.args[0]), node.args[1]
    if not isinstance(ids, ReceivedIds) or node.kwargs.get("alpha", 1) != 1:
        return None
    num_local = _per_rank(ids.counts)
    if ids.is_local:
        return f"{read.describe(node)} changes ids that are counted from the first expert of this rank already"
    if functional_form(node) is aten.remainder.Scalar:
        if number == num_local:
            return dataclasses.replace(ids, is_local=True)
        return f"{read.describe(node)} must take ids modulo the {num_local} experts of each rank, got {number}"
    rank = rank_in(ids.counts.group)
    if rank is None:
        return f"the process group {ids.counts.group!r} of {read.describe(node)} does not exist in this process"
    if number != rank * num_local:
        return f"{read.describe(node)} must subtract the first expert of rank {rank}, {rank * num_local}, got {number}"
    return dataclasses.replace(ids, is_local=True)


def _cast_ids(read: Reader, node: Node) -> Value | None:
    value = read.value(node.args[0])
    kinds = (ReceivedIds, ReceivedPerExpert)
    return value if isinstance(value, kinds) and read.dtype(node) in INTEGERS else None


def _sort(read: Reader, node: Node) -> Value | str | None:
    """Rows by expert; ids of this rank's experts are in the same order whether local or global."""
    ids = read.value(node.args[0])
    if not isinstance(ids, ReceivedIds):
        return None
    if ids.order is not ids.counts.exchange:
        return f"{read.describe(node)} sorts received ids that are sorted already"
    if node.kwargs.get("descending") or any(arg is True for arg in node.args[1:]):
        return f"{read.describe(node)} must sort received ids in ascending order"
    is_pair = functional_form(node) in (aten.sort.default, aten.sort.stable)
    return ReceivedSort(ids, node) if is_pair else ReceivedPermutation(ids.counts, node)


def _sorted_part(read: Reader, node: Node) -> Value | None:
    value, part = read.value(node.args[0]), node.args[1]
    if not isinstance(value, ReceivedSort) or part not in (0, 1):
        return None
    if part == 0:
        return dataclasses.replace(value.ids, order=value.sort)
    return ReceivedPermutation(value.ids.counts, value.sort)


def _invert(read: Reader, node: Node) -> Value | None:
    permutation = read.value(node.args[0])
    if not isinstance(permutation, ReceivedPermutation) or permutation.inverse or any(a is True for a in node.args[1:]):
        return None
    return dataclasses.replace(permutation, inverse=True)


def _reorder(read: Reader, node: Node) -> Value | str | None:
    """rows[permutation], ids[permutation], outputs[inverse], weight[local ids]."""
    source, indices = node.args[:2]
    if not isinstance(indices, (list, tuple)) or len(indices) != 1 or not isinstance(source, Node):
        return None
    index, value = read.value(indices[0]), read.value(source)
    if isinstance(index, ReceivedIds):
        if not index.is_local or read.static_size(source, 0) != _per_rank(index.counts):
            num_local = _per_rank(index.counts)
            return f"{read.describe(node)} must select from the {num_local} experts of this rank by local ids"
        return SelectedByExpert(read.root(source), index.counts.ids, index.order)
    if not isinstance(index, ReceivedPermutation) or not isinstance(value, (TokenRows, ReceivedIds, ExpertOutput)):
        return None
    before, after = index.counts.exchange, index.order
    assert before is not None
    if index.inverse:
        before, after = after, before
    counts = _counts_of(value)
    if counts != index.counts or value.order is not before:
        return f"{read.describe(node)} must reorder the rows received by a sort of their own ids, or undo that"
    return dataclasses.replace(value, order=after)


def _counts_of(value: TokenRows | ReceivedIds | ExpertOutput) -> RankCounts | None:
    if isinstance(value, ReceivedIds):
        return value.counts
    rows = value if isinstance(value, TokenRows) else value.hidden.rows
    return rows.dispatch.counts if rows.dispatch else None


def _place(read: Reader, node: Node) -> Value | str | None:
    """out[permutation] = outputs: every row is written once, so what was there before does not matter."""
    into, indices, rows = node.args[:3]
    value = read.value(rows)
    index = read.value(indices[0]) if isinstance(indices, (list, tuple)) and len(indices) == 1 else None
    if not isinstance(value, ExpertOutput):
        return None
    whole = read.same_sizes(read.shape(into), read.shape(rows)) and read.dtype(into) == read.dtype(rows)
    if not whole or node.args[3:] not in ((), (False,)):
        return f"{read.describe(node)} must write every expert output once, in its own dtype"
    if isinstance(index, Permutation) and index.order is value.order:
        return dataclasses.replace(value, order=None)
    if isinstance(index, ReceivedPermutation) and index.order is value.order and not index.inverse:
        return dataclasses.replace(value, order=index.counts.exchange)
    return f"{read.describe(node)} must undo the permutation that ordered the rows"


def _per_expert(read: Reader, node: Node) -> Value | None:
    """The sum over the ranks of the counts that were received."""
    counts = read.value(node.args[0])
    keepdim = read.arguments(node, None, None, False)[2]
    if not isinstance(counts, RankCounts) or counts.exchange is None or counts.flat or keepdim:
        return None
    axes = [axis % 2 for axis in node.args[1] or ()]
    return ReceivedPerExpert(counts) if axes == [0] and read.dtype(node) in INTEGERS else None


def _count_again(read: Reader, node: Node) -> Value | None:
    """bincount of the local ids that were received."""
    ids = read.value(node.args[0])
    _, weights, num_experts = read.arguments(node, None, None, node.kwargs.get("minlength", 0))
    if isinstance(ids, ReceivedIds) and ids.is_local and weights is None and num_experts == _per_rank(ids.counts):
        return ReceivedPerExpert(ids.counts)
    return None


def _ends(read: Reader, node: Node) -> Value | None:
    counts = read.value(node.args[0])
    if isinstance(counts, ReceivedPerExpert) and not counts.ends and read.dtype(node) in INTEGERS:
        return dataclasses.replace(counts, ends=True)
    return None


RECEIVED = Spelling(
    name="received",
    part="rows received",
    chain=(
        "arange(L).repeat(W).repeat_interleave(counts), or ids sent along, argsort, rows[permutation], "
        "sum over ranks, cumsum, experts, out[permutation] = outputs"
    ),
    rules=(
        Rule("ids of received rows", (aten.repeat_interleave.self_Tensor,), _ids_from_counts),
        Rule("local ids", (aten.sub.Tensor, aten.remainder.Scalar), _local_ids),
        Rule("cast of received ids", CASTS, _cast_ids),
        Rule(
            "received rows by expert",
            (aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable),
            _sort,
        ),
        Rule("part of a sort of received ids", (operator.getitem,), _sorted_part),
        Rule("inverse order of received rows", (aten.argsort.default,), _invert),
        Rule("received rows in another order", (aten.index.Tensor,), _reorder),
        Rule("outputs put in order", (aten.index_put.default,), _place),
        Rule("rows received per expert", (aten.sum.dim_IntList,), _per_expert),
        Rule("received ids counted", (aten.bincount.default,), _count_again),
        Rule("ends of received rows", (aten.cumsum.default,), _ends),
    ),
    source="hand-written expert-parallel layers, transformers' all-to-all experts",
)
