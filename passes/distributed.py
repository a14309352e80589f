"""Which layers choose experts on distributed tensors? Reads Dynamo's graph; never edits it."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from ..capture import is_distributed
from ..facts import Refusal
from .match_context import layer_name

_TOPK = (torch.topk, torch.ops.aten.topk.default, "topk")


def find_distributed_layers(gm: GraphModule) -> list[Refusal]:
    """A refusal for each top-k of a DTensor: the rows, ids and weights around it are spread over a device mesh."""
    return [_refusal(node) for node in gm.graph.nodes if node.target in _TOPK and _is_distributed_result(node)]


def _is_distributed_result(node: Node) -> bool:
    return any(map(is_distributed, pytree.tree_leaves(node.meta.get("example_value"))))


def _refusal(node: Node) -> Refusal:
    return Refusal(layer=layer_name(node), stage="capture", reason=_reason(node), node=node.name)


def _reason(node: Node) -> str:
    return (
        f"the experts are chosen on distributed tensors (DTensor) at {node.name}: only local tensors are rewritten, "
        "such as those that FSDP gathers or .to_local() returns"
    )
