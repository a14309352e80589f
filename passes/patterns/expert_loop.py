"""Experts one after the other: what each adds to the sums of its tokens, and the sum over all of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import Node

from ..expert_body import product_of_matrix, read_body
from ..interpret import CASTS, Reader, aten
from ..loop_values import (
    ExpertMask,
    ExpertSum,
    ExpertTerm,
    ExpertWeights,
    HitIndex,
    HitWeights,
    SumAtHits,
    Zeros,
)
from ..rule import Rule, Spelling
from ..values import Value
from .expert_hits import has_distinct_experts, hit_rows, token_hits


def _weighted_output(read: Reader, node: Node) -> Value | str | None:
    """expert(rows) * weights, where the weights say which expert is meant."""
    for weights_node, output in (node.args[:2], node.args[1::-1]):
        weights = read.value(weights_node)
        if not isinstance(weights, (HitWeights, ExpertWeights)) or read.dim(output) != 2:
            continue
        if isinstance(read.value(output), ExpertTerm):
            return f"{read.describe(node)} multiplies a second routing weight in"
        if not weights.column:
            return f"{read.describe(node)} must multiply each row by one weight, as a column"
        if isinstance(weights, ExpertWeights):
            return _term(read, output, weights.ids, weights.expert, None, weights.weights)
        return _term(read, output, weights.mask.ids, weights.mask.expert, weights.mask, weights.weights)
    return None


def _term(
    read: Reader, output: Node, ids: Node, expert: int, mask: ExpertMask | None, weights: Node | None
) -> ExpertTerm | str:
    body = read_body(read, output, product_of_matrix)
    if isinstance(body, str):
        return body
    tokens = set(body.rows)
    if mask is not None:
        rows = [hit_rows(read, node) for node in body.rows]
        if any(row is None or row.mask != mask or row.leading for row in rows):
            return f"the rows of expert {expert} at {read.describe(output)} are not the tokens that chose it"
        tokens = {row.x for row in rows if row is not None}
        if weights is None and "choice" not in mask.axes and not has_distinct_experts(read, ids):
            return f"expert {expert} adds once to a token that chooses it twice, without a weight"
    if len(tokens) != 1:
        return f"the linear maps of expert {expert} at {read.describe(output)} read different tokens"
    return ExpertTerm(body, ids, expert, mask, weights)


def _term_at(read: Reader, output: Any, mask: ExpertMask) -> ExpertTerm | str:
    """What an expert adds at the hits of ``mask``, weighted or not."""
    value = read.value(output)
    if not isinstance(output, Node) or read.dim(output) != 2:
        return f"what is added at the hits of expert {mask.expert} must be the outputs of its rows"
    term = value if isinstance(value, ExpertTerm) else _term(read, output, mask.ids, mask.expert, mask, None)
    if isinstance(term, ExpertTerm) and term.mask != mask:
        return f"the outputs of expert {term.expert} are added at the hits of another selection of tokens"
    return term


def _add_at_index(read: Reader, node: Node) -> Value | str | None:
    """sums.index_add(0, tokens, outputs)."""
    total, axis, index, outputs = node.args[:4]
    places = read.value(index)
    if not isinstance(places, HitIndex):
        return None
    if places.axis != "token" or read.axis(total, axis) != 0 or node.kwargs.get("alpha", 1) != 1 or node.args[4:]:
        return f"{read.describe(node)} must add the outputs of an expert to the sums of their tokens"
    return _grown(read, node, total, _term_at(read, outputs, places.mask))


def _zeros(read: Reader, node: Node) -> Value | None:
    """Where a sum begins."""
    if not isinstance(node.meta["val"], torch.Tensor) or not read.dtype(node).is_floating_point:
        return None
    if node.target in _FILLED and node.args[-1] != 0:
        return None
    return Zeros(is_empty=node.target in _EMPTY)


def _grown(read: Reader, node: Node, total: Node, term: ExpertTerm | str, *, is_written: bool = False) -> Value | str:
    """The sum in ``total`` and a term; ``is_written``: the term replaces what its tokens hold."""
    value = read.value(total)
    if isinstance(term, str):
        return term
    if isinstance(value, (Zeros, ExpertSum)) and value.is_empty and not is_written:
        return f"{read.describe(node)} adds to {read.describe(total)}, which holds anything where nothing was written"
    if isinstance(value, Zeros):
        return ExpertSum(None, term, value.is_empty, is_written)
    if isinstance(value, ExpertSum):
        return ExpertSum(total, term, value.is_empty, is_written)
    return f"{read.describe(node)} adds to {read.describe(total)}, which is neither zeros nor the sum of other experts"


def _add_to_taken(read: Reader, node: Node) -> Value | str | None:
    """sums[tokens] + outputs."""
    for taken_node, outputs in (node.args[:2], node.args[1::-1]):
        taken = read.value(taken_node)
        if not isinstance(taken, SumAtHits):
            continue
        if taken.term is not None or node.kwargs.get("alpha", 1) != 1:
            return f"{read.describe(node)} must add the outputs of an expert once"
        term = _term_at(read, outputs, taken.mask)
        return term if isinstance(term, str) else dataclasses.replace(taken, term=term)
    return None


def _put(read: Reader, node: Node) -> Value | str | None:
    """sums[tokens] = sums[tokens] + outputs, the same by accumulate=True, or = outputs of tokens of one choice."""
    total, indices, outputs, accumulate = read.arguments(node, None, None, None, False)
    mask = token_hits(read, indices[0]) if len(indices) == 1 else None
    if mask is None or not read.dtype(node).is_floating_point:
        return None
    value = read.value(outputs)
    if accumulate:
        return _grown(read, node, total, _term_at(read, outputs, mask))
    if isinstance(value, SumAtHits):
        if read.root(total) is not value.total or value.mask != mask or value.term is None:
            return f"{read.describe(node)} must write the sums back where they were read"
        if "choice" in mask.axes and not has_distinct_experts(read, mask.ids):
            return f"{read.describe(node)} adds once where a token chooses an expert twice; index_add adds all"
        return _grown(read, node, total, value.term)
    if read.dim(mask.ids) != 1:
        return f"{read.describe(node)} must add to the sums of tokens that choose several experts"
    return _grown(read, node, total, _term_at(read, outputs, mask), is_written=True)


def _add_dense(read: Reader, node: Node) -> Value | None:
    """sums + outputs of an expert on all tokens."""
    if node.kwargs.get("alpha", 1) != 1:
        return None
    for total, outputs in (node.args[1::-1], node.args[:2]):
        term, value = read.value(outputs), read.value(total)
        if not isinstance(term, ExpertTerm) or term.mask is not None:
            continue
        number = read.number(total)
        if value == Zeros() or (number is not None and number.value == 0):
            return ExpertSum(None, term)
        if isinstance(value, ExpertTerm) and value.mask is None:
            return ExpertSum(total, term)
        if isinstance(value, ExpertSum) and not value.is_empty:
            return ExpertSum(total, term)
    return None


def _cast_term(read: Reader, node: Node) -> Value | str | None:
    """A cast of outputs to the dtype of the tokens or a wider one, or of sums until they have the tokens' dtype."""
    value = read.value(node.args[0])
    term = value.term if isinstance(value, ExpertSum) else value
    if not isinstance(term, ExpertTerm):
        return None
    tokens = read.dtype(term.body.rows[0])
    if isinstance(value, ExpertSum):
        is_whole = read.dtype(node.args[0]) == tokens
        return None if is_whole else ExpertSum(node.args[0], None, value.is_empty)
    if read.holds(node, tokens):
        return value
    return f"{read.describe(node)} rounds expert outputs to {read.dtype(node)} before they are summed"


_FILLED = (aten.full.default, aten.full_like.default, aten.new_full.default)
_EMPTY = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
EXPERT_LOOP = Spelling(
    name="expert_loop",
    part="experts one by one",
    chain=(
        "linear, gate, linear, [* weights]; index_add, [tokens] += ..., [tokens] = ..., or + where every expert reads "
        "all tokens"
    ),
    rules=(
        Rule("weighted output", (aten.mul.Tensor,), _weighted_output),
        Rule("zeros", (*_ZEROS, *_FILLED, *_EMPTY), _zeros),
        Rule("sum at an index", (aten.index_add.default,), _add_at_index),
        Rule("sum at hits", (aten.add.Tensor,), _add_to_taken),
        Rule("write at hits", (aten.index_put.default,), _put),
        Rule("sum over all tokens", (aten.add.Tensor,), _add_dense),
        Rule("cast of an expert's outputs", CASTS, _cast_term),
    ),
    source="hand-written layers with an nn.ModuleList of experts; transformers before 5; Switch and NLLB routing",
)
