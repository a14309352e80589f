"""Which tensors hold the weights of experts that run one by one? Stacks where there are, else lists; never edits."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
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


def loop_weights(read: Reader, bodies: Sequence[ExpertBody], order: Sequence[int]) -> LoopWeights:
    """Stacks, where all weights and biases are entries of stacks; else lists, all gates before all up halves."""
    first = [body.first[index] for index in order for body in bodies]
    down = [body.down for body in bodies]
    lists = [[linear.weight for linear in first], _biases(first), [linear.weight for linear in down], _biases(down)]
    is_stacked = read.dim(down[0].weight) == 3
    stacks = [(each[0] if is_stacked else _stack_of(read, each)) if each else None for each in lists]
    if len(order) == 1 and all(stack is not None or not each for stack, each in zip(stacks, lists, strict=True)):
        gate_up, gate_up_bias, down_stack, down_bias = stacks
        assert gate_up is not None and down_stack is not None, "every linear map has a weight"
        return LoopWeights(gate_up, gate_up_bias, down_stack, down_bias)
    return LoopWeights(*(tuple(each) if each else None for each in lists))


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
    entries = [_entry(read, node) for node in nodes]
    stack = entries[0][0] if entries[0] is not None else None
    if stack is None or read.static_size(stack, 0) != len(nodes):
        return None
    return stack if entries == [(stack, index) for index in range(len(nodes))] else None


def _entry(read: Reader, node: Node) -> tuple[Node, int] | None:
    """The tensor that ``node`` is an entry of, and which one."""
    if node.target is aten.select.int and read.axis(node.args[0], node.args[1]) == 0:
        index = node.args[2]
        return (read.root(node.args[0]), index) if isinstance(index, int) else None
    if node.target is operator.getitem and node.args[0].target is aten.unbind.int:
        unbound = node.args[0]
        axis = read.arguments(unbound, None, 0)[1]
        return (read.root(unbound.args[0]), node.args[1]) if axis in (0, -read.dim(unbound.args[0])) else None
    return None
