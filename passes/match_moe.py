"""Which MoE layers does this graph contain? Reads the view; never edits anything.

A layer is found from its end: a sum over choices whose meaning is known down to the tokens, the ids, the routing
weights and the expert weights. What looked like experts and is no such layer becomes a refusal with a sentence.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from ..capture import AtenView
from ..conditions import Condition, ask
from ..facts import Check, MoEMatch, Refusal
from .interpret import Interpretation, Reader, aten, interpret
from .lost_experts import lost_choices, lost_experts
from .match_context import (
    LAYER_VALUES,
    RoutingNodes,
    context_conditions,
    make_match,
    refuse,
    shape_reason,
    weights_reason,
    with_idle_writes,
)
from .match_loops import ends_loop, match_loop
from .match_parallel import sharing_of
from .match_routing import RouterFound, find_router
from .match_rows import match_rows
from .parallel_values import PendingSum
from .patterns import all_rules
from .patterns.activations import Gate, recognize_gate
from .patterns.all_to_all import ALL_TO_ALL_OPS
from .region import closure, written_nodes
from .rule_checks import GATHERS, lost_steps, rule_checks
from .values import Combined, ExpertOutput, Hidden, SelectedByExpert


def find_moe_layers(view: AtenView) -> list[MoEMatch | Refusal]:
    """All MoE layers of a graph, each as a match or as a refusal: in graph order, those without a sum last."""
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
                result = match_rows(found, node, reached) or _refuse_lost(found, node, reached, sinks)
        elif ends_loop(found, node):
            result = match_loop(found, node)
        elif node not in explained and (_is_lost_product(found, node) or _selects_by_lost_ids(found, node)):
            result = refuse(found, node, _cause(found, node), rule_checks(found, [], lost=lost_steps(found, node)))
        else:
            continue
        results.append(result)
        if isinstance(result, Refusal):
            _explain_rest(found, node, explained, passed)
    results += lost_experts(found)
    if not results:
        results += lost_choices(found)
    return results


def _reads(found: Interpretation, node: Node, kind: type) -> bool:
    return any(isinstance(found.reader.value(source), kind) for source in node.all_input_nodes)


def _is_expert_product(found: Interpretation, node: Node) -> bool:
    """A product with per-expert weights, or an exchange of rows between ranks: things that only experts have.

    They matter where no rule could place them.
    """
    inputs = [found.reader.value(source) for source in node.all_input_nodes]
    selects = any(isinstance(value, SelectedByExpert) and found.reader.dim(value.of) == 3 for value in inputs)
    is_exchange = node.target in ALL_TO_ALL_OPS
    return is_exchange or "grouped_mm" in str(node.target) or (selects and not _reads(found, node, Hidden))


def _is_lost_product(found: Interpretation, node: Node) -> bool:
    return node in found.sentences and _is_expert_product(found, node)


def _selects_by_lost_ids(found: Interpretation, node: Node) -> bool:
    """A batched product with matrices selected by what would be expert ids, but for a step that has a sentence."""
    if node.target is not aten.bmm.default:
        return False
    selections = [source for source in node.all_input_nodes if source.target is aten.index.Tensor]
    indices = [found.reader.root(index) for source in selections for index in source.all_input_nodes]
    return any(step in found.sentences for step in (*selections, *indices))


def _explain_rest(found: Interpretation, node: Node, explained: set[Node], passed: set[Node]) -> None:
    """Adds the expert product that follows ``node`` to ``explained``: one refusal per layer is enough.

    ``passed`` holds the nodes that earlier calls went through.
    """
    pending = [node]
    while pending:
        for user in pending.pop().users:
            # A gather of rows is where another layer begins.
            if user in passed or (user.target in GATHERS and node.target not in ALL_TO_ALL_OPS):
                continue
            passed.add(user)
            is_product = _is_expert_product(found, user) or _selects_by_lost_ids(found, user)
            if is_product:
                explained.add(user)
            if not is_product or node.target in ALL_TO_ALL_OPS:  # both products follow an exchange
                pending.append(user)


def _reached(found: Interpretation, head: Node) -> set[Node]:
    """``head`` and every node whose meaning descends from it, up to the layer's sum or the first nodes beyond."""
    reached, pending = {head}, [head]
    while pending:
        for user in pending.pop().users:
            if user not in reached:
                reached.add(user)
                if isinstance(found.reader.value(user), LAYER_VALUES) and not _is_sink(found, user):
                    pending.append(user)
    return reached


def _is_sink(found: Interpretation, node: Node) -> bool:
    """The first node that holds the layer's sum in the tokens' dtype."""
    value = found.reader.value(node)
    if not isinstance(value, Combined) or _is_summed_over_ranks(found, node):
        return False
    dtype = found.reader.dtype(value.output.hidden.rows.x)
    earlier = [s for s in node.all_input_nodes if isinstance(found.reader.value(s), Combined)]
    return found.reader.dtype(node) == dtype and all(found.reader.dtype(source) != dtype for source in earlier)


def _is_summed_over_ranks(found: Interpretation, node: Node) -> bool:
    """Whether ``node``, or what only repeats it, is a part of a sum over ranks."""
    read = found.reader
    return any(
        isinstance(read.value(user), PendingSum)
        or (read.root(user) is read.root(node) and _is_summed_over_ranks(found, user))
        for user in node.users
    )


def _refuse_lost(found: Interpretation, head: Node, reached: set[Node], sinks: list[Node]) -> Refusal:
    """The refusal of a layer whose meaning ends before its sum, or that has several sums."""
    known = {node for node in reached if isinstance(found.reader.value(node), LAYER_VALUES)}
    unknown = sorted(node for node in reached - known if node.op != "output")
    first = next((node for node in unknown if node in found.sentences), unknown[0] if unknown else None)
    reason = _why_lost(found, first, len(sinks))
    steps = lost_steps(found, first) if first is not None and not sinks else ()
    return refuse(found, head, reason, rule_checks(found, known, lost=steps))


def _why_lost(found: Interpretation, first: Node | None, num_sums: int) -> str:
    if num_sums:
        return f"its expert outputs are summed {num_sums} times"
    if first is not None:
        return _cause(found, first)
    return "its expert outputs leave the graph before they are summed in the tokens' dtype"


def _cause(found: Interpretation, node: Node) -> str:
    """Why ``node`` has no meaning: the sentence of the first step lost on the way of its row order, or its own."""
    explained = [step for step in lost_steps(found, node) if step in found.sentences]
    if explained:
        return found.sentences[min(explained)]
    return f"{found.reader.describe(node)} has no meaning between the expert linears and the sum over choices"


def _match(found: Interpretation, head: Node, sink: Node) -> MoEMatch | Refusal:
    read = found.reader
    sink = _past_repetitions(found, sink)
    combined = read.value(sink)
    assert isinstance(combined, Combined)
    output = combined.output
    rows, ids, weights = output.hidden.rows, output.hidden.ids, output.weights
    assert weights is not None, "only weighted rows are grouped by token"
    conditions: list[Check] = []
    sharing = sharing_of(read, combined)
    if sharing is not None:
        ask([Condition("one layer of its ranks", sharing if isinstance(sharing, str) else None)], "match", conditions)
    if isinstance(sharing, str):
        return refuse(found, sink, sharing, [*rule_checks(found, [sink]), *conditions])
    if sharing is not None:
        ids, weights = sharing.ids, sharing.weights
    gate = recognize_gate(output.expression)
    gate_up, down = output.hidden.gate_up, output.down
    parameters = [node for node in (gate_up.weight, gate_up.bias, down.weight, down.bias) if node is not None]
    inputs = [rows.x, ids, weights, *parameters]
    region = with_idle_writes(read, closure((sink,), inputs), sink)
    reason = ask(_conditions(found, sink, output, gate, region, inputs), "match", conditions)
    if reason is not None:
        return refuse(found, sink, reason, [*rule_checks(found, [sink], inputs), *conditions])
    assert isinstance(gate, Gate), "a condition refuses unknown gates"
    found.sums[read.root(sink)] = sink
    router: RouterFound | str = "its experts are on several ranks"
    if sharing is None or sharing.spec is None:
        router = find_router(found, ids, weights, rows.x, region)
    ask([Condition("router can join", router if isinstance(router, str) else None)], "match", conditions)
    return make_match(
        found,
        head,
        sink,
        output,
        gate,
        region,
        routing=RoutingNodes(rows.x, ids, weights),
        router=router.router if isinstance(router, RouterFound) else None,
        router_reason=None if isinstance(router, RouterFound) else router,
        symbols=router.symbols if isinstance(router, RouterFound) else (),
        sharing=sharing,
        conditions=conditions,
    )


def _conditions(
    found: Interpretation,
    sink: Node,
    output: ExpertOutput,
    gate: Gate | str,
    region: frozenset[Node],
    inputs: list[Node],
) -> Iterator[Condition]:
    read = found.reader
    dtype = read.dtype(output.hidden.rows.x)
    if written := _write_reason(read, sink):
        yield Condition("a value of its own", written)
    yield Condition("known gate", gate if isinstance(gate, str) else None)
    yield Condition("weights agree", weights_reason(read, output.hidden.gate_up, output.down, dtype))
    yield Condition("shapes agree", _shape_reason(read, sink, output))
    yield from context_conditions(found, sink, region, inputs)


def _past_repetitions(found: Interpretation, sink: Node) -> Node:
    """The last node that only hands the sum on in the same mode, such as a cast to the dtype that it has."""
    read, view = found.reader, found.view
    while len(sink.users) == 1:
        user = next(iter(sink.users))
        is_write = user.target is aten.copy_.default and read.value(user) == read.value(sink)
        if not is_write and read.root(user) is not read.root(sink):
            break
        if view.state[view.origin[user]] != view.state[view.origin[sink]]:
            break
        sink = user
    return sink


def _write_reason(read: Reader, sink: Node) -> str | None:
    if written_nodes(sink):
        return f"the sum over ranks is only what {read.describe(sink)} writes; use the result of all_reduce"
    return None


def _shape_reason(read: Reader, sink: Node, output: ExpertOutput) -> str | None:
    """Why tokens, ids, weights and sum do not fit together as one call, if they do not."""
    rows, ids, weights = output.hidden.rows, output.hidden.ids, output.weights
    assert weights is not None
    if not read.same_sizes(read.shape(ids), read.shape(weights)):
        return f"ids {list(read.shape(ids))} and routing weights {list(read.shape(weights))} differ in shape"
    return shape_reason(read, sink, ids, rows.x)
