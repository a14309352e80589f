"""What does a node of Dynamo's graph write to in place? Reads names, since no schema is known there."""

from __future__ import annotations

import operator

from torch._ops import OpOverload
from torch.fx import Node

_IN_PLACE_OPERATORS = frozenset(
    {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.iand, operator.ior}
)


def written_node(node: Node) -> Node | None:
    """The node whose value ``node`` writes to in place, as Dynamo spells it."""
    packet = node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target
    name = packet if isinstance(packet, str) else getattr(packet, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or node.target is operator.setitem
    in_place = in_place or (name.startswith("i") and node.target in _IN_PLACE_OPERATORS)
    return node.args[0] if in_place and node.args and isinstance(node.args[0], Node) else None
