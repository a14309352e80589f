"""Which MoE layers does this graph contain? Reads the view; never edits anything.

A layer is found from its end: a sum over choices whose meaning is known down to the tokens, the ids, the routing
weights and the expert weights. What looked like experts and is no such layer becomes a refusal with a sentence.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload
from torch.fx import Node

from ..capture import AtenView
from ..facts import ExpertsSpec, MoEMatch, Refusal
from .interpret import Interpretation, Reader, aten, interpret
from .match_routing import RouterFound, find_router
from .patterns import all_rules, spellings
from .patterns.activations import recognize_gate
from .patterns.sentinels import id_bound
from .region import closure, interfering_write, later_write, outside_reader, write_to_inputs
from .values import INNER_VALUES, Combined, ExpertLinear, ExpertOutput, Hidden, SelectedByExpert, TokenRows

_LAYER_VALUES = (*INNER_VALUES, Combined)
# Gathered tokens may have other readers: they cost a gather, not the experts.
_PRIVATE_VALUES = tuple(kind for kind in _LAYER_VALUES if kind is not TokenRows)

_GATHERS = (aten.index.Tensor, aten.repeat_interleave.self_int)


def find_moe_layers(view: AtenView) -> list[MoEMatch | Refusal]:
    """All MoE layers of a graph, in graph order, each as a match or as a refusal."""
    found = interpret(view, all_rules())
    results: list[MoEMatch | Refusal] = []
    explained: set[Node] = set()
    passed: set[Node] = set()
    for node in view.graph.nodes:
        if isinstance(found.reader.value(node), Hidden) and not _reads(found, node, Hidden):
            reached = _reached(found, node)
            explained |= reached
            sinks = [sink for sink in reached if _is_sink(found, sink)]
            if len(sinks) == 1:
                result = _match(found, node, sinks[0])
            else:
                result = _refuse(found, node, _why_lost(found, reached, sinks))
        elif node not in explained and (_is_lost_product(found, node) or _selects_by_lost_ids(found, node)):
            result = _refuse(found, node, _cause(found, node))
        else:
            continue
        results.append(result)
        if isinstance(result, Refusal):
            _explain_rest(found, node, explained, passed)
    return results


def _reads(found: Interpretation, node: Node, kind: type) -> bool:
    return any(isinstance(found.reader.value(source), kind) for source in node.all_input_nodes)


def _is_expert_product(found: Interpretation, node: Node) -> bool:
    """A product with per-expert weights that no rule could place: the one thing in a graph that only experts have."""
    inputs = [found.reader.value(source) for source in node.all_input_nodes]
    selects = any(isinstance(value, SelectedByExpert) and found.reader.dim(value.of) == 3 for value in inputs)
    return "grouped_mm" in str(node.target) or (selects and not _reads(found, node, Hidden))


def _is_lost_product(found: Interpretation, node: Node) -> bool:
    return node in found.sentences and _is_expert_product(found, node)


def _selects_by_lost_ids(found: Interpretation, node: Node) -> bool:
    """A batched product with matrices selected by what would be expert ids, but for a step that has a sentence."""
    if node.target is not aten.bmm.default:
        return False
    selections = [source for source in node.all_input_nodes if source.target is aten.index.Tensor]
    indices = (found.reader.root(index) for source in selections for index in source.all_input_nodes)
    return any(index in found.sentences for index in indices)


def _explain_rest(found: Interpretation, node: Node, explained: set[Node], passed: set[Node]) -> None:
    """Adds the expert product that follows ``node`` to ``explained``: one refusal per layer is enough.

    ``passed`` holds the nodes that earlier calls went through.
    """
    pending = [node]
    while pending:
        for user in pending.pop().users:
            # A gather of rows is where another layer begins.
            if user in passed or user.target in _GATHERS:
                continue
            passed.add(user)
            if _is_expert_product(found, user) or _selects_by_lost_ids(found, user):
                explained.add(user)
            else:
                pending.append(user)


def _reached(found: Interpretation, head: Node) -> set[Node]:
    """``head`` and every node whose meaning descends from it, up to the layer's sum or the first nodes beyond."""
    reached, pending = {head}, [head]
    while pending:
        for user in pending.pop().users:
            if user not in reached:
                reached.add(user)
                if isinstance(found.reader.value(user), _LAYER_VALUES) and not _is_sink(found, user):
                    pending.append(user)
    return reached


def _is_sink(found: Interpretation, node: Node) -> bool:
    """The first node that holds the layer's sum in the tokens' dtype."""
    value = found.reader.value(node)
    if not isinstance(value, Combined):
        return False
    dtype = found.reader.dtype(value.output.hidden.rows.x)
    earlier = [s for s in node.all_input_nodes if isinstance(found.reader.value(s), Combined)]
    return found.reader.dtype(node) == dtype and all(found.reader.dtype(source) != dtype for source in earlier)


def _why_lost(found: Interpretation, reached: set[Node], sinks: list[Node]) -> str:
    if sinks:
        return f"its expert outputs are summed {len(sinks)} times"
    lost = sorted(node for node in reached if not isinstance(found.reader.value(node), _LAYER_VALUES))
    explained = [node for node in lost if node in found.sentences]
    if explained:
        return _cause(found, explained[0])
    unknown = [node for node in lost if node.op != "output"]
    if unknown:
        return _cause(found, unknown[0])
    return "its expert outputs leave the graph before they are summed in the tokens' dtype"


def _cause(found: Interpretation, node: Node) -> str:
    """Why ``node`` has no meaning: the sentence of the first step lost on the way of its row order, or its own."""
    read = found.reader
    lost, pending = {node}, [node]
    while pending:
        for source in pending.pop().all_input_nodes:
            # The row order lives in [R] and [E] values, and in the gather of the token rows.
            step = read.dim(source) <= 1 or source.target in (*_GATHERS, aten.unsqueeze.default)
            step = step or source in found.sentences
            if step and source.op == "call_function" and read.value(source) is None and source not in lost:
                lost.add(source)
                pending.append(source)
    explained = [step for step in lost if step in found.sentences]
    if explained:
        return found.sentences[min(explained)]
    return f"{read.describe(node)} has no meaning between the expert linears and the sum over choices"


def _match(found: Interpretation, head: Node, sink: Node) -> MoEMatch | Refusal:
    read, view = found.reader, found.view
    sink = _past_repetitions(found, sink)
    combined = read.value(sink)
    assert isinstance(combined, Combined)
    output = combined.output
    rows, ids, weights = output.hidden.rows, output.hidden.ids, output.weights
    assert weights is not None, "only weighted rows are grouped by token"
    gate = recognize_gate(output.expression)
    if isinstance(gate, str):
        return _refuse(found, sink, gate)
    gate_up, down = output.hidden.gate_up, output.down
    parameters = [node for node in (gate_up.weight, gate_up.bias, down.weight, down.bias) if node is not None]
    inputs = [rows.x, ids, weights, *parameters]
    region = _with_idle_writes(read, closure((sink,), inputs), sink)
    reason = _shape_reason(found, sink, output) or _context_reason(found, sink, region, inputs)
    if reason is not None:
        return _refuse(found, sink, reason)
    found.sums[read.root(sink)] = sink
    num_experts = read.static_size(gate_up.weight, 0)
    assert num_experts is not None, "expert weights have constant sizes"
    router = find_router(found, ids, weights, rows.x, region)
    symbols = tuple(number.symbol for number in gate.numbers if number.symbol is not None)
    return MoEMatch(
        layer=layer_name(view.origin[sink]),
        spelling=_spelling(head),
        x_TD=_dynamo(found, rows.x),
        ids_TK=_dynamo(found, ids),
        weights_TK=_dynamo(found, weights),
        gate_up=_dynamo(found, gate_up.weight),
        gate_up_bias=_dynamo(found, gate_up.bias) if gate_up.bias else None,
        down=_dynamo(found, down.weight),
        down_bias=_dynamo(found, down.bias) if down.bias else None,
        spec=ExpertsSpec(
            weight_layout=gate_up.layout,
            gate_layout=gate.layout,
            activation=gate.activation,
            activation_params=tuple(number.value for number in gate.parameters),
            num_experts=num_experts,
        ),
        output=_dynamo(found, sink),
        region=view.dynamo_nodes(region) - {_dynamo(found, node) for node in inputs},
        router=router.router if isinstance(router, RouterFound) else None,
        router_reason=None if isinstance(router, RouterFound) else router,
        negative_ids_wrap=rows.order is None and id_bound(read, ids) is None,
        symbols=symbols + (router.symbols if isinstance(router, RouterFound) else ()),
    )


def _with_idle_writes(read: Reader, region: frozenset[Node], sink: Node) -> frozenset[Node]:
    """``region`` and the in-place writes to its values that change nothing: the result means what was there before."""
    writes = (user for node in region for user in node.users if user < sink and user not in region)
    return region | {write for write in writes if _is_idle_write(read, write) and region.issuperset(write.users)}


def _is_idle_write(read: Reader, node: Node) -> bool:
    is_write = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
    return is_write and read.value(node) is not None and read.value(node) == read.value(node.args[0])


def _spelling(head: Node) -> str:
    """The name of the spelling that reads the first expert linear."""
    linears = (each for each in spellings() if each.part == "expert linears")
    return next(each.name for each in linears if any(head.target in rule.targets for rule in each.rules))


def _past_repetitions(found: Interpretation, sink: Node) -> Node:
    """The last node that only hands the sum on in the same mode, such as a cast to the dtype that it has."""
    view, root = found.view, found.reader.root(sink)
    while len(sink.users) == 1:
        user = next(iter(sink.users))
        if found.reader.root(user) is not root or view.state[view.origin[user]] != view.state[view.origin[sink]]:
            break
        sink = user
    return sink


def _dynamo(found: Interpretation, node: Node) -> Node:
    value = found.dynamo_value(node)
    assert value is not None, "a match reads and writes only whole results of Dynamo's nodes"
    return value


def _shape_reason(found: Interpretation, sink: Node, output: ExpertOutput) -> str | None:
    """Why the parts do not fit together as one call, if they do not."""
    read = found.reader
    rows, ids, weights = output.hidden.rows, output.hidden.ids, output.weights
    gate_up, down = output.hidden.gate_up, output.down
    assert weights is not None
    if not all(isinstance(size, int) for linear in (gate_up, down) for size in read.shape(linear.weight)):
        return f"expert weights must have constant sizes, got {[list(read.shape(w.weight)) for w in (gate_up, down)]}"
    if gate_up.layout != down.layout:
        return f"the two expert weights are stored in different layouts, {gate_up.layout} and {down.layout}"
    if read.shape(gate_up.weight)[0] != read.shape(down.weight)[0]:
        return f"the two expert weights hold {read.shape(gate_up.weight)[0]} and {read.shape(down.weight)[0]} experts"
    if not read.same_sizes(read.shape(ids), read.shape(weights)):
        return f"ids {list(read.shape(ids))} and routing weights {list(read.shape(weights))} differ in shape"
    if not read.same_sizes(read.shape(ids)[:1], read.shape(rows.x)[:1]):
        return f"{read.shape(ids)[0]} rows of ids for {read.shape(rows.x)[0]} tokens"
    if not read.same_sizes(read.shape(sink), read.shape(rows.x)):
        return f"the sum has shape {list(read.shape(sink))}, the tokens {list(read.shape(rows.x))}"
    return _parameter_reason(found, (gate_up, down), read.dtype(rows.x))


def _parameter_reason(found: Interpretation, linears: tuple[ExpertLinear, ...], dtype: torch.dtype) -> str | None:
    for linear in linears:
        for parameter in (linear.weight, linear.bias):
            if parameter is not None and found.reader.dtype(parameter) != dtype:
                name = found.reader.describe(parameter)
                return f"expert parameter {name} is {found.reader.dtype(parameter)}, the tokens are {dtype}"
    return None


def _context_reason(found: Interpretation, sink: Node, region: frozenset[Node], inputs: list[Node]) -> str | None:
    """Why the region cannot be replaced where it stands, if it cannot."""
    read, view = found.reader, found.view
    state = view.state[view.origin[sink]]
    if state.autocast or torch.is_autocast_enabled(sink.meta["val"].device.type):
        return "it runs under torch.autocast"
    if state.transform:
        return "it runs under a transform of torch.func"
    if any(view.state[view.origin[node]] != state for node in region if read.dim(node) >= 0 and _is_float(node)):
        return "its nodes run under different gradient or autocast modes"
    inner = [node for node in region if node is not sink and isinstance(read.value(node), _PRIVATE_VALUES)]
    # The input of a layer may be the sum of the layer before, handed on by nodes such as a cast to the dtype it has.
    inner = [node for node in inner if read.root(node) not in inputs]
    if reader := outside_reader(inner, region):
        return f"{read.describe(reader[0])} inside it is also read by {read.describe(reader[1])}"
    if write := interfering_write(view, region, inputs):
        return f"{read.describe(write)} may write in place to what the layer reads or computes before it is summed"
    if write := write_to_inputs(view, (node for node in sorted(region) if not _is_idle_write(read, node)), inputs):
        return f"{read.describe(write)} inside it writes in place to what it reads, and the op would read it afterwards"
    # The op keeps its inputs for its gradients, where the layer's own code may have kept copies.
    if state.grad and (write := later_write(view, sink, inputs)):
        return f"{read.describe(write)} writes in place to what the layer has read, and gradients need it as it was"
    missing = [node for node in (*inputs, sink) if found.dynamo_value(node) is None]
    if missing:
        return f"{read.describe(missing[0])} exists only inside one of Dynamo's nodes"
    return None


def _is_float(node: Node) -> bool:
    return node.meta["val"].is_floating_point()


def _refuse(found: Interpretation, node: Node, reason: str) -> Refusal:
    origin = found.view.origin[node]
    return Refusal(layer=layer_name(origin), stage="match", reason=reason, node=origin.name)


def layer_name(node: Node) -> str:
    """Dotted path of the module that ``node`` was traced in, for messages."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(iter(reversed(list(stack.values()))), ("",))[0]
    return path.removeprefix("L['self'].").removeprefix("L['fn'].") or "(top level)"
