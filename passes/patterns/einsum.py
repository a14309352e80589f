"""Experts as einsum of each row with its own weights: ``torch.einsum("rd,rfd->rf", rows, weight[ids])``."""

from __future__ import annotations

from torch.fx import Node

from ...facts import WeightLayout
from ..interpret import Reader, aten
from ..rule import Rule, Spelling
from ..values import Gated, SelectedByExpert, TokenRows, Value
from .batched_mm import expert_linear


def _einsum_product(read: Reader, node: Node) -> Value | str | None:
    """The einsum of rows [R, K] and selected matrices [R, N, K] or [R, K, N], in either order."""
    equation, operands = node.args[:2]
    if not isinstance(operands, (list, tuple)) or len(operands) != 2:
        return None
    values = [read.value(operand) for operand in operands]
    selected = next((value for value in values if isinstance(value, SelectedByExpert)), None)
    rows = next((value for value in values if isinstance(value, (TokenRows, Gated))), None)
    if selected is None or rows is None:
        return None
    layout = _layout(str(equation), rows_first=values[0] is rows)
    if layout is None or rows.unit_axis is not None or read.dim(selected.of) != 3:
        return f"{read.describe(node)} must multiply one row by one [E, a, b] matrix of its expert, got {equation!r}"
    return expert_linear(read, node, rows, selected, layout)


def _layout(equation: str, *, rows_first: bool) -> WeightLayout | None:
    """How the matrix lies, from the letters: rn = rk * rnk (out_in) or rn = rk * rkn (in_out)."""
    inputs, _, out = equation.replace(" ", "").partition("->")
    row, matrix = inputs.split(",") if rows_first else reversed(inputs.split(","))
    if (len(row), len(matrix), len(out)) != (2, 3, 2) or len(set(row + out)) != 3 or row[0] != out[0]:
        return None
    layouts: dict[str, WeightLayout] = {out + row[1]: "out_in", row + out[1]: "in_out"}
    return layouts.get(matrix)


EINSUM = Spelling(
    name="einsum",
    part="expert linears",
    chain='einsum("rd,rfd->rf", rows, gate_up[ids]), gate, einsum("rf,rdf->rd", hidden, down[ids])',
    rules=(Rule("einsum product", (aten.einsum.default,), _einsum_product),),
    source="hand-written layers",
)
