"""Which nodes belong to a match, and may they go? Reads the view; never edits it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch._ops import OpOverload
from torch.fx import Node

from ..capture import AtenView
from .interpret import view_base


def closure(outputs: Iterable[Node], inputs: Iterable[Node]) -> frozenset[Node]:
    """Every node on a way from ``inputs`` (exclusive) to ``outputs`` (inclusive) that carries tensors.

    Sizes are left out: they belong to whoever else needs them, and cost nothing.
    """
    stop = set(inputs)
    region: set[Node] = set()
    pending = [node for node in outputs if node not in stop]
    while pending:
        node = pending.pop()
        if node in region:
            continue
        region.add(node)
        pending.extend(source for source in node.all_input_nodes if source not in stop and _carries_tensors(source))
    return frozenset(region)


def outside_reader(nodes: Iterable[Node], region: frozenset[Node]) -> tuple[Node, Node] | None:
    """A node of ``nodes`` and a live node outside ``region`` that reads it, if there is one."""
    for node in nodes:
        for user in node.users:
            if user not in region and _is_live(user) and _carries_tensors(user):
                return node, user
    return None


def interfering_write(view: AtenView, region: frozenset[Node], inputs: Iterable[Node]) -> Node | None:
    """An in-place write to one of ``inputs`` (or what shares its storage) while ``region`` runs."""
    storages = {_storage(node) for node in inputs}
    first, last = min(region), max(region)
    for node in view.graph.nodes:
        if not first < node < last or node in region or not isinstance(node.target, OpOverload):
            continue
        for argument, arg in zip(node.target._schema.arguments, node.args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(arg, Node) and _storage(arg) in storages:
                return node
    return None


def _storage(node: Node) -> Node:
    while (base := view_base(node)) is not None:
        node = base
    return node


def _carries_tensors(node: Node) -> bool:
    if node.op == "output":
        return True
    value = node.meta.get("val")
    return not isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def _is_live(node: Node) -> bool:
    """Whether somebody could notice if ``node`` went."""
    if node.op == "output" or not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        return node.op == "output" or bool(node.users) or node.is_impure()
    return bool(node.users)
