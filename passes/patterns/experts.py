"""What happens to routed rows inside an expert, whatever product the spelling uses: gather, bias, gate, combine."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

from torch.fx import Node

from ..expressions import BINARY, UNARY, expression_of, makes_halves, sliced_half
from ..interpret import CASTS, Reader, aten
from ..rule import Rule, Spelling
from ..values import (
    ChoiceGrid,
    Combined,
    ExpertOutput,
    Expression,
    Gated,
    Hidden,
    HiddenHalves,
    InversePermutation,
    PerChoice,
    RowToken,
    SelectedByExpert,
    TokenRows,
    Value,
)


def _gather(read: Reader, node: Node) -> Value | str | None:
    """x[token of row], parameter[expert of row], and rows[inverse permutation]."""
    source, indices = node.args[0], node.args[1]
    if not isinstance(indices, (list, tuple)) or len(indices) != 1 or not isinstance(source, Node):
        return None
    index = read.value(indices[0])
    if isinstance(index, RowToken) and read.dim(source) == 2:
        return TokenRows(read.root(source), index.order, index.top_k)
    if isinstance(index, PerChoice) and not index.column and not read.dtype(index.of).is_floating_point:
        return SelectedByExpert(read.root(source), index.of, index.order)
    rows = read.value(source)
    if not isinstance(rows, ExpertOutput):
        return None
    if not isinstance(index, InversePermutation) or rows.order is not index.order:
        return f"{read.describe(node)} must undo the permutation that ordered the rows, by its inverse"
    return dataclasses.replace(rows, order=None)


def _repeat_tokens(read: Reader, node: Node) -> Value | str | None:
    """x.repeat_interleave(K, dim=0): token rows in choice order."""
    source, repeats, axis = (*node.args, None)[:3]
    axis = node.kwargs.get("dim", axis)
    if isinstance(source, Node) and read.dim(source) == 2 and axis in (0, -2):
        if not isinstance(repeats, int):
            return f"{read.describe(node)} must repeat each token a constant number of times"
        return TokenRows(read.root(source), order=None, top_k=repeats)
    return None


def _bias(read: Reader, node: Node) -> Value | str | None:
    """rows + bias[expert of row], on either linear map."""
    rows, bias = read.value(node.args[0]), read.value(node.args[1])
    if not isinstance(rows, (Hidden, ExpertOutput)) or not isinstance(bias, SelectedByExpert):
        return None
    if rows.unit_axis is not None:
        return f"{read.describe(node)} adds a bias to one-row matrices; it must be added to [R, N] rows"
    linear, order = (rows.gate_up, rows.rows.order) if isinstance(rows, Hidden) else (rows.down, rows.order)
    ids = rows.ids if isinstance(rows, Hidden) else rows.hidden.ids
    if linear.bias is not None:
        return f"{read.describe(node)} adds a second bias"
    if isinstance(rows, ExpertOutput) and rows.weights is not None:
        return f"{read.describe(node)} adds a bias after the routing weight"
    if node.kwargs.get("alpha", 1) != 1:
        return f"{read.describe(node)} scales the bias by {node.kwargs['alpha']}"
    if bias.order is not order or not read.same_tensor(bias.ids, ids):
        return f"{read.describe(node)} adds a bias of other experts than those of the rows"
    if read.dim(bias.of) != 2 or read.dtype(node) != read.dtype(node.args[0]):
        return f"{read.describe(node)} must add one [E, N] bias in the rows' dtype"
    with_bias = dataclasses.replace(linear, bias=bias.of)
    if isinstance(rows, Hidden):
        return dataclasses.replace(rows, gate_up=with_bias)
    return dataclasses.replace(rows, down=with_bias)


def _halve(read: Reader, node: Node) -> Value | None:
    hidden = read.value(node.args[0])
    if not isinstance(hidden, Hidden) or hidden.unit_axis is not None:
        return None
    return HiddenHalves(hidden) if makes_halves(read, node) else None


def _half(read: Reader, node: Node) -> Value | None:
    halves = read.value(node.args[0])
    if isinstance(halves, HiddenHalves):
        return Gated(halves.hidden, ("first", "second")[node.args[1]])
    return None


def _half_by_slice(read: Reader, node: Node) -> Value | None:
    hidden = read.value(node.args[0])
    if not isinstance(hidden, Hidden) or hidden.unit_axis is not None:
        return None
    half = sliced_half(read, node)
    return None if half is None else Gated(hidden, half)


def _elementwise(read: Reader, node: Node) -> Value | str | None:
    gated = {arg: value for arg in node.all_input_nodes if (value := _as_gated(read, arg)) is not None}
    if not gated:
        return None
    first, *_ = gated
    hidden = gated[first].hidden
    if any(value.hidden != hidden or value.unit_axis is not None for value in gated.values()):
        return f"{read.describe(node)} mixes values of two expert linears"
    if not read.holds(node, read.dtype(hidden.rows.x)):
        return f"{read.describe(node)} changes the dtype inside an expert to {read.dtype(node)}"
    expression = expression_of(read, node, lambda arg: _operand(read, arg))
    return Gated(hidden, expression) if expression is not None else None


def _as_gated(read: Reader, arg: object) -> Gated | None:
    """Elementwise values of the first linear, or all of it, where it has no gate."""
    value = read.value(arg)
    if isinstance(value, Hidden):
        return Gated(value, "all", value.unit_axis)
    return value if isinstance(value, Gated) else None


def _operand(read: Reader, arg: Any) -> Expression:
    value = _as_gated(read, arg)
    return value.expression if value is not None else read.number(arg)


def _weight(read: Reader, node: Node) -> Value | str | None:
    """expert output * routing weight of the row."""
    values = [read.value(node.args[0]), read.value(node.args[1])]
    rows = next((value for value in values if isinstance(value, ExpertOutput)), None)
    weights = next((value for value in values if isinstance(value, PerChoice)), None)
    if rows is None or weights is None:
        return None
    if rows.weights is not None:
        return f"{read.describe(node)} multiplies a second routing weight in"
    if not weights.column or rows.unit_axis is not None or not read.dtype(weights.of).is_floating_point:
        return f"{read.describe(node)} must multiply each row by one floating-point weight"
    if rows.order is not weights.order:
        return f"{read.describe(node)} multiplies rows by weights that are in another row order"
    return dataclasses.replace(rows, weights=weights.of)


def _widen(read: Reader, node: Node) -> Value | str | None:
    """A cast to a wider dtype: of the gate, until the second linear, and of what follows that, until it is summed."""
    value = read.value(node.args[0])
    if isinstance(value, Gated) and read.holds(node, read.dtype(value.hidden.rows.x)):
        return value
    if isinstance(value, (Hidden, Gated, TokenRows)):
        return f"{read.describe(node)} changes the dtype inside an expert to {read.dtype(node)}"
    if not isinstance(value, (ExpertOutput, ChoiceGrid, Combined)):
        return None
    before, after = read.dtype(node.args[0]), read.dtype(node)
    output = value if isinstance(value, ExpertOutput) else value.output
    final = isinstance(value, Combined) and after == read.dtype(output.hidden.rows.x)
    if final or read.holds(node, before):
        return value
    if isinstance(value, Combined):
        return f"{read.describe(node)} casts the sum to {after}, the tokens are {read.dtype(output.hidden.rows.x)}"
    return f"{read.describe(node)} rounds expert outputs to {after} before they are summed"


def _grid(read: Reader, node: Node) -> Value | str | None:
    """[R, D] -> [T, K, D]."""
    rows = read.value(node.args[0])
    if not isinstance(rows, ExpertOutput) or rows.unit_axis is not None or read.dim(node) != 3:
        return None
    if rows.order is not None:
        return f"{read.describe(node)} groups rows by token while they are still sorted by expert"
    if rows.weights is None:  # by_token.py reads these
        return None
    _, width = read.shape(node.args[0])
    tokens, choices = read.shape(rows.weights)
    if not read.same_sizes(read.shape(node), (tokens, choices, width)):
        return f"{read.describe(node)} must group rows as [tokens, choices, width], got {list(read.shape(node))}"
    return ChoiceGrid(rows)


def _combine(read: Reader, node: Node) -> Value | str | None:
    grid = read.value(node.args[0])
    if not isinstance(grid, ChoiceGrid):
        return None
    axes = [read.axis(node.args[0], axis) for axis in node.args[1] or ()]
    keepdim = read.arguments(node, None, None, False)[2]
    if axes != [1] or keepdim:
        return f"{read.describe(node)} must sum over the choices alone, got axes {axes}, keepdim={bool(keepdim)}"
    if not read.holds(node, read.dtype(node.args[0])):
        return f"{read.describe(node)} rounds expert outputs to {read.dtype(node)} before they are summed"
    return Combined(grid.output)


def _unit_axis(read: Reader, node: Node) -> Value | None:
    """unsqueeze of rows to one-row matrices, for batched products."""
    value = read.value(node.args[0])
    if not isinstance(value, (TokenRows, Gated)) or value.unit_axis is not None or not isinstance(node.args[1], int):
        return None
    axis = node.args[1] % read.dim(node)
    if axis == 1:
        return dataclasses.replace(value, unit_axis=1)
    return dataclasses.replace(value, unit_axis=2) if axis == 2 else None


def _no_unit_axis(read: Reader, node: Node) -> Value | None:
    value = read.value(node.args[0])
    if not isinstance(value, (Hidden, ExpertOutput)) or value.unit_axis is None:
        return None
    if read.axis(node.args[0], node.args[1]) != value.unit_axis:
        return None
    return dataclasses.replace(value, unit_axis=None)


EXPERTS = Spelling(
    name="experts",
    part="inside an expert",
    chain=(
        "gather of token rows, + bias[expert], [halves], elementwise activation, [step of its own], * weight, "
        "view [T, K, D], sum over K"
    ),
    rules=(
        Rule("gather rows", (aten.index.Tensor,), _gather),
        Rule("repeat tokens", (aten.repeat_interleave.self_int,), _repeat_tokens),
        Rule("expert bias", (aten.add.Tensor,), _bias),
        Rule("halves", (aten.chunk.default, aten.split.Tensor), _halve),
        Rule("half of a pair", (operator.getitem,), _half),
        Rule("half by slice", (aten.slice.Tensor,), _half_by_slice),
        Rule("elementwise gate", (*UNARY, *BINARY, aten.pow.Tensor_Scalar, aten.clamp.default), _elementwise),
        Rule("routing weight", (aten.mul.Tensor,), _weight),
        Rule("cast of outputs", CASTS, _widen),
        Rule("rows by token", (aten.view.default, aten.reshape.default), _grid),
        Rule("sum over choices", (aten.sum.dim_IntList,), _combine),
        Rule("one-row matrices", (aten.unsqueeze.default,), _unit_axis),
        Rule("rows again", (aten.squeeze.dim,), _no_unit_axis),
    ),
    source="transformers grouped_mm and batched_mm experts",
)
