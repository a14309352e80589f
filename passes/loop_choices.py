"""Which terms of a sum belong to one expert? Loops over the choices of a token, with a loop over the experts inside.

Axes: T tokens, K choices per token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from torch.fx import Node

from .interpret import Reader, aten
from .loop_values import ExpertTerm
from .loop_weights import entry_of
from .patterns.expert_hits import before_unit_axis, hit_rows
from .values import ExpertLinear


class _Column(NamedTuple):
    """One choice of every token: a column of [T, K]."""

    of: Node
    choice: int


def terms_by_expert(read: Reader, terms: Sequence[ExpertTerm], *, replaces: bool) -> dict[int, ExpertTerm] | str:
    """The terms of a sum by expert, or why they are not one for each.

    Where every choice of a token has terms of its own, those of one expert become one term with the ids [T, K].
    ``replaces``: a term replaces what its tokens held.
    """
    by_column: dict[_Column, list[ExpertTerm]] = {}
    for term in terms:
        column = _column(read, term.ids)
        if column is None or any(column.of is not other.of for other in by_column):
            return _one_each(terms)
        by_column.setdefault(column, []).append(term)
    by_choice: dict[_Column, dict[int, ExpertTerm]] = {}
    for column, of_choice in by_column.items():
        by_expert = _one_each(of_choice)
        if isinstance(by_expert, str):
            return by_expert
        by_choice[column] = by_expert
    if len(by_choice) == 1 and read.static_size(next(iter(by_choice)).of, 1) != 1:
        return _one_each(terms)
    return _joined(read, by_choice, replaces)


def _one_each(terms: Sequence[ExpertTerm]) -> dict[int, ExpertTerm] | str:
    found: dict[int, ExpertTerm] = {}
    for term in terms:
        if term.expert in found:
            return f"expert {term.expert} is added twice to one sum"
        found[term.expert] = term
    return found


def _joined(
    read: Reader, choices: dict[_Column, dict[int, ExpertTerm]], replaces: bool
) -> dict[int, ExpertTerm] | str:
    """One term per expert for those of all choices."""
    first_column, *_ = choices
    top_k = read.static_size(first_column.of, 1)
    assert top_k is not None, "a column is one of a known number"
    numbers = sorted(column.choice for column in choices)
    if numbers != list(range(top_k)):
        return f"the sum is over the choices {numbers} of a token, and a token has {top_k}"
    if replaces and len(choices) > 1:
        return "the outputs for one choice of a token replace those for another"
    first = choices[first_column]
    of_first = _column_of_weights(read, first[min(first)])
    weights = of_first.of if of_first is not None else None
    for column, terms in choices.items():
        if terms.keys() != first.keys():
            return f"choice {column.choice} has other experts than choice {first_column.choice}"
        for expert, term in terms.items():
            if _computes(read, term) != _computes(read, first[expert]):
                return f"expert {expert} computes something else for choice {column.choice}"
            is_weighted_so = _column_of_weights(read, term) == (weights and _Column(weights, column.choice))
            if not is_weighted_so or (term.weights is None) != (weights is None):
                return f"expert {expert} is weighted by other weights than those of choice {column.choice}"
    return {expert: dataclasses.replace(term, ids=first_column.of, weights=weights) for expert, term in first.items()}


def _column(read: Reader, node: Node) -> _Column | None:
    node = read.root(node)
    if node.target is not aten.select.int or read.dim(node.args[0]) != 2 or read.axis(*node.args[:2]) != 1:
        return None
    top_k, choice = read.static_size(node.args[0], 1), node.args[2]
    return _Column(read.root(node.args[0]), choice % top_k) if top_k and isinstance(choice, int) else None


def _column_of_weights(read: Reader, term: ExpertTerm) -> _Column | None:
    if term.weights is None:
        return None
    inner = before_unit_axis(read, term.weights, axis=1)
    return _column(read, term.weights if inner is None else inner)


def _computes(read: Reader, term: ExpertTerm) -> tuple[object, ...]:
    """What a term computes, whatever rows it does it for."""
    linears: list[ExpertLinear] = [*term.body.first, term.body.down]
    weights = [(_place(read, each.weight), each.layout, _place(read, each.bias)) for each in linears]
    return tokens_of(read, term), term.body.expression, weights


def _place(read: Reader, weight: Node | None) -> object:
    """Where a weight is: an entry of a stack is the same one however often it is taken."""
    return None if weight is None else entry_of(read, weight) or weight


def tokens_of(read: Reader, term: ExpertTerm) -> Node:
    """The tokens [T, D] that an expert reads, all or some."""
    rows = hit_rows(read, term.body.rows[0]) if term.mask is not None else None
    return rows.x if rows is not None else term.body.rows[0]
