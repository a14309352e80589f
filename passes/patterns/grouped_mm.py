"""Experts as grouped GEMMs over rows sorted by expert: transformers' ``grouped_mm``, ``torch._grouped_mm``."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..in_place import functional_form
from ..interpret import Reader, aten
from ..parallel_values import ReceivedPerExpert
from ..rule import Rule, Spelling
from ..values import (
    ExpertCounts,
    ExpertEnds,
    ExpertLinear,
    ExpertOutput,
    Gated,
    Hidden,
    SwappedMatrix,
    TokenRows,
    Value,
)
from .choices import sorted_ids


def _swap(read: Reader, node: Node) -> Value | None:
    """The transpose of a stacked weight's two last axes."""
    source = node.args[0]
    if not isinstance(source, Node) or read.dim(source) != 3 or read.value(source) is not None:
        return None
    if functional_form(node) is aten.permute.default:
        swaps = [read.axis(source, axis) for axis in node.args[1]] == [0, 2, 1]
    else:
        swaps = functional_form(node) is aten.mT.default
        swaps = swaps or {read.axis(source, axis) for axis in node.args[1:3]} == {1, 2}
    return SwappedMatrix(read.root(source)) if swaps else None


def _grouped_product(read: Reader, node: Node) -> Value | str | None:
    """One grouped GEMM: the first expert linear on token rows, or the second on gated rows."""
    rows_node, matrix_node, ends_node = read.arguments(node, None, None, None)[:3]
    rows = read.value(rows_node)
    if not isinstance(matrix_node, Node) or read.dim(matrix_node) != 3:
        return f"{read.describe(node)} must have one [E, K, N] matrix per expert"
    if padding := _padding(read, ends_node):
        return f"the rows of each expert are padded at {read.describe(padding)}, perseus ops read rows without padding"
    if not isinstance(rows, (TokenRows, Gated)):
        if isinstance(rows, Hidden):
            return f"there is no gate between the two expert linears at {read.describe(node)}"
        return f"the rows of {read.describe(node)} are not tokens gathered in the order of their sorted expert ids"
    tokens = rows if isinstance(rows, TokenRows) else rows.hidden.rows
    ends = _ends_of(read, node, tokens, read.value(ends_node))
    if isinstance(ends, str):
        return ends
    swapped = read.value(matrix_node)
    if isinstance(swapped, SwappedMatrix):
        linear = ExpertLinear(swapped.of, "out_in")
    else:
        linear = ExpertLinear(read.root(matrix_node), "in_out")
    if read.shape(linear.weight)[0] != ends.num_experts:
        return (
            f"{read.describe(node)} has {read.shape(linear.weight)[0]} expert matrices "
            f"for counts of {ends.num_experts} experts"
        )
    if any(arg is not None for arg in node.args[3:]) or read.dtype(node) != read.dtype(rows_node):
        return f"{read.describe(node)} has a bias or an output dtype of its own"
    if isinstance(rows, TokenRows):
        return Hidden(rows, ends.ids, linear)
    return ExpertOutput(rows.hidden, rows.expression, linear, tokens.order)


def _padding(read: Reader, ends: Node | None) -> Node | None:
    """The division by which counts of rows were rounded up to a multiple before ``ends`` were made of them."""
    node, divided = ends, None
    while isinstance(node, Node) and read.dim(node) == 1 and not isinstance(read.value(node), ExpertEnds):
        if isinstance(read.value(node), ExpertCounts):
            return divided
        divided = node if functional_form(node) in _DIVISIONS else divided
        node = node.args[0] if node.args else None
    return None


_DIVISIONS = (aten.floor_divide.default, aten.div.Tensor_mode, aten.remainder.Scalar, aten.ceil.default)


def _ends_of(read: Reader, node: Node, rows: TokenRows, ends: Value | None) -> ExpertEnds | str:
    """``ends`` as the ends of the experts in the order of ``rows``, or why they are not."""
    if isinstance(ends, ReceivedPerExpert) and ends.ends and rows.dispatch is not None:
        if rows.order is rows.dispatch.counts.exchange:
            return f"the rows of {read.describe(node)} are ordered by the rank that sent them, not by expert"
        if ends.counts != rows.dispatch.counts:
            return f"the group offsets of {read.describe(node)} count other rows than those that were received"
        return ExpertEnds(ends.counts.ids, ends.counts.num_experts // ends.counts.num_ranks)
    if not isinstance(ends, ExpertEnds) or rows.dispatch is not None:
        return f"the group offsets of {read.describe(node)} are not the cumulative counts of the expert ids"
    if rows.order is None or not read.same_tensor(sorted_ids(read, rows.order), ends.ids):
        return f"the group offsets of {read.describe(node)} count other ids than those that its rows are sorted by"
    return ends


def _grouped_targets() -> tuple[torch._ops.OpOverload, ...]:
    """The grouped GEMMs that exist here; transformers registers its own when it is imported."""
    targets = [aten._grouped_mm.default]
    fallback = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    if fallback is not None:
        targets.append(fallback.default)
    return tuple(targets)


def grouped_mm() -> Spelling:
    return Spelling(
        name="grouped_mm",
        part="expert linears",
        chain="x[perm // K], _grouped_mm, gate, _grouped_mm, * weight[perm], [inverse], view [T, K, D], sum",
        rules=(
            Rule("swapped weight", (aten.transpose.int, aten.permute.default, aten.mT.default), _swap),
            Rule("grouped GEMM", _grouped_targets(), _grouped_product),
        ),
        source='transformers experts_implementation="grouped_mm"; torch._grouped_mm; torch.nn.functional.grouped_mm',
    )
