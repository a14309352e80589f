"""What is computed between the two linear maps of an expert, as an expression? Reads single nodes; never edits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.fx import Node

from .in_place import functional_form
from .interpret import Reader, aten
from .values import Expression, Number

# Elementwise operators that expressions may hold, by the name they have there.
UNARY = {
    aten.silu.default: "silu",
    aten.sigmoid.default: "sigmoid",
    aten.gelu.default: "gelu",
    aten.relu.default: "relu",
    aten.tanh.default: "tanh",
    aten.square.default: "square",
}
BINARY = {aten.mul.Tensor: "mul", aten.add.Tensor: "add", aten.div.Tensor: "div"}


def expression_of(read: Reader, node: Node, operand: Callable[[Any], Expression]) -> Expression:
    """An elementwise node as an expression over those of its operands; None where no gate has such a step."""
    target = functional_form(node)
    if target in UNARY:
        name = UNARY[target]
        if name == "gelu" and node.kwargs.get("approximate", "none") == "tanh":
            name = "gelu_tanh"
        return (name, operand(node.args[0]))
    if target in BINARY and node.kwargs.get("alpha", 1) == 1:
        operands = (operand(node.args[0]), operand(node.args[1]))
        return (BINARY[target], *operands) if None not in operands else None
    if target is aten.pow.Tensor_Scalar and node.args[1] == 2:
        return ("square", operand(node.args[0]))
    if target is aten.clamp.default:
        low, high = (*node.args[1:], None, None)[:2]
        bounds = [read.number(bound) for bound in (low, high)]
        if any(bound is None and arg is not None for bound, arg in zip(bounds, (low, high), strict=True)):
            return None
        if all(map(_is_no_limit, bounds, (-1, 1))):
            return operand(node.args[0])
        return ("clamp", operand(node.args[0]), *bounds)
    return None


def _is_no_limit(bound: Number | None, sign: int) -> bool:
    """Whether a lower (``sign`` -1) or upper bound lets every number pass, at every call."""
    return bound is None or (bound.symbol is None and bound.value == sign * math.inf)


def makes_halves(read: Reader, node: Node) -> bool:
    """Whether a chunk or split makes two equal parts of the last axis."""
    source, axis = node.args[0], read.arguments(node, None, None, node.kwargs.get("dim", 0))[2]
    width = read.static_size(source, -1)
    if read.axis(source, axis) != read.dim(source) - 1 or width is None or width % 2:
        return False
    return node.args[1] == (2 if node.target is aten.chunk.default else width // 2)


def sliced_half(read: Reader, node: Node) -> str | None:
    """Which half a slice is of the last axis: [..., ::2], [..., 1::2], [..., :F] or [..., F:]."""
    source, axis, start, end, step = read.arguments(node, None, 0, None, None, 1)
    width = read.static_size(source, -1)
    start, end = start or 0, width if end is None else end
    if read.axis(source, axis) != read.dim(source) - 1 or width is None or width % 2:
        return None
    if not isinstance(start, int) or not isinstance(end, int):
        return None
    end = min(end, width)
    if step == 2 and end == width and start in (0, 1):
        return ("even", "odd")[start]
    if step == 1 and (start, end) in ((0, width // 2), (width // 2, width)):
        return "first" if start == 0 else "second"
    return None
