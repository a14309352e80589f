"""Which layers run their experts one by one? Reads the meanings; never edits.

Such a layer is found from the end of the sum over its experts.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch.fx import Node

from ..conditions import Condition, ask
from ..facts import Check, ExpertsSpec, MoEMatch, Refusal, WeightLayout, Weights, nodes_of
from .id_bound import id_bound
from .in_place import functional_form
from .interpret import Interpretation, Reader, aten
from .loop_choices import terms_by_expert, tokens_of
from .loop_values import DenseSum, ExpertBody, ExpertMask, ExpertSum, ExpertTerm
from .loop_weights import LoopWeights, in_one_layout, layouts_of, loop_weights, taken_again
from .match_context import context_conditions, dtype_reason, layer_name, refuse, shape_reason
from .match_routing import RouterFound, find_router
from .patterns.activations import GateOfBody, gate_of
from .region import carries_tensors, closure
from .rule_checks import rule_checks


def ends_loop(found: Interpretation, node: Node) -> bool:
    """Whether ``node`` is the end of a sum over experts."""
    value = found.reader.value
    if isinstance(value(node), DenseSum):
        return not any(isinstance(value(user), DenseSum) for user in node.users)
    return isinstance(value(node), ExpertSum) and not any(isinstance(value(user), ExpertSum) for user in node.users)


def match_loop(found: Interpretation, sink: Node) -> MoEMatch | Refusal:
    """The layer whose sum over its experts ends at ``sink``, or why it keeps its code."""
    read, checks = found.reader, list[Check]()
    summed = _walk(read, sink)
    if isinstance(summed, str):
        ask([Condition("one sum", summed)], "match", checks)
        return refuse(found, sink, summed, [*rule_checks(found, [sink]), *checks])
    term = summed.terms[summed.first_expert]
    gate = gate_of(term.body.expression, len(term.body.first))
    reason = ask(_sum_conditions(found, summed, gate), "match", checks)
    if reason is not None:
        return refuse(found, sink, reason, [*rule_checks(found, [sink]), *checks])
    assert isinstance(gate, GateOfBody), "a condition refuses unknown gates"
    bodies = [in_one_layout(summed.terms[expert].body) for expert in sorted(summed.terms)]
    weights = loop_weights(read, bodies, gate.order)
    tokens = tokens_of(read, term)
    routing = [node for node in (tokens, term.ids, term.weights) if node is not None]
    inputs = [*routing, *weights.nodes()]
    region = closure((sink,), [*routing, *weights.sources(read)])
    misfit = Condition("shapes agree", _misfit(read, summed, bodies[0], weights, tokens))
    again = Condition("weights are taken once", taken_again(read, weights, region))
    context = context_conditions(found, sink, region, inputs, inner=_dependent(region, weights.nodes()))
    reason = ask(itertools.chain((misfit, again), context), "match", checks)
    if reason is not None:
        return refuse(found, sink, reason, [*rule_checks(found, [sink]), *checks])
    return _make_match(found, summed, gate, bodies[0].down.layout, weights, region, checks)


def _sum_conditions(found: Interpretation, summed: _Summed, gate: GateOfBody | str) -> Iterator[Condition]:
    """What must hold of the terms of a sum, whatever is around them."""
    lost = (found.sentences[user] for user in sorted(summed.sums[0].users) if user in found.sentences)
    yield Condition("sum is whole", next(lost, None))
    yield Condition("experts agree", _difference(found.reader, summed))
    yield Condition("every token is written", _unwritten(found.reader, summed))
    yield Condition("known gate", gate if isinstance(gate, str) else None)


class _Summed(NamedTuple):
    """What a sum adds up, by expert, and the nodes that do it, last first.

    ``stack_size``: the one term stands for so many experts, whose weights are stacked.
    """

    terms: dict[int, ExpertTerm]
    sums: list[Node]
    stack_size: int | None = None

    @property
    def num_experts(self) -> int:
        return self.stack_size or len(self.terms)

    @property
    def first_expert(self) -> int:
        return min(self.terms)


def _walk(read: Reader, sink: Node) -> _Summed | str:
    """The way back from the end of a sum, or why it is none over experts."""
    dense = read.value(sink)
    if isinstance(dense, DenseSum):
        return _all_at_once(read, sink, dense)
    sums, added, replaces = list[Node](), list[ExpertTerm](), False
    node: Node | None = sink
    while node is not None:
        value = read.value(node)
        if isinstance(value, ExpertSum):
            sums.append(node)
            term, following, replaces = value.term, value.previous, replaces or value.replaces
        else:
            assert isinstance(value, ExpertTerm), "a sum begins with zeros or with a term"
            term, following = value, None
        added += [term] if term is not None else []
        node = following
    terms = terms_by_expert(read, added, replaces=replaces)
    return terms if isinstance(terms, str) else _Summed(terms, sums)


def _all_at_once(read: Reader, sink: Node, dense: DenseSum) -> _Summed | str:
    weights, bodies = dense.weights, dense.bodies
    terms = {expert: ExpertTerm(body, weights.ids, expert, None, weights.weights) for expert, body in enumerate(bodies)}
    stack = bodies[0].down.weight
    stack_size = read.static_size(stack, 0) if read.dim(stack) == 3 else None
    summed = _Summed(terms, [sink], stack_size)
    if summed.num_experts != weights.num_experts:
        return f"the weights of {weights.num_experts} experts multiply the outputs of {summed.num_experts}"
    return summed


def _difference(read: Reader, summed: _Summed) -> str | None:
    """In what the experts of one sum differ, if they do in more than their weights."""
    terms, experts = summed.terms, sorted(summed.terms)
    if summed.stack_size is not None:
        return None
    if experts[0] < 0 or experts != list(range(experts[0], experts[-1] + 1)) or len(experts) < 2:
        return f"the experts of a sum must be two or more with consecutive ids, none below 0, got {_shortened(experts)}"
    first = terms[experts[0]]
    for expert in experts[1:]:
        term = terms[expert]
        for what, one, other in (
            ("is chosen by other ids", term.ids, first.ids),
            ("has other routing weights", term.weights, first.weights),
            ("reads other tokens", tokens_of(read, term), tokens_of(read, first)),
            ("has another gate", term.body.expression, first.body.expression),
            ("has linear maps of another form", _forms(term.body), _forms(first.body)),
        ):
            if one != other:
                return f"expert {expert} {what} than expert {experts[0]}"
    return None


def _unwritten(read: Reader, summed: _Summed) -> str | None:
    """Why some tokens may keep what was in the memory of the sum, if they may."""
    sink = summed.sums[0]
    value = read.value(sink)
    if not isinstance(value, ExpertSum) or not value.is_empty or _chooses_one_of(read, summed):
        return None
    return (
        f"{read.describe(sink)} writes to memory that is not initialised, and not every id is known to be an expert's"
    )


def _chooses_one_of(read: Reader, summed: _Summed) -> bool:
    """Whether every token is known to choose an expert of the sum."""
    first = summed.first_expert
    ids = summed.terms[first].ids
    bound = id_bound(read, ids)
    return bound is not None and first == 0 and bound <= summed.num_experts and 0 not in read.shape(ids)[1:]


def _shortened(experts: Sequence[int]) -> str:
    return str([*experts]) if len(experts) <= 8 else f"{[*experts[:8]]} ... ({len(experts)} experts)"


def _forms(body: ExpertBody) -> list[tuple[str, bool]]:
    return [(linear.layout, linear.bias is not None) for linear in (*body.first, body.down)]


# ---- what must hold


def _misfit(read: Reader, summed: _Summed, body: ExpertBody, weights: LoopWeights, tokens: Node) -> str | None:
    """Why tokens, ids, weights and sums do not fit together as one call, if they do not."""
    term, sink = summed.terms[summed.first_expert], summed.sums[0]
    if reason := shape_reason(read, sink, term.ids, tokens):
        return reason
    if term.mask is None and not _chooses_one_of(read, summed):
        return "every expert runs on every token, and not every id is known to be an expert's"
    if term.weights is not None:
        shape = read.shape(term.weights)
        is_column = read.dim(term.ids) == 1 and read.same_sizes(shape[1:], (1,))
        if not read.same_sizes(shape[:1] if is_column else shape, read.shape(term.ids)):
            return f"ids {list(read.shape(term.ids))} and routing weights {list(shape)} differ in shape"
    layouts = layouts_of(body)
    if len(layouts) != 1:
        return f"the linear maps of an expert are stored in different layouts, {' and '.join(sorted(layouts))}"
    for node in weights.nodes():
        if not all(isinstance(size, int) for size in read.shape(node)):
            return f"expert weights must have constant sizes, got {list(read.shape(node))}"
    if reason := dtype_reason(read, weights.nodes(), read.dtype(tokens)):
        return reason
    for node in summed.sums:
        if not read.holds(node, read.dtype(tokens)):
            return f"{read.describe(node)} sums in {read.dtype(node)}, the tokens are {read.dtype(tokens)}"
    if read.dtype(sink) != read.dtype(tokens):
        return f"the sum stays in {read.dtype(sink)}, the tokens are {read.dtype(tokens)}"
    return None


def _dependent(region: frozenset[Node], parameters: Sequence[Node]) -> list[Node]:
    """The nodes of a region that hold something of an expert: they go with the layer."""
    dependent = set(parameters)
    inner = []
    for node in sorted(region):
        if not dependent.isdisjoint(node.all_input_nodes) and carries_tensors(node):
            dependent.add(node)
            inner.append(node)
    return inner


def _asserts(found: Interpretation, region: frozenset[Node]) -> frozenset[Node]:
    """The Dynamo nodes that assert what holds anyway of how often an expert is hit, and those that they read.

    Any other assertion is the layer's own, and keeps what it reads.
    """
    nodes: set[Node] = set()
    for node in region:
        mask = getattr(found.reader.value(node), "mask", None)
        if not isinstance(mask, ExpertMask):
            continue
        most = _num_places(found.reader, mask)
        for made in found.view.results.get(node, ()):
            sizes = [user for user in made.users if user.target is aten.sym_size.int]
            facts = [user for size in sizes for user in size.users if _always_holds(user, most)]
            nodes |= {*sizes, *facts, *(user for fact in facts for user in fact.users)}
    return frozenset(nodes)


def _num_places(read: Reader, mask: ExpertMask) -> int | None:
    """How many elements a mask has, if it is the same at every call."""
    sizes = [size for size in read.shape(mask.ids)[: len(mask.axes)] if isinstance(size, int)]
    return math.prod(sizes) if len(sizes) == len(mask.axes) else None


def _always_holds(fact: Node, most: int | None) -> bool:
    """Whether a comparison of a number of hits with a constant is true for every number from 0 to ``most``."""
    limit = fact.args[1] if len(fact.args) == 2 else None
    if fact.target is operator.le:
        return isinstance(limit, int) and most is not None and limit >= most
    return fact.target is operator.ge and limit == 0


# ---- the record


def _make_match(
    found: Interpretation,
    summed: _Summed,
    gate: GateOfBody,
    layout: WeightLayout,
    weights: LoopWeights,
    region: frozenset[Node],
    checks: list[Check],
) -> MoEMatch:
    read, view, sink = found.reader, found.view, summed.sums[0]
    term = summed.terms[summed.first_expert]
    tokens = tokens_of(read, term)
    router = _router(found, term, weights, tokens, region)
    ask([Condition("router can join", router if isinstance(router, str) else None)], "match", checks)
    output, written = _written(found, summed.sums)
    if output is None:
        found.sums[read.root(sink)] = sink
        output = found.dynamo_value(sink)
    x_TD, ids_TK = found.dynamo_value(tokens), found.dynamo_value(term.ids)
    weights_TK = found.dynamo_value(term.weights) if term.weights is not None else None
    assert output is not None and x_TD is not None and ids_TK is not None, "conditions have checked them"
    gate_up, gate_up_bias, down, down_bias = experts = [_dynamo(found, each) for each in weights]
    assert gate_up is not None and down is not None, "every linear map has a weight"
    given = {node for each in experts for node in nodes_of(each)} | {x_TD, ids_TK, weights_TK}
    recognised = gate.gate
    router_found = router if isinstance(router, RouterFound) else None
    return MoEMatch(
        layer=layer_name(view.origin[sink]),
        spelling="expert_loop" if isinstance(read.value(sink), ExpertSum) else "dense_experts",
        x_TD=x_TD,
        ids_TK=ids_TK,
        weights_TK=weights_TK,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=down,
        down_bias=down_bias,
        spec=ExpertsSpec(
            weight_layout=layout,
            gate_layout=recognised.layout,
            activation=recognised.activation,
            activation_params=recognised.activation_params,
            num_experts=summed.first_expert + summed.num_experts,
            expert_offset=summed.first_expert,
        ),
        output=output,
        written=written,
        checks=(*rule_checks(found, [sink]), *checks),
        region=(view.dynamo_nodes(region) - given) | _asserts(found, region),
        router=router_found.router if router_found else None,
        router_reason=None if isinstance(router, RouterFound) else router,
        symbols=(*recognised.symbols, *(router_found.symbols if router_found else ())),
    )


def _router(
    found: Interpretation, term: ExpertTerm, weights: LoopWeights, tokens: Node, region: frozenset[Node]
) -> RouterFound | str:
    if not isinstance(weights.gate_up, Node):
        return "the weights of the experts are separate tensors"
    if term.weights is None:
        return "the layer has no routing weights"
    return find_router(found, term.ids, term.weights, tokens, region)


def _written(found: Interpretation, sums: Sequence[Node]) -> tuple[Node | None, tuple[Node, ...]]:
    """Where the sum is written in place: the Dynamo node of the last write, and Dynamo's nodes that are the tensor."""
    view, (sink, *_) = found.view, sums
    if functional_form(sink) is sink.target:
        return None, ()
    aliases = list(view.results.get(sink, ()))
    for node in sums:
        if functional_form(node) is node.target:
            break
        aliases.extend(view.results.get(node.args[0], ()))
    output = view.origin[sink]
    return output, tuple(dict.fromkeys(alias for alias in aliases if alias is not output))


def _dynamo(found: Interpretation, weights: Weights | None) -> Weights | None:
    if weights is None:
        return None
    nodes = [found.dynamo_value(node) for node in nodes_of(weights)]
    assert None not in nodes, "conditions have checked them"
    return nodes[0] if isinstance(weights, Node) else tuple(nodes)
