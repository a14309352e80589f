"""What must hold around a match, and which record is made of it? Reads the meanings; never edits."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch._ops import OpOverload
from torch.fx import Node

from ..capture import AtenView
from ..conditions import Condition, ask
from ..facts import Check, ExpertsSpec, MoEMatch, Refusal, RouterMatch
from .id_bound import id_bound
from .in_place import functional_form
from .interpret import Interpretation, Reader
from .match_parallel import Sharing, with_sizes
from .parallel_values import PendingSum
from .patterns import spellings
from .patterns.activations import Gate
from .region import interfering_write, later_write, outside_reader, write_to_inputs
from .rule_checks import rule_checks
from .values import INNER_VALUES, Combined, ExpertLinear, ExpertOutput, TokenRows

LAYER_VALUES = (*INNER_VALUES, PendingSum, Combined)
# Gathered tokens may have other readers: they cost a gather, not the experts.
_PRIVATE_VALUES = tuple(kind for kind in LAYER_VALUES if kind is not TokenRows)


class RoutingNodes(NamedTuple):
    """Tokens, expert ids and routing weights in the view; without weights, the tokens are rows of one choice."""

    x: Node
    ids: Node
    weights: Node | None


def make_match(
    found: Interpretation,
    head: Node,
    sink: Node,
    output: ExpertOutput,
    gate: Gate,
    region: frozenset[Node],
    *,
    routing: RoutingNodes,
    router: RouterMatch | None,
    router_reason: str | None,
    symbols: tuple[torch.SymFloat | torch.SymInt, ...] = (),
    sharing: Sharing | None = None,
    conditions: Sequence[Check] = (),
) -> MoEMatch:
    """The record of the layer that begins at ``head`` and ends at ``sink``; ``region`` leaves its inputs out.

    ``conditions``: what was asked about the layer beside the rules, with the answers.
    """
    rows, gate_up, down = output.hidden.rows, output.hidden.gate_up, output.down
    num_experts = found.reader.static_size(gate_up.weight, 0)
    assert num_experts is not None, "expert weights have constant sizes"
    match = MoEMatch(
        layer=layer_name(found.view.origin[sink]),
        spelling=spelling_of(head),
        x_TD=_dynamo(found, routing.x),
        ids_TK=_dynamo(found, routing.ids),
        weights_TK=_dynamo(found, routing.weights) if routing.weights else None,
        gate_up=_dynamo(found, gate_up.weight),
        gate_up_bias=_dynamo(found, gate_up.bias) if gate_up.bias else None,
        down=_dynamo(found, down.weight),
        down_bias=_dynamo(found, down.bias) if down.bias else None,
        spec=ExpertsSpec(
            weight_layout=gate_up.layout,
            gate_layout=gate.layout,
            activation=gate.activation,
            activation_params=gate.activation_params,
            num_experts=sharing.num_experts if sharing else num_experts,
            expert_offset=sharing.expert_offset if sharing else 0,
        ),
        parallel=sharing.spec if sharing else None,
        output=_dynamo(found, sink),
        region=found.view.dynamo_nodes(region),
        router=router,
        router_reason=router_reason,
        negative_ids_wrap=sharing is None and rows.order is None and id_bound(found.reader, output.hidden.ids) is None,
        symbols=(*gate.symbols, *symbols),
        checks=(*rule_checks(found, [sink], (routing.x, gate_up.weight, down.weight)), *conditions),
    )
    inputs = {
        match.x_TD,
        match.ids_TK,
        match.weights_TK,
        match.gate_up,
        match.gate_up_bias,
        match.down,
        match.down_bias,
    }
    dynamo_region = match.region - inputs
    if sharing is not None:
        dynamo_region = with_sizes(found.view.source.graph, dynamo_region, frozenset(filter(None, inputs)))
    return dataclasses.replace(match, region=dynamo_region)


def _dynamo(found: Interpretation, node: Node) -> Node:
    value = found.dynamo_value(node)
    assert value is not None, "a match reads and writes only whole results of Dynamo's nodes"
    return value


def with_idle_writes(read: Reader, region: frozenset[Node], sink: Node) -> frozenset[Node]:
    """``region`` and the in-place writes to its values that change nothing: the result means what was there before."""
    writes = (user for node in region for user in node.users if user < sink and user not in region)
    return region | {write for write in writes if _is_idle_write(read, write) and region.issuperset(write.users)}


def _is_idle_write(read: Reader, node: Node) -> bool:
    is_write = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
    return is_write and read.value(node) is not None and read.value(node) == read.value(node.args[0])


def spelling_of(head: Node) -> str:
    """The name of the spelling that reads the first expert linear."""
    linears = (each for each in spellings() if each.part == "expert linears")
    return next(each.name for each in linears if any(head.target in rule.targets for rule in each.rules))


def weights_reason(read: Reader, gate_up: ExpertLinear, down: ExpertLinear, dtype: torch.dtype) -> str | None:
    """Why the weights of the two linears do not belong to the same experts on tokens of ``dtype``, if they do not."""
    if not all(isinstance(size, int) for linear in (gate_up, down) for size in read.shape(linear.weight)):
        return f"expert weights must have constant sizes, got {[list(read.shape(w.weight)) for w in (gate_up, down)]}"
    if gate_up.layout != down.layout:
        return f"the two expert weights are stored in different layouts, {gate_up.layout} and {down.layout}"
    if read.shape(gate_up.weight)[0] != read.shape(down.weight)[0]:
        return f"the two expert weights hold {read.shape(gate_up.weight)[0]} and {read.shape(down.weight)[0]} experts"
    return dtype_reason(read, [one for linear in (gate_up, down) for one in (linear.weight, linear.bias) if one], dtype)


def dtype_reason(read: Reader, parameters: Iterable[Node], dtype: torch.dtype) -> str | None:
    """Why ``parameters`` of experts do not go with tokens of ``dtype``, if they do not."""
    for parameter in parameters:
        if read.dtype(parameter) != dtype:
            name = read.describe(parameter)
            return f"expert parameter {name} is {read.dtype(parameter)}, the tokens are {dtype}"
    return None


def shape_reason(read: Reader, sink: Node, ids: Node, tokens: Node) -> str | None:
    """Why the sum and the ids are not those of tokens [T, D], if they are not."""
    if read.dim(tokens) != 2 or not read.same_sizes(read.shape(sink), read.shape(tokens)):
        return f"the sum has shape {list(read.shape(sink))}, the tokens {list(read.shape(tokens))}"
    if not read.same_sizes(read.shape(ids)[:1], read.shape(tokens)[:1]):
        return f"{read.shape(ids)[0]} rows of ids for {read.shape(tokens)[0]} tokens"
    return None


def no_autocast(found: Interpretation, node: Node) -> Condition:
    state = found.view.state[found.view.origin[node]]
    is_under = state.casts(node.meta["val"].device.type)
    return Condition("no autocast", "it runs under torch.autocast" if is_under else None)


def context_conditions(
    found: Interpretation,
    sink: Node,
    region: frozenset[Node],
    inputs: list[Node],
    *,
    inner: Iterable[Node] | None = None,
) -> Iterator[Condition]:
    """What must hold so that the region can be replaced where it stands, cheap questions first.

    ``inner``: the nodes that are gone once it is; by default those whose meanings say so.
    """
    read, view = found.reader, found.view
    state = view.state[view.origin[sink]]
    yield no_autocast(found, sink)
    yield Condition("no transform", "it runs under a transform of torch.func" if state.transform else None)
    floats = (node for node in region if read.dim(node) >= 0 and _is_float(node))
    is_mixed = any(view.state[view.origin[node]] != state for node in floats)
    yield Condition("one mode", "its nodes run under different gradient or autocast modes" if is_mixed else None)
    if inner is None:
        inner = [node for node in region if isinstance(read.value(node), _PRIVATE_VALUES)]
    inner = [node for node in inner if node is not sink]
    yield Condition("inner values unread", _inner_reader_reason(read, inner, region, inputs))
    yield Condition("writes", _write_reason(found, sink, region, inputs))
    missing = [node for node in inputs if found.dynamo_value(node) is None]
    if found.dynamo_value(sink) is None and not _is_setitem(view, sink):
        missing.append(sink)
    yield Condition(
        "whole values", f"{read.describe(missing[0])} exists only inside one of Dynamo's nodes" if missing else None
    )


def _inner_reader_reason(read: Reader, inner: list[Node], region: frozenset[Node], inputs: list[Node]) -> str | None:
    # The input of a layer may be the sum of the layer before, handed on by nodes such as a cast to the dtype it has.
    inner = [node for node in inner if read.root(node) not in inputs]
    if reader := outside_reader(inner, region):
        return f"{read.describe(reader[0])} inside it is also read by {read.describe(reader[1])}"
    return None


def _write_reason(found: Interpretation, sink: Node, region: frozenset[Node], inputs: list[Node]) -> str | None:
    read, view = found.reader, found.view
    if write := interfering_write(view, region, inputs):
        return f"{read.describe(write)} may write in place to what the layer reads or computes before it is summed"
    if write := write_to_inputs(view, (node for node in sorted(region) if not _is_idle_write(read, node)), inputs):
        return f"{read.describe(write)} inside it writes in place to what it reads, and the op would read it afterwards"
    # The op keeps its inputs for its gradients, where the layer's own code may have kept copies.
    is_differentiated = view.state[view.origin[sink]].grad
    if is_differentiated and (write := later_write(view, sink, inputs)):
        return f"{read.describe(write)} writes in place to what the layer has read, and gradients need it as it was"
    return None


def _is_setitem(view: AtenView, node: Node) -> bool:
    """Whether ``node`` is the write of tensor[...] = ..., which has no value of its own in Dynamo's graph."""
    return view.origin[node].target is operator.setitem and functional_form(node) is not node.target


def _is_float(node: Node) -> bool:
    return node.meta["val"].is_floating_point()


def layer_name(node: Node) -> str:
    """Dotted path of the module that ``node`` was traced in, for messages."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(iter(reversed(list(stack.values()))), ("",))[0]
    return re.sub(r"^L\['\w+'\]\.?", "", path) or "(top level)"


def refuse(found: Interpretation, node: Node, reason: str, checks: list[Check]) -> Refusal:
    """The refusal of the layer around ``node``, with what was asked about it."""
    origin = found.view.origin[node]
    autocast = no_autocast(found, node)
    if autocast.reason not in (None, reason):
        # It inserts casts, whose own sentences would lead away from the cause.
        reason = ask([autocast], "match", checks) or reason
    return Refusal(layer=layer_name(origin), stage="match", reason=reason, node=origin.name, checks=tuple(checks))
