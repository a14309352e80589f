"""What does a node of Dynamo's graph write to in place? Reads names, since no schema is known there."""

from __future__ import annotations

import operator

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node

# All that torch.Tensor has; it has no in-place matrix product.
_IN_PLACE_OPERATORS = frozenset(
    {
        operator.iadd,
        operator.isub,
        operator.imul,
        operator.itruediv,
        operator.ifloordiv,
        operator.imod,
        operator.ipow,
        operator.iand,
        operator.ior,
        operator.ixor,
        operator.ilshift,
        operator.irshift,
    }
)


def written_node(node: Node) -> Node | None:
    """The node whose value ``node`` writes to in place, as Dynamo spells it."""
    name = _name(node)
    in_place = (name.endswith("_") and not name.endswith("__")) or node.target is operator.setitem
    in_place = in_place or node.target in _IN_PLACE_OPERATORS
    return node.args[0] if in_place and node.args and isinstance(node.args[0], Node) else None


def changes_shape(node: Node) -> bool:
    """Whether ``node`` changes sizes, strides or storage of a tensor in place, not only its elements."""
    packet = getattr(torch.ops.aten, _name(node), None) if written_node(node) is not None else None
    overloads = [getattr(packet, name) for name in packet.overloads()] if isinstance(packet, OpOverloadPacket) else []
    return any(torch.Tag.inplace_view in overload.tags for overload in overloads)


def _name(node: Node) -> str:
    packet = node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target
    return packet if isinstance(packet, str) else getattr(packet, "__name__", "")
