"""What does an in-place operator amount to, and who sees what it writes? Reads the view; never edits."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from .region import written_nodes

aten = torch.ops.aten


def functional_form(node: Node) -> Any:
    """The overload that ``node`` amounts to: that of ``add`` for ``add_``, its own for what does not write in place."""
    target = node.target
    if not isinstance(target, OpOverload):
        return target
    name = target._schema.name.removeprefix("aten::")
    if not name.endswith("_") or name.endswith("__"):
        return target
    return getattr(getattr(aten, name.removesuffix("_"), None), target._overloadname, target)


def local_form(node: Node) -> Any:
    """``functional_form``, but None for an in-place operator whose write somebody else may see."""
    form = functional_form(node)
    return form if form is node.target or write_problem(node) is None else None


def write_problem(node: Node) -> str | None:
    """Why an in-place operator cannot be read as its functional form, if it cannot.

    It can where nobody else sees the write: the written value was born in the graph, has its own place for each
    element, and is read by nobody after the write but through the writing node.
    """
    written = node.args[0]
    if not isinstance(written, Node) or written.op != "call_function":
        return f"{node.target} writes to an input of the graph"
    if 0 in written.meta["val"].stride():
        return f"{node.target} writes to a value that was expanded: several of its elements are one number"
    if any(reader > node for reader in _readers_around(written, node)):
        return f"{node.target} writes to a value that other nodes read"
    return None


def is_written(node: Node) -> bool:
    """Whether something writes in place to ``node``, to what it is a view of, or to a view of it."""
    aliases = _aliases(node)
    return any(not aliases.isdisjoint(written_nodes(user)) for alias in aliases for user in alias.users)


def view_base(node: Node) -> Node | None:
    """The tensor of which ``node`` is a view, one step down, or None where it has storage of its own."""
    if not node.args or not isinstance(node.args[0], Node):
        return None
    if node.target is operator.getitem:
        return view_base(node.args[0])
    if is_idle_dropout(node):
        return node.args[0]
    if isinstance(node.target, OpOverload) and any(r.alias_info is not None for r in node.target._schema.returns):
        return node.args[0]
    return None


def is_idle_dropout(node: Node) -> bool:
    """Whether a dropout is one of evaluation, which hands its input on."""
    return node.target is aten.dropout.default and len(node.args) == 3 and node.args[2] is False


def _storage_of(node: Node) -> Node:
    """The node of which ``node`` is, in the end, a view; ``node`` where it is none."""
    while (below := view_base(node)) is not None:
        node = below
    return node


def _aliases(node: Node, *, but: Node | None = None) -> set[Node]:
    """Every node that has the storage of ``node``, except ``but`` and its views."""
    base = _storage_of(node)
    aliases, pending = {base}, [base]
    while pending:
        for user in pending.pop().users:
            if user is not but and user not in aliases and view_base(user) is not None:
                aliases.add(user)
                pending.append(user)
    return aliases


def _readers_around(written: Node, writer: Node) -> set[Node]:
    """Every node that reads the storage of ``written`` in another way than through the result of ``writer``."""
    aliases = _aliases(written, but=writer)
    readers = {user for alias in aliases for user in alias.users if user is not writer}
    if _storage_of(written).op != "call_function":  # an input: its storage is read by the caller after the graph
        readers.add(next(iter(reversed(written.graph.nodes))))
    return readers
