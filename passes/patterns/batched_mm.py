"""Experts as batched matrix products with each row's own weights: transformers' ``batched_mm``."""

from __future__ import annotations

import dataclasses

from torch.fx import Node

from ...facts import WeightLayout
from ..interpret import Reader, aten
from ..rule import Rule, Spelling
from ..values import ExpertLinear, ExpertOutput, Gated, Hidden, SelectedByExpert, TokenRows, Value


def _batched_product(read: Reader, node: Node) -> Value | str | None:
    """bmm(W[expert of row], row as a column) or bmm(row as a row, W[expert of row])."""
    left, right = read.value(node.args[0]), read.value(node.args[1])
    selected = next((value for value in (left, right) if isinstance(value, SelectedByExpert)), None)
    rows = next((value for value in (left, right) if isinstance(value, (TokenRows, Gated))), None)
    if selected is None:
        return None
    if rows is None:
        if isinstance(left, Hidden) or isinstance(right, Hidden):
            return f"there is no gate between the two expert linears at {read.describe(node)}"
        return f"{read.describe(node)} multiplies selected expert weights by rows that are not gathered tokens"
    unit_axis = 2 if selected is left else 1
    if rows.unit_axis != unit_axis or read.dim(selected.of) != 3:
        return f"{read.describe(node)} must multiply one row by one [E, a, b] matrix of its expert"
    value = expert_linear(read, node, rows, selected, "out_in" if selected is left else "in_out")
    return value if isinstance(value, str) else dataclasses.replace(value, unit_axis=unit_axis)


def expert_linear(
    read: Reader, node: Node, rows: TokenRows | Gated, selected: SelectedByExpert, layout: WeightLayout
) -> Hidden | ExpertOutput | str:
    """Each row times the matrix of its own expert: the first expert linear on tokens, the second on gated rows."""
    tokens = rows if isinstance(rows, TokenRows) else rows.hidden.rows
    if selected.order is not tokens.order:
        return f"{read.describe(node)} multiplies rows by weights of experts in another row order"
    linear = ExpertLinear(selected.of, layout)
    if isinstance(rows, Gated):
        if not read.same_tensor(selected.ids, rows.hidden.ids):
            return f"{read.describe(node)} uses other expert ids than the first expert linear"
        return ExpertOutput(rows.hidden, rows.expression, linear, tokens.order)
    choices = read.shape(selected.ids)[1]
    if rows.top_k != choices:
        return f"{read.describe(node)} repeats each token {rows.top_k} times for {choices} expert ids per token"
    return Hidden(dataclasses.replace(rows, unit_axis=None), selected.ids, linear)


BATCHED_MM = Spelling(
    name="batched_mm",
    part="expert linears",
    chain="x.repeat_interleave(K, 0), bmm(gate_up[ids], x), gate, bmm(down[ids], h), * weight, view [T, K, D], sum",
    rules=(Rule("batched product", (aten.bmm.default,), _batched_product),),
    source='transformers experts_implementation="batched_mm"',
)
