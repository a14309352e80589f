"""Are these experts, although what follows them is no known sum? Reads the meanings; never edits.

Some layers put a step of their own between an expert and its routing weight, such as a norm. Their experts alone are
``perseus::experts`` on the routed rows, each a token of one choice with the weight 1; the step and the sum stay as they
are.
"""

from __future__ import annotations

from torch.fx import Node

from ..conditions import Condition, ask
from ..facts import Check, MoEMatch
from .interpret import Interpretation
from .match_context import RoutingNodes, context_conditions, make_match, weights_reason, with_idle_writes
from .parallel_values import OwnIds
from .patterns.activations import recognize_gate
from .region import closure
from .values import ExpertOutput, PerChoice, TokenRows, Value


def match_rows(found: Interpretation, head: Node, reached: set[Node]) -> MoEMatch | None:
    """The experts that begin at ``head`` as a match that ends at their outputs, one row per choice.

    ``reached``: every node whose meaning descends from ``head``, and the first nodes beyond. Answers with None where
    the experts themselves are not whole, or where a step that follows them is refused with a sentence.
    """
    read = found.reader
    outputs = {node: value for node in reached if isinstance(value := read.value(node), ExpertOutput)}
    lost = sorted(node for node in reached if read.value(node) is None and node.op != "output")
    if not lost or any(value.weights is not None for value in outputs.values()):
        return None
    if any(node in found.sentences for node in lost):
        return None
    if any(isinstance(read.value(value.hidden.ids), OwnIds) for value in outputs.values()):
        return None  # masks of other ranks' rows were read as nothing, which holds for rows of weight 0 alone
    whole = [node for node, output in outputs.items() if _is_row_of_its_token(found, node, output)]
    if not whole:
        return None
    sink = read.root(max(whole))
    output = outputs[sink]
    rows, gate_up, down = output.hidden.rows, output.hidden.gate_up, output.down
    gate = recognize_gate(output.expression)
    x = _last_before(found, head, TokenRows(rows.x, rows.order, rows.top_k))
    ids = _last_before(found, head, PerChoice(output.hidden.ids, rows.order))
    if isinstance(gate, str) or x is None or ids is None or not read.same_sizes(read.shape(sink), read.shape(x)):
        return None
    parameters = [node for node in (gate_up.weight, gate_up.bias, down.weight, down.bias) if node is not None]
    inputs = [x, ids, *parameters]
    region = with_idle_writes(read, closure((sink,), inputs), sink)
    checks: list[Check] = []
    weights = Condition("weights agree", weights_reason(read, gate_up, down, read.dtype(x)))
    if ask([weights, *context_conditions(found, sink, region, inputs)], "match", checks):
        return None
    step = read.describe(lost[0])
    router = Condition("router can join", f"{step} comes between the experts and their routing weights")
    ask([router], "match", checks)
    return make_match(
        found,
        head,
        sink,
        output,
        gate,
        region,
        routing=RoutingNodes(x, ids, None),
        router=None,
        router_reason=router.reason,
        conditions=checks,
    )


def _is_row_of_its_token(found: Interpretation, node: Node, output: ExpertOutput) -> bool:
    """Whether ``node`` has the shape, the dtype and the order of the token rows that it comes from."""
    rows, read = output.hidden.rows, found.reader
    return output.unit_axis is None and output.order is rows.order and read.dtype(node) == read.dtype(rows.x)


def _last_before(found: Interpretation, head: Node, value: Value) -> Node | None:
    """The last node before ``head`` with this meaning that is a whole result of one of Dynamo's nodes."""
    read, node = found.reader, head.prev
    while node.op != "root":
        is_floating_ids = isinstance(value, PerChoice) and node.op == "call_function" and _is_floating(found, node)
        if read.value(node) == value and not is_floating_ids and found.dynamo_value(node) is not None:
            return node
        node = node.prev
    return None


def _is_floating(found: Interpretation, node: Node) -> bool:
    return found.reader.dim(node) >= 0 and found.reader.dtype(node).is_floating_point
