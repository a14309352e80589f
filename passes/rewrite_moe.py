"""How does a planned match become one node? Stage 4: edits Dynamo's graph, and nothing else."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node

from ..dynamo_writes import written_node
from ..facts import LIST_AXES, MoEMatch, MoEPlan, nodes_of, op_arguments

Argument: TypeAlias = "Node | Sequence[Node] | None"


def rewrite(graph: Graph, match: MoEMatch, plan: MoEPlan, *, check_ids: bool = False) -> Node:
    """Puts one perseus node in the place of ``match`` and erases what nobody reads any more.

    What other nodes still read (ids, weights, counts, sizes) stays. ``check_ids``: a node before ``perseus::experts``
    checks the range of the ids at run time; a router inside the op chooses no others. Returns the perseus node.
    """
    target, args, kwargs = op_call(match, plan)
    if plan.op != "moe":
        args = (args[0], *_routing(graph, match, check_ids), *args[3:])
    if plan.op == "experts_list":
        lists = zip(match.experts, LIST_AXES, strict=True)
        args = (*args[:3], *(_entries(graph, match, nodes_of(each), num_axes) for each, num_axes in lists))
    # The output becomes the perseus node itself, since matches of later layers may hold it as their input.
    output = match.output
    output.op, output.target, output.args, output.kwargs = "call_function", target, args, kwargs
    output._rename(f"{plan.op}_default")
    for node in match.written:
        node.replace_all_uses_with(output, delete_user_cb=lambda user: user > output)
    _erase_unread(graph, match.region_with_router)
    return output


def op_call(match: MoEMatch, plan: MoEPlan) -> tuple[OpOverload, tuple[Argument, ...], dict[str, object]]:
    """The op, and its arguments as nodes of Dynamo's graph.

    Ids and weights may not yet be as the op wants them (``with_choices``), nor lists (``entries``).
    """
    x_dtype = match.x_TD.meta["example_value"].dtype
    numbers = op_arguments(match.spec, x_dtype)
    if plan.op == "experts_list":
        target = torch.ops.perseus.experts_list.default
        lists = [list(nodes_of(weights)) for weights in match.experts]
        return target, (match.x_TD, match.ids_TK, match.weights_TK, *lists), numbers
    if plan.op == "experts":
        target = torch.ops.perseus.experts.default
        return target, (match.x_TD, match.ids_TK, match.weights_TK, *match.experts), numbers
    if plan.op == "experts_parallel":
        assert match.parallel is not None, "a plan for perseus::experts_parallel needs ranks that share the experts"
        numbers |= match.parallel.as_kwargs()
        target = torch.ops.perseus.experts_parallel.default
        return target, (match.x_TD, match.ids_TK, match.weights_TK, *match.experts), numbers
    router = match.router
    assert router is not None, "a plan for perseus::moe needs a matched router"
    args = (match.x_TD, router.weight_ED, router.bias_E, router.correction_bias_E, *match.experts)
    return torch.ops.perseus.moe.default, args, {**op_arguments(router.spec, x_dtype), **numbers}


def with_choices(ids: Tensor, weights: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Ids and weights as the op wants them, [T, K]: of tokens of one choice they may be [T]; no weights are ones."""
    ids = ids.unsqueeze(1) if ids.dim() == 1 else ids
    if weights is None:
        return ids, torch.ones_like(ids, dtype=dtype)
    return ids, weights.unsqueeze(1) if weights.dim() == 1 else weights


def _routing(graph: Graph, match: MoEMatch, check_ids: bool) -> tuple[Node, Node]:
    """The nodes of ``with_choices``, with ids checked and wrapped where they are to be."""
    ids, weights = match.ids_TK, match.weights_TK
    value, x = ids.meta["example_value"], match.x_TD.meta["example_value"]
    with value.fake_mode:
        ids_value, weights_value = with_choices(value, weights and weights.meta["example_value"], x.dtype)
    with graph.inserting_before(match.output):
        if value.dim() == 1:
            ids = graph.call_method("unsqueeze", (ids, 1))
            ids.meta["example_value"] = ids_value
        if weights is None:
            weights = graph.call_function(torch.ones_like, (ids,), {"dtype": x.dtype})
        elif weights.meta["example_value"].dim() == 1:
            weights = graph.call_method("unsqueeze", (weights, 1))
        weights.meta["example_value"] = weights_value
    return _ids(graph, match, ids, check_ids), weights


def entries(tensors: Sequence[Tensor], num_axes: int) -> list[Tensor]:
    """A list of tensors with so many axes each, where a stack stands for its entries."""
    return [entry for each in tensors for entry in (each.unbind() if each.dim() > num_axes else (each,))]


def _entries(graph: Graph, match: MoEMatch, nodes: Sequence[Node], num_axes: int) -> list[Node]:
    """The nodes of ``entries``."""
    listed: list[Node] = []
    for node in nodes:
        value = node.meta["example_value"]
        if value.dim() == num_axes:
            listed.append(node)
            continue
        with graph.inserting_before(match.output):
            unbound = graph.call_function(torch.unbind, (node,))
            with value.fake_mode:
                unbound.meta["example_value"] = value.unbind()
            for index, entry in enumerate(unbound.meta["example_value"]):
                listed.append(graph.call_function(operator.getitem, (unbound, index)))
                listed[-1].meta["example_value"] = entry
    return listed


def _ids(graph: Graph, match: MoEMatch, ids: Node, check_ids: bool) -> Node:
    """The ids as the op wants them: checked if asked for, and wrapped where the layer's own indexing wraps them."""
    num_experts, value = match.spec.num_experts, ids.meta["example_value"]
    targets = [torch.ops.perseus.checked_ids.default] if check_ids else []
    targets += [torch.ops.aten.remainder.Scalar] if match.negative_ids_wrap else []
    for target in targets:
        with graph.inserting_before(match.output):
            ids = graph.call_function(target, (ids, num_experts))
        ids.meta["example_value"] = value
    return ids


def _erase_unread(graph: Graph, region: frozenset[Node]) -> None:
    """Erases the nodes of ``region`` of which nothing reaches a node outside.

    An in-place write is kept where what it writes to is kept, or is no part of the region.
    """
    nodes = [node for node in sorted(region) if node.op in ("call_function", "call_method")]
    writes: dict[Node, list[Node]] = {}
    for node in nodes:
        if (written := written_node(node)) is not None:
            writes.setdefault(written, []).append(node)
    pending = [node for node in nodes if any(user not in region for user in node.users)]
    pending += [node for written, writers in writes.items() if written not in region for node in writers]
    kept: set[Node] = set()
    while pending:
        node = pending.pop()
        if node in region and node not in kept:
            kept.add(node)
            pending += [*node.all_input_nodes, *writes.get(node, ())]
    for node in reversed(nodes):
        if node not in kept:
            graph.erase_node(node)
