"""Which router chose these ids and weights? Reads the meanings; never edits."""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import Node

from ..facts import RouterMatch, Routing, RoutingSpec
from .interpret import Interpretation, Reader
from .region import closure, interfering_write, outside_reader
from .values import ChoiceScores, ChosenIds, ChosenScores, Logits, Scores


@dataclasses.dataclass(frozen=True)
class RouterFound:
    """A router, and the constants that take a guard if it is rewritten."""

    router: RouterMatch
    symbols: tuple[torch.SymFloat | torch.SymInt, ...]


def find_router(
    found: Interpretation, ids: Node, weights: Node, x: Node, experts_region: frozenset[Node]
) -> RouterFound | str:
    """The router whose choice ``ids`` and ``weights`` are, or why router and experts stay two nodes.

    A router becomes part of the MoE node only if nobody else reads its values, since they no longer exist then.
    """
    read, view = found.reader, found.view
    chosen, chosen_ids = read.value(weights), read.value(ids)
    if not isinstance(chosen, ChosenScores):
        return _unknown_step(found, weights, x)
    if not isinstance(chosen_ids, ChosenIds):
        return _unknown_step(found, ids, x)
    if chosen_ids.topk != chosen.topk:
        return "the routing weights and the expert ids come from two different choices"
    described = _describe(read, chosen)
    if isinstance(described, str):
        return described
    logits, bias, spec = described
    if not read.same_tensor(logits.x, x):
        return "the router reads another tensor than the experts"
    if not read.same_gradient(logits.x, x):
        return "the router's input was reshaped under another gradient mode than the experts' input"
    inputs = [node for node in (logits.x, logits.weight, logits.bias, bias) if node is not None]
    region = closure((weights, ids), inputs)
    private = [node for node in region if read.value(node) is not None]
    if reader := outside_reader(private, region | experts_region):
        return f"{read.describe(reader[0])} of the router is also read by {read.describe(reader[1])}"
    state = view.state[view.origin[max(experts_region)]]
    if any(view.state[view.origin[node]] != state for node in closure((weights,), [*inputs, ids])):
        return "the router runs under another gradient mode or autocast than the experts"
    if write := interfering_write(view, region | experts_region, inputs):
        return f"{read.describe(write)} may write in place to what the router reads before the experts have run"
    dynamo = {node: found.dynamo_value(node) for node in inputs}
    if None in dynamo.values():
        return "an input of the router exists only inside one of Dynamo's nodes"
    router = RouterMatch(
        x_TD=dynamo[logits.x],
        weight_ED=dynamo[logits.weight],
        bias_E=dynamo[logits.bias] if logits.bias else None,
        correction_bias_E=dynamo[bias] if bias else None,
        spec=spec,
        region=view.dynamo_nodes(region) - set(dynamo.values()),
    )
    numbers = (chosen.epsilon, chosen.scale)
    return RouterFound(router, tuple(n.symbol for n in numbers if n is not None and n.symbol is not None))


def _describe(read: Reader, chosen: ChosenScores) -> tuple[Logits, Node | None, RoutingSpec] | str:
    of = chosen.topk.of
    choice = of if isinstance(of, ChoiceScores) else None
    scores = choice.scores if choice is not None else of
    routing: Routing
    if isinstance(scores, Logits):
        if chosen.softmax_dtype is None:
            return "the routing weights are raw logits: neither softmax nor sigmoid is applied"
        if chosen.renormalized:
            return "the routing weights are renormalised after a softmax over the choices"
        logits, routing, score_dtype = scores, "topk_softmax", chosen.softmax_dtype
    elif isinstance(scores, Scores):
        logits, score_dtype = scores.logits, scores.dtype
        routing = "sigmoid_topk" if scores.kind == "sigmoid" else "softmax_topk"
        if routing == "softmax_topk" and choice is not None:
            return "a correction bias or a group limit on softmax scores is not a known router"
    else:
        raise AssertionError(f"a choice on {type(scores).__name__} is no router choice")
    if logits.bias is not None and read.dtype(logits.bias) != logits.dtype:
        return "the router's bias has another dtype than its logits"
    return logits, choice.bias if choice else None, _spec(chosen, logits, routing, score_dtype, choice)


def _spec(
    chosen: ChosenScores, logits: Logits, routing: Routing, score_dtype: torch.dtype, choice: ChoiceScores | None
) -> RoutingSpec:
    return RoutingSpec(
        routing=routing,
        top_k=chosen.topk.k,
        renormalize=chosen.renormalized,
        renormalize_eps=chosen.epsilon.value if chosen.epsilon else 0.0,
        routing_scale=chosen.scale.value if chosen.scale else 1.0,
        num_groups=choice.num_groups if choice else 1,
        topk_groups=choice.topk_groups if choice else 1,
        router_dtype=logits.dtype,
        score_dtype=score_dtype,
        weights_dtype=chosen.cast or score_dtype,
    )


def _unknown_step(found: Interpretation, routing: Node, x: Node) -> str:
    """The step at which the way from ``x`` to ``routing``, weights or ids, is lost, nearest to its end."""
    read = found.reader
    if routing.op == "placeholder":
        return f"{read.describe(routing)} is an input of the graph, its router is not in sight"
    pending, steps = [routing], [routing]
    while pending:
        node = pending.pop(0)
        if node in found.sentences:
            return found.sentences[node]
        for source in node.all_input_nodes:
            unknown = source.op == "call_function" and read.value(source) is None and source not in steps
            if unknown and not read.same_tensor(source, x):
                steps.append(source)
                pending.append(source)
    nearest = [node for node in steps if any(_is_known(read, source, x) for source in node.all_input_nodes)]
    return f"{read.describe(min(nearest or steps[:1]))} is not a known step of a router"


def _is_known(read: Reader, node: Node, x: Node) -> bool:
    return read.value(node) is not None or (read.dim(node) >= 0 and read.same_tensor(node, x))
