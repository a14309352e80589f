"""Outputs grouped by token before their routing weights: ``(outputs.view(T, K, D) * weights.unsqueeze(-1)).sum(1)``."""

from __future__ import annotations

import dataclasses

from torch.fx import Node

from ..interpret import Reader, aten
from ..rule import Rule, Spelling
from ..values import ChoiceGrid, ExpertOutput, UnweightedGrid, Value


def _grid(read: Reader, node: Node) -> Value | str | None:
    """[R, D] -> [T, K, D] before the routing weights."""
    rows = read.value(node.args[0])
    if not isinstance(rows, ExpertOutput) or rows.order is not None or rows.weights is not None:
        return None
    sizes = (*read.shape(rows.hidden.ids), read.shape(node.args[0])[-1])
    if read.dim(node) != 3 or rows.unit_axis is not None:
        return None
    if not read.same_sizes(read.shape(node), sizes):
        have = list(read.shape(node))
        return f"{read.describe(node)} must group rows as {list(sizes)}, got {have}; write the width and not -1"
    return UnweightedGrid(rows)


def _unweighted_sum(read: Reader, node: Node) -> str | None:
    if isinstance(read.value(node.args[0]), UnweightedGrid):
        return f"{read.describe(node)} sums expert outputs before the routing weight is multiplied in"
    return None


def _weigh_grid(read: Reader, node: Node) -> Value | str | None:
    """Outputs [T, K, D] times weights [T, K, 1]."""
    grids = [value for arg in node.args[:2] if isinstance(value := read.value(arg), UnweightedGrid)]
    others = [arg for arg in node.args[:2] if not isinstance(read.value(arg), UnweightedGrid)]
    if len(grids) != 1 or len(others) != 1 or not isinstance(others[0], Node):
        return None
    column = read.root(others[0])
    weights = column.args[0] if column.target is aten.unsqueeze.default else None
    if weights is None or read.dim(weights) != 2 or column.args[1] not in (2, -1):
        return f"{read.describe(node)} must multiply expert outputs [T, K, D] by their routing weights [T, K, 1]"
    ids = grids[0].output.hidden.ids
    if not read.same_sizes(read.shape(weights), read.shape(ids)) or not read.dtype(weights).is_floating_point:
        return f"{read.describe(node)} must multiply by one floating-point weight for each choice"
    return ChoiceGrid(dataclasses.replace(grids[0].output, weights=read.root(weights)))


BY_TOKEN = Spelling(
    name="by_token",
    part="weighted sum",
    chain="outputs in choice order, view [T, K, D], * weights[:, :, None], sum over K",
    rules=(
        Rule("outputs by token", (aten.view.default, aten.reshape.default), _grid),
        Rule("weights by token", (aten.mul.Tensor,), _weigh_grid),
        Rule("sum without weights", (aten.sum.dim_IntList,), _unweighted_sum),
    ),
    source="hand-written layers, transformers' all-to-all experts",
)
