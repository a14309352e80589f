"""How does a planned match become one node? Stage 4: edits Dynamo's graph, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node

from ..dynamo_writes import written_node
from ..facts import MoEMatch, MoEPlan, op_arguments


def rewrite(graph: Graph, match: MoEMatch, plan: MoEPlan, *, check_ids: bool = False) -> Node:
    """Puts one perseus node in the place of ``match`` and erases what nobody reads any more.

    What other nodes still read (ids, weights, counts, sizes) stays. ``check_ids``: a node before ``perseus::experts``
    checks the range of the ids at run time; a router inside the op chooses no others. Returns the perseus node.
    """
    target, args, kwargs = op_call(match, plan)
    if plan.op != "moe":
        args = (args[0], *_routing(graph, match, check_ids), *args[3:])
    # The output becomes the perseus node itself, since matches of later layers may hold it as their input.
    output = match.output
    output.op, output.target, output.args, output.kwargs = "call_function", target, args, kwargs
    output._rename(f"{plan.op}_default")
    region = match.region | (match.router.region if match.router else frozenset())
    _erase_unread(graph, region)
    return output


def op_call(match: MoEMatch, plan: MoEPlan) -> tuple[OpOverload, tuple[Node | None, ...], dict[str, object]]:
    """The op, and its arguments as nodes of Dynamo's graph.

    Where the match has no routing weights, ids and weights are not yet as the op wants them (``rows_as_tokens``).
    """
    experts = (match.gate_up, match.gate_up_bias, match.down, match.down_bias)
    x_dtype = match.x_TD.meta["example_value"].dtype
    numbers = op_arguments(match.spec, x_dtype)
    if plan.op == "experts":
        target = torch.ops.perseus.experts.default
        return target, (match.x_TD, match.ids_TK, match.weights_TK, *experts), numbers
    if plan.op == "experts_parallel":
        assert match.parallel is not None, "a plan for perseus::experts_parallel needs ranks that share the experts"
        numbers |= match.parallel.as_kwargs()
        target = torch.ops.perseus.experts_parallel.default
        return target, (match.x_TD, match.ids_TK, match.weights_TK, *experts), numbers
    router = match.router
    assert router is not None, "a plan for perseus::moe needs a matched router"
    args = (match.x_TD, router.weight_ED, router.bias_E, router.correction_bias_E, *experts)
    return torch.ops.perseus.moe.default, args, {**op_arguments(router.spec, x_dtype), **numbers}


def rows_as_tokens(ids_R: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Ids and weights [R, 1] of rows that are tokens of one choice, with the weight 1."""
    ids_R1 = ids_R.unsqueeze(1)
    return ids_R1, torch.ones_like(ids_R1, dtype=dtype)


def _routing(graph: Graph, match: MoEMatch, check_ids: bool) -> tuple[Node, Node]:
    """Ids and weights as the op wants them."""
    if match.weights_TK is not None:
        return _ids(graph, match, match.ids_TK, check_ids), match.weights_TK
    ids, x = match.ids_TK.meta["example_value"], match.x_TD.meta["example_value"]
    with ids.fake_mode:
        values = rows_as_tokens(ids, x.dtype)
    with graph.inserting_before(match.output):
        ids_R1 = graph.call_method("unsqueeze", (match.ids_TK, 1))
        ids_R1.meta["example_value"] = values[0]
        weights_R1 = graph.call_function(torch.ones_like, (ids_R1,), {"dtype": x.dtype})
        weights_R1.meta["example_value"] = values[1]
    return _ids(graph, match, ids_R1, check_ids), weights_R1


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
    """Erases the nodes of ``region`` that nobody reads, last first.

    An in-place write is kept only where somebody still reads what it writes to.
    """
    left = [node for node in sorted(region, reverse=True) if node.op in ("call_function", "call_method")]
    erased = True
    while erased:  # a write goes once all earlier readers of what it writes to have gone
        erased = False
        for node in list(left):
            written = written_node(node)
            if not node.users and (written is None or (written in region and set(written.users) == {node})):
                graph.erase_node(node)
                left.remove(node)
                erased = True
