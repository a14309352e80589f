"""Rows that travel to the ranks that own their experts and back: ``all_to_all_single`` with exchanged counts as splits.

Counts per expert, seen by rank, are exchanged; their sums by rank are the split sizes. Rows sorted by expert are
grouped by owner, since rank w owns the w-th block of L experts. What happens to received rows is in ``received.py``.

Axes: W ranks, L experts per rank, T tokens, K choices per token, R rows sent, S rows received, D model width.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from ..interpret import CASTS, INTEGERS, Reader, aten
from ..parallel_values import Dispatch, RankCounts, RankTotal, RankTotals, ReceivedIds, StackedTotals
from ..rule import Rule, Spelling
from ..values import Combined, ExpertCounts, ExpertOutput, PerChoice, TokenRows, Value
from .choices import sorted_ids


def collective(name: str) -> tuple[OpOverload, ...]:
    """The functional collectives of that name; none where torch was built without torch.distributed."""
    namespaces = (torch.ops._c10d_functional, torch.ops._c10d_functional_autograd)
    packets = (getattr(namespace, name, None) for namespace in namespaces)
    return tuple(packet.default for packet in packets if packet is not None)


ALL_TO_ALL_OPS = collective("all_to_all_single")
WAIT_OPS = collective("wait_tensor")
_EXCHANGED = (RankCounts, TokenRows, ReceivedIds, ExpertOutput)


def _bincount(read: Reader, node: Node) -> Value | str | None:
    ids = read.value(node.args[0])
    if not isinstance(ids, PerChoice) or read.dtype(ids.of).is_floating_point:
        return None
    _, weights, num_experts = read.arguments(node, None, None, node.kwargs.get("minlength", 0))
    if weights is not None or not isinstance(num_experts, int):
        return f"{read.describe(node)} must count expert ids, with a constant minlength, got weights or no constant"
    return ExpertCounts(ids.of, num_experts)


def _count_by_scatter(read: Reader, node: Node) -> Value | None:
    """zeros(E).scatter_add(0, ids, ones)."""
    counts, axis, index, ones = node.args[:4]
    ids = read.value(index)
    if not isinstance(ids, PerChoice) or ids.column or read.dtype(ids.of).is_floating_point or axis not in (0, -1):
        return None
    is_zero = counts.target in (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)
    is_one = ones.target in (aten.ones.default, aten.new_ones.default, aten.ones_like.default)
    num_experts = read.static_size(counts, 0)
    whole = read.same_sizes(read.shape(ones), read.shape(index)) and read.dtype(node) in INTEGERS
    return ExpertCounts(ids.of, num_experts) if is_zero and is_one and whole and num_experts else None


def _by_rank(read: Reader, node: Node) -> Value | None:
    """[E] -> [W, L], and back for counts that were received."""
    counts, shape = read.value(node.args[0]), read.shape(node)
    if isinstance(counts, ExpertCounts) and len(shape) == 2 and all(isinstance(size, int) for size in shape):
        whole = shape[0] * shape[1] == counts.num_experts
        return RankCounts(counts.ids, counts.num_experts, num_ranks=int(shape[0])) if whole else None
    if isinstance(counts, RankCounts):
        if len(shape) == 1:
            return dataclasses.replace(counts, flat=True)
        if read.same_sizes(shape, (counts.num_ranks, counts.num_experts // counts.num_ranks)):
            return counts.as_table()
    return None


def _exchange_counts(read: Reader, node: Node) -> Value | str | None:
    """Every rank learns how many rows it will receive for each of its experts."""
    sent, received_splits, sent_splits, group = node.args
    counts = read.value(sent)
    if isinstance(counts, ExpertCounts):
        num_ranks = len(sent_splits)
        if num_ranks == 0 or counts.num_experts % num_ranks:
            return f"{read.describe(node)} must send equal parts of {counts.num_experts} counts to {num_ranks} ranks"
        counts = RankCounts(counts.ids, counts.num_experts, num_ranks, flat=True)
    if not isinstance(counts, RankCounts) or counts.exchange is not None:
        return None
    equal = [counts.num_experts // counts.num_ranks if counts.flat else 1] * counts.num_ranks
    if list(received_splits) != equal or list(sent_splits) != equal:
        return f"{read.describe(node)} must exchange the counts in equal parts, got {received_splits} and {sent_splits}"
    return dataclasses.replace(counts, exchange=node, group=str(group))


def _arrived(read: Reader, node: Node) -> Value | None:
    """What is waited for."""
    value = read.value(node.args[0])
    return value if isinstance(value, _EXCHANGED) else None


def _copied(read: Reader, node: Node) -> Value | None:
    """received.copy_(what was waited for): an all-to-all that writes to its output."""
    into, source = node.args[:2]
    if not isinstance(source, Node) or read.dtype(into) != read.dtype(source):
        return None
    value = read.value(source)
    same = read.same_sizes(read.shape(into), read.shape(source))
    return value if isinstance(value, (*_EXCHANGED, Combined)) and same else None


def _totals(read: Reader, node: Node) -> Value | None:
    """The sum over the experts of each rank."""
    counts = read.value(node.args[0])
    keepdim = read.arguments(node, None, None, False)[2]
    if not isinstance(counts, RankCounts) or counts.flat or keepdim or read.dtype(node) not in INTEGERS:
        return None
    return RankTotals(counts) if [axis % 2 for axis in node.args[1] or ()] == [1] else None


def _stacked(read: Reader, node: Node) -> Value | None:
    parts = tuple(read.value(part) for part in node.args[0])
    if read.arguments(node, None, 0)[1] == 0 and all(isinstance(part, RankTotals) for part in parts):
        return StackedTotals(parts)  # type: ignore[arg-type]
    return None


def _selected(read: Reader, node: Node) -> Value | None:
    totals, (axis, index) = read.value(node.args[0]), node.args[1:3]
    if not isinstance(index, int) or index < 0 or axis != 0:
        return None
    if isinstance(totals, StackedTotals):
        return totals.parts[index]
    return RankTotal(totals.counts, index) if isinstance(totals, RankTotals) else None


def _cast(read: Reader, node: Node) -> Value | None:
    """Counts in another integer dtype, or on the host."""
    value = read.value(node.args[0])
    kinds = (RankCounts, RankTotals, StackedTotals, RankTotal)
    return value if isinstance(value, kinds) and read.dtype(node) in INTEGERS else None


def _read_by_host(read: Reader, node: Node) -> Value | None:
    value = read.value(node.args[0])
    return value if isinstance(value, RankTotal) else None


def _dispatch(read: Reader, node: Node) -> Value | str | None:
    """Rows sorted by expert, or their ids, to the owners of the experts."""
    rows, counts = read.value(node.args[0]), _received(read, node.args[1])
    if not isinstance(rows, (TokenRows, PerChoice)) or (isinstance(rows, TokenRows) and rows.dispatch is not None):
        return None
    if isinstance(rows, PerChoice) and rows.order is None:
        return None
    if isinstance(rows, PerChoice) and read.dtype(rows.of).is_floating_point:
        return f"{read.describe(node)} sends routing weights; they must be multiplied in where the tokens come from"
    if counts is None:
        return (
            f"the split sizes of {read.describe(node)} must be sums by rank of counts of the expert ids that the ranks "
            "exchanged; equal splits of padded rows are not recognised"
        )
    reason = _exchange_reason(read, node, counts, to_owners=True)
    if reason is not None:
        return reason
    if rows.order is None or not read.same_tensor(sorted_ids(read, rows.order), counts.ids):
        return f"{read.describe(node)} must send rows sorted by the expert ids that were counted"
    assert counts.exchange is not None
    if isinstance(rows, PerChoice):
        return None if rows.column else ReceivedIds(counts, counts.exchange, is_local=False)
    if rows.unit_axis is not None:
        return None
    return dataclasses.replace(rows, order=counts.exchange, dispatch=Dispatch(counts, rows.order))


def _return(read: Reader, node: Node) -> Value | str | None:
    """Outputs in the order in which their rows were received, back to where the tokens came from."""
    rows = read.value(node.args[0])
    if not isinstance(rows, ExpertOutput) or rows.hidden.rows.dispatch is None:
        return None
    dispatch = rows.hidden.rows.dispatch
    if rows.order is dispatch.sent_order:
        return f"{read.describe(node)} sends expert outputs that were sent back already"
    if rows.order is not dispatch.counts.exchange or rows.unit_axis is not None:
        return f"{read.describe(node)} must send expert outputs in the order in which their rows were received"
    reason = _exchange_reason(read, node, dispatch.counts, to_owners=False)
    return reason if reason is not None else dataclasses.replace(rows, order=dispatch.sent_order)


def _received(read: Reader, splits: Any) -> RankCounts | None:
    """The counts of rows received that split sizes are made of; in the wrong direction those of rows sent."""
    totals = [read.value(split) for split in splits]
    first = totals[0] if totals else None
    return first.counts if isinstance(first, RankTotal) else None


def _exchange_reason(read: Reader, node: Node, counts: RankCounts, *, to_owners: bool) -> str | None:
    """Why an all-to-all does not move the rows that ``counts`` counts, to their owners or back; None if it does."""
    received_splits, sent_splits, group = node.args[1:4]
    if counts.exchange is None:
        return f"{read.describe(node)} has the split sizes of what it sends and of what it receives swapped"
    if group != counts.group:
        return f"{read.describe(node)} runs in group {group!r}, but the counts were exchanged in group {counts.group!r}"
    of_owners, of_senders = (received_splits, sent_splits) if to_owners else (sent_splits, received_splits)
    choices = node.args[0] if to_owners else node
    no_choices = read.static_size(choices, 0) == 0  # Dynamo then knows that these splits are 0
    sent = dataclasses.replace(counts, exchange=None, group=None)
    if not _are_totals(read, of_owners, counts) or not (
        _are_totals(read, of_senders, sent) or (no_choices and list(of_senders) == [0] * counts.num_ranks)
    ):
        direction = "to the owners of the experts" if to_owners else "back from the owners of the experts"
        return f"the split sizes of {read.describe(node)} are not those of rows that go {direction}"
    return None


def _are_totals(read: Reader, splits: Any, counts: RankCounts) -> bool:
    """Whether ``splits`` are the sums by rank of ``counts``, in rank order."""
    wanted = [RankTotal(counts.as_table(), rank) for rank in range(counts.num_ranks)]
    have = [read.value(split) for split in splits]
    return wanted == [RankTotal(t.counts.as_table(), t.rank) if isinstance(t, RankTotal) else t for t in have]


ALL_TO_ALL = Spelling(
    name="all_to_all",
    part="exchange between ranks",
    chain=(
        "bincount, histc or scatter_add of ids, view [W, L], all_to_all_single of counts, sum by rank, tolist, "
        "all_to_all_single of sorted rows, experts, all_to_all_single with the splits exchanged"
    ),
    rules=(
        Rule("counts by bincount", (aten.bincount.default,), _bincount),
        Rule("counts by scatter", (aten.scatter_add.default,), _count_by_scatter),
        Rule("counts by rank", (aten.view.default, aten.reshape.default), _by_rank),
        Rule("exchange of counts", ALL_TO_ALL_OPS, _exchange_counts),
        Rule("rows to owners", ALL_TO_ALL_OPS, _dispatch),
        Rule("rows back", ALL_TO_ALL_OPS, _return),
        Rule("arrival", WAIT_OPS, _arrived),
        Rule("arrival by copy", (aten.copy.default,), _copied),
        Rule("rows by rank", (aten.sum.dim_IntList,), _totals),
        Rule("stack of totals", (aten.stack.default,), _stacked),
        Rule("part of totals", (aten.select.int,), _selected),
        Rule("cast of totals", (*CASTS, aten.to.device), _cast),
        Rule("split size", (aten.item.default, operator.getitem), _read_by_host),
    ),
    source="hand-written expert-parallel layers, torchtitan's dispatcher, transformers' all-to-all experts",
)
