"""Which layers of a graph were one node when it was captured? Those whose experts ``prepare`` shared; never edits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from . import observe
from .facts import ParallelSpec
from .passes.match_context import layer_name


def prepared_layers(graph: Graph) -> Iterator[observe.LayerReport]:
    """A row for each layer that ``prepare`` made one node before the graph was captured."""
    op = torch.ops.perseus.experts_parallel
    for node in graph.nodes:
        if node.target not in (op, op.default):
            continue
        yield observe.LayerReport(
            layer=layer_name(node),
            spelling="prepare",
            op="experts_parallel",
            nodes_before=len(graph.nodes),
            nodes_after=len(graph.nodes),
            why=_sharing(node),
            lines_before=(),
            lines_after=(),
        )


def _sharing(node: Node) -> str:
    """Who shares the experts of a parallel node."""
    names = (argument.name for argument in torch.ops.perseus.experts_parallel.default._schema.arguments)
    values = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    tokens = values.get("tokens", ParallelSpec.tokens)
    sharing = ParallelSpec(group_name=values["group_name"], tokens=tokens)
    return sharing.describe(values["num_experts"], values["gate_up"].meta["example_value"].shape[0])
