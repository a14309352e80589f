"""Which nodes belong to a match, and may they go? Reads the view; never edits it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils import _pytree as pytree

from ..capture import AtenView, storages


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
        pending.extend(source for source in node.all_input_nodes if source not in stop and carries_tensors(source))
    return frozenset(region)


def outside_reader(nodes: Iterable[Node], region: frozenset[Node]) -> tuple[Node, Node] | None:
    """The first of ``nodes`` that a live node outside ``region`` reads, and that reader, if there is one."""
    for node in sorted(nodes):
        for user in node.users:
            if user not in region and _is_live(user) and carries_tensors(user):
                return node, user
    return None


def interfering_write(view: AtenView, region: frozenset[Node], inputs: Iterable[Node]) -> Node | None:
    """A node outside ``region`` that writes in place, while ``region`` runs, to what it reads or computes."""
    touched = storages([node.meta["val"] for node in (*inputs, *region)])
    last = max(region)
    node = min(region).next
    while node is not last:
        if node not in region and not touched.isdisjoint(_written_storages(view, node)):
            return node
        node = node.next
    return None


def write_to_inputs(view: AtenView, nodes: Iterable[Node], inputs: Iterable[Node]) -> Node | None:
    """The first of ``nodes`` that writes in place to a tensor of ``inputs``."""
    touched = storages([node.meta["val"] for node in inputs])
    return next((node for node in nodes if not touched.isdisjoint(_written_storages(view, node))), None)


def later_write(view: AtenView, node: Node, inputs: Iterable[Node]) -> Node | None:
    """The first call after ``node`` that writes in place to a tensor of ``inputs``."""
    return write_to_inputs(view, (writer for writer in view.writers if writer > node), inputs)


def _written_storages(view: AtenView, node: Node) -> frozenset[int]:
    if node in view.opaque:
        # What is opaque may write to whatever it reads.
        read = frozenset(view.origin[node].all_input_nodes)
        return storages([seen.meta["val"] for seen, made in view.results.items() if not read.isdisjoint(made)])
    return storages([written.meta["val"] for written in written_nodes(node)])


def written_nodes(node: Node) -> list[Node]:
    """What an operator writes in place, as its schema says; in any argument, lists included."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    written: list[Any] = []
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(node.args[position] if position < len(node.args) else node.kwargs.get(argument.name))
    return [each for each in pytree.tree_leaves(written) if isinstance(each, Node)]


def carries_tensors(node: Node) -> bool:
    if node.op == "output":
        return True
    value = node.meta.get("val")
    return not isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def _is_live(node: Node) -> bool:
    """Whether somebody could notice if ``node`` went."""
    if node.op == "output" or not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        return node.op == "output" or bool(node.users) or node.is_impure()
    return bool(node.users)
