"""How does a planned match become one node? Stage 4: edits Dynamo's graph, and nothing else."""

from __future__ import annotations

import operator

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from ..facts import MoEMatch, MoEPlan


def rewrite(graph: Graph, match: MoEMatch, plan: MoEPlan, *, check_ids: bool = False) -> Node:
    """Puts one perseus node in the place of ``match`` and erases what nobody reads any more.

    What other nodes still read (ids, weights, counts, sizes) stays. ``check_ids``: a node before ``perseus::experts``
    checks the range of the ids at run time; a router inside the op chooses no others. Returns the perseus node.
    """
    target, args, kwargs = op_call(match, plan)
    if plan.op == "experts":
        args = (args[0], _ids(graph, match, check_ids), *args[2:])
    # The output becomes the perseus node itself, since matches of later layers may hold it as their input.
    output = match.output
    output.op, output.target, output.args, output.kwargs = "call_function", target, args, kwargs
    output._rename(f"{plan.op}_default")
    region = match.region | (match.router.region if match.router else frozenset())
    _erase_unread(graph, region)
    return output


def op_call(match: MoEMatch, plan: MoEPlan) -> tuple[OpOverload, tuple[Node | None, ...], dict[str, object]]:
    """The op, and its arguments as nodes of Dynamo's graph."""
    experts = (match.gate_up, match.gate_up_bias, match.down, match.down_bias)
    if plan.op == "experts":
        target = torch.ops.perseus.experts.default
        return target, (match.x_TD, match.ids_TK, match.weights_TK, *experts), match.spec.as_kwargs()
    router = match.router
    assert router is not None, "a plan for perseus::moe needs a matched router"
    args = (match.x_TD, router.weight_ED, router.bias_E, router.correction_bias_E, *experts)
    return torch.ops.perseus.moe.default, args, {**router.spec.as_kwargs(), **match.spec.as_kwargs()}


def _ids(graph: Graph, match: MoEMatch, check_ids: bool) -> Node:
    """The ids as the op wants them: checked if asked for, and wrapped where the layer's own indexing wraps them."""
    ids, num_experts = match.ids_TK, match.spec.num_experts
    targets = [torch.ops.perseus.checked_ids.default] if check_ids else []
    targets += [torch.ops.aten.remainder.Scalar] if match.negative_ids_wrap else []
    for target in targets:
        with graph.inserting_before(match.output):
            ids = graph.call_function(target, (ids, num_experts))
        ids.meta["example_value"] = match.ids_TK.meta["example_value"]
    return ids


def _erase_unread(graph: Graph, region: frozenset[Node]) -> None:
    """Erases the nodes of ``region`` that nobody reads, last first.

    An in-place write is kept only where somebody still reads what it writes to.
    """
    left = [node for node in sorted(region, reverse=True) if node.op in ("call_function", "call_method")]
    erased = True
    while erased:  # a write goes once all earlier readers of what it writes to have gone
        erased = False
        for node in list(left):
            written = _written(node)
            if not node.users and (written is None or (written in region and set(written.users) == {node})):
                graph.erase_node(node)
                left.remove(node)
                erased = True


def _written(node: Node) -> Node | None:
    """The node whose value ``node`` writes to in place, as Dynamo spells it."""
    packet = node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target
    name = packet if isinstance(packet, str) else getattr(packet, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or node.target is operator.setitem
    in_place = in_place or (name.startswith("i") and node.target in _IN_PLACE_OPERATORS)
    return node.args[0] if in_place and isinstance(node.args[0], Node) else None


_IN_PLACE_OPERATORS = frozenset(
    {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.iand, operator.ior}
)
