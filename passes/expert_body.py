"""What does one expert compute? Reads backwards from its output to its rows; never edits.

An expert of a loop is read when its output is weighted or summed, since nothing else tells its linear maps from those
of any other MLP.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from .expressions import expression_of, makes_halves, sliced_half
from .in_place import functional_form, local_form, write_problem
from .interpret import CASTS, Reader, aten
from .loop_values import Axis, ExpertBody
from .values import ExpertLinear, Expression

# A gate has a dozen; an expression is a tree, so a chain of steps that read a value twice would grow without bound.
_MAX_STEPS = 100
_HALVINGS = (aten.chunk.default, aten.split.Tensor)


class Product(NamedTuple):
    """Rows times a matrix of one expert, or times the stacked matrices of all.

    With stacked matrices, ``axes`` are the first two of the result, and ``rows_axes`` those of the rows, where the rows
    are not the tokens themselves.
    """

    rows: Node
    linear: ExpertLinear
    axes: tuple[Axis, ...] = ()
    rows_axes: tuple[Axis, ...] = ()


def read_body(read: Reader, output: Node, product_of: Callable[[Reader, Node], Product | None]) -> ExpertBody | str:
    """The expert that ``output`` comes from, or why it is none. ``product_of``: how its linear maps are spelled."""
    down = product_of(read, read.root(output))
    if down is None:
        return f"{read.describe(output)} must be the second linear map of an expert"
    reader = _GateReader(read, product_of, read.dtype(down.rows))
    expression = reader.expression(down.rows)
    if reader.problem is not None:
        return reader.problem
    if any(product.rows_axes or product.axes != down.rows_axes for product in reader.products):
        return f"the linear maps of the experts at {read.describe(output)} have their axes in different orders"
    rows = tuple(read.root(product.rows) for product in reader.products)
    return ExpertBody(rows, tuple(product.linear for product in reader.products), expression, down.linear)


class _GateReader:
    """What is between the two linear maps. ``problem``: why it cannot be read, once something could not."""

    def __init__(self, read: Reader, product_of: Callable[[Reader, Node], Product | None], dtype: torch.dtype) -> None:
        self._read, self._product_of, self._dtype = read, product_of, dtype
        self._num_steps = 0
        self.products: list[Product] = []
        self.problem: str | None = None

    def expression(self, arg: Any) -> Expression:
        number = self._read.number(arg)
        if number is not None:
            return number
        self._num_steps += 1
        if self.problem is not None or not isinstance(arg, Node) or self._num_steps > _MAX_STEPS:
            return self._lose("the gate between the two expert linears has more steps than any known gate")
        node = self._read.root(arg)
        if self._read.dim(node) < 2:
            return self._lose(f"{self._read.describe(node)} has no meaning inside an expert")
        leaf = self._leaf(node)
        if leaf is not None:
            return leaf
        if not self._read.holds(node, self._dtype):
            dtype = self._read.dtype(node)
            return self._lose(f"{self._read.describe(node)} changes the dtype inside an expert to {dtype}")
        if node.target in CASTS:
            return self.expression(node.args[0])
        if functional_form(node) is not node.target and (problem := write_problem(node)):
            return self._lose(problem)
        expression = expression_of(self._read, node, self.expression)
        if expression is None:
            return self._lose(f"{self._read.describe(node)} has no meaning inside an expert")
        return expression

    def _leaf(self, node: Node) -> Expression:
        """A linear map, or one half of its output."""
        source, half = node, "all"
        if node.target is operator.getitem and node.args[0].target in _HALVINGS:
            if makes_halves(self._read, node.args[0]):
                source, half = node.args[0].args[0], ("first", "second")[node.args[1]]
        elif node.target is aten.slice.Tensor and (sliced := sliced_half(self._read, node)) is not None:
            source, half = node.args[0], sliced
        product = self._product_of(self._read, self._read.root(source))
        if product is None:
            return None
        if self._read.dtype(product.rows) != self._dtype:
            return self._lose(f"{self._read.describe(node)} has other dtypes than the second linear map of the expert")
        if product not in self.products:
            self.products.append(product)
        return (self.products.index(product), half)

    def _lose(self, why: str) -> Expression:
        """No expression, and why."""
        self.problem = self.problem or why
        return None


# ---- linear maps of single experts


def product_of_matrix(read: Reader, node: Node) -> Product | None:
    """linear(rows, W[, b]), rows @ W, addmm(b, rows, W), and any of them + b."""
    if read.dim(node) != 2:
        return None
    target = local_form(node)
    if target is aten.linear.default:
        rows, matrix, bias = read.arguments(node, None, None, None)
        weight, swapped = matrix_of(read, matrix)
        return _product(read, node, rows, ExpertLinear(weight, "in_out" if swapped else "out_in"), bias)
    if target in (aten.mm.default, aten.matmul.default) or (target is aten.addmm.default and not node.kwargs):
        bias, rows, matrix = node.args if target is aten.addmm.default else (None, *node.args)
        weight, swapped = matrix_of(read, matrix)
        linear = ExpertLinear(weight, "in_out")
        if swapped:
            linear = ExpertLinear(weight, "out_in", transposed=read.root(matrix))
        return _product(read, node, rows, linear, bias)
    if target is aten.add.Tensor and not node.kwargs and isinstance(node.args[0], Node):
        product = product_of_matrix(read, read.root(node.args[0]))
        if product is not None and product.linear.bias is None:
            return _product(read, node, product.rows, product.linear, node.args[1], must_have_bias=True)
    return None


def _product(
    read: Reader, node: Node, rows: Node, linear: ExpertLinear, bias: Any, *, must_have_bias: bool = False
) -> Product | None:
    if read.dim(rows) != 2 or read.dim(linear.weight) != 2 or read.dtype(rows) != read.dtype(node):
        return None
    if bias is None:
        return None if must_have_bias else Product(rows, linear)
    if not isinstance(bias, Node) or read.dim(bias) != 1 or read.dtype(bias) != read.dtype(node):
        return None
    if not read.same_sizes(read.shape(bias), read.shape(node)[1:]):
        return None
    return Product(rows, dataclasses.replace(linear, bias=read.root(bias)))


def matrix_of(read: Reader, node: Node) -> tuple[Node, bool]:
    """The matrix that ``node`` is a view of, and whether it is seen transposed."""
    node, swapped = read.root(node), False
    while read.dim(node) == 2 and (swaps := _swaps_axes(read, node)) is not None:
        node, swapped = read.root(node.args[0]), swapped ^ swaps
    return node, swapped


def _swaps_axes(read: Reader, node: Node) -> bool | None:
    """Whether a view exchanges the two axes of a matrix; None for what is no such view."""
    if node.target in (aten.t.default, aten.numpy_T.default, aten.mT.default):
        return True
    if node.target is aten.transpose.int:
        return read.axis(node, node.args[1]) != read.axis(node, node.args[2])
    if node.target is aten.permute.default:
        return [read.axis(node, axis) for axis in node.args[1]] == [1, 0]
    return None
