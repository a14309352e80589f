"""Which tensors hold the weights of experts that run one by one? Stacks where there are, else lists; never edits."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch.fx import Node

from ..facts import WeightLayout, Weights, nodes_of
from .interpret import Reader, aten
from .loop_values import ExpertBody
from .values import ExpertLinear


class LoopWeights(NamedTuple):
    """As in ``MoEMatch``, but nodes of the view."""

    gate_up: Weights
    gate_up_bias: Weights | None
    down: Weights
    down_bias: Weights | None

    def nodes(self) -> list[Node]:
        return [node for each in self for node in nodes_of(each)]

    def sources(self, read: Reader) -> list[Node]:
        """The nodes, and the stacks that they are entries of: a loop may take an entry more than once."""
        entries = (entry_of(read, node) for node in self.nodes())
        return [*self.nodes(), *(entry[0] for entry in entries if entry is not None)]


def loop_weights(read: Reader, bodies: Sequence[ExpertBody], order: Sequence[int]) -> LoopWeights:
    """Stacks, where all weights and biases are entries of stacks; else lists, all gates before all up halves.

    In a list, a stack stands for its entries.
    """
    maps = [[body.first[index] for body in bodies] for index in order]
    down = [body.down for body in bodies]
    is_stacked = read.dim(down[0].weight) == 3
    gate_ups = [_one_stack(read, [linear.weight for linear in each], is_stacked) for each in maps]
    gate_up_biases = [_one_stack(read, _biases(each), is_stacked) for each in maps]
    downs = _one_stack(read, [linear.weight for linear in down], is_stacked)
    down_biases = _one_stack(read, _biases(down), is_stacked)
    parts = [*gate_ups, *gate_up_biases, downs, down_biases]
    if len(order) == 1 and all(len(part) == 1 or not part for part in parts):
        gate_up, gate_up_bias, down_stack, down_bias = (part[0] if part else None for part in parts)
        assert gate_up is not None and down_stack is not None, "every linear map has a weight"
        return LoopWeights(gate_up, gate_up_bias, down_stack, down_bias)
    first, first_biases = (tuple(itertools.chain.from_iterable(each)) for each in (gate_ups, gate_up_biases))
    return LoopWeights(first, first_biases or None, tuple(downs), tuple(down_biases) or None)


def _one_stack(read: Reader, nodes: Sequence[Node], is_stacked: bool) -> list[Node]:
    """The stack whose entries ``nodes`` are, alone; ``nodes`` where there is none."""
    if not nodes or is_stacked:
        return list(nodes)
    stack = _stack_of(read, nodes)
    return list(nodes) if stack is None else [stack]


def taken_again(read: Reader, weights: LoopWeights, region: Iterable[Node]) -> str | None:
    """Why ``weights``, with entries of stacks among them, are not all that ``region`` reads of the experts, if so."""
    given = {entry_of(read, node) for node in weights.nodes()} - {None}
    again = next((node for node in sorted(region) if entry_of(read, node) in given), None)
    return f"{read.describe(again)} takes the weights of an expert from their stack once more" if again else None


def layouts_of(body: ExpertBody) -> set[WeightLayout]:
    return {linear.layout for linear in (*body.first, body.down)}


def in_one_layout(body: ExpertBody) -> ExpertBody:
    """``body`` with all weights in one layout, where views in the graph allow it."""
    if len(layouts_of(body)) == 1:
        return body
    return dataclasses.replace(
        body, first=tuple(_as_in_out(linear) for linear in body.first), down=_as_in_out(body.down)
    )


def _as_in_out(linear: ExpertLinear) -> ExpertLinear:
    if linear.layout == "in_out" or linear.transposed is None:
        return linear
    return ExpertLinear(linear.transposed, "in_out", linear.bias)


def _biases(linears: Sequence[ExpertLinear]) -> list[Node]:
    return [linear.bias for linear in linears if linear.bias is not None]


def _stack_of(read: Reader, nodes: Sequence[Node]) -> Node | None:
    """The tensor whose entries 0, 1, 2, ... ``nodes`` are, all of them."""
    entries = [entry_of(read, node) for node in nodes]
    stack = entries[0][0] if entries[0] is not None else None
    if stack is None or read.static_size(stack, 0) != len(nodes):
        return None
    return stack if entries == [(stack, index) for index in range(len(nodes))] else None


def entry_of(read: Reader, node: Node) -> tuple[Node, int] | None:
    """The tensor that ``node`` is an entry of, and which one."""
    if node.target is aten.select.int and read.axis(node.args[0], node.args[1]) == 0:
        index = node.args[2]
        return (read.root(node.args[0]), index) if isinstance(index, int) else None
    if node.target is operator.getitem and node.args[0].target is aten.unbind.int:
        unbound = node.args[0]
        axis = read.arguments(unbound, None, 0)[1]
        return (read.root(unbound.args[0]), node.args[1]) if axis in (0, -read.dim(unbound.args[0])) else None
    return None
