"""What looks like experts, but for one step? Reads the meanings and answers with refusals; never edits.

A loop over experts is noticed by the rows or the weights of two of them, experts that run all at once by tokens times a
stacked parameter, a dispatch with a capacity by its two products, and anything else by outputs of linear maps that are
weighted by a top-k.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.fx import Node

from ..facts import Refusal
from .expert_body import Product, product_of_matrix, read_body
from .in_place import functional_form
from .interpret import Interpretation, Reader, aten
from .loop_values import (
    DenseSum,
    DenseTerm,
    ExpertMask,
    ExpertSum,
    ExpertTerm,
    ExpertWeights,
    HitRows,
    HitWeights,
    SumAtHits,
)
from .match_context import refuse
from .patterns.dense_experts import product_of_stack
from .region import carries_tensors
from .rule_checks import rule_checks

# Values that only code with single experts has.
_LOOP_VALUES = (HitRows, HitWeights, ExpertWeights, ExpertTerm, ExpertSum, SumAtHits, DenseTerm, DenseSum)


def lost_experts(found: Interpretation) -> list[Refusal]:
    """A refusal for every layer of which no sum was found."""
    return [*_lost_loops(found), *_lost_stacks(found), *_capacities(found)]


def lost_choices(found: Interpretation) -> list[Refusal]:
    """A refusal for every top-k by which the outputs of several linear maps are weighted, whatever else it is.

    For graphs in which nothing else was found: what a layer computes from its output may look like this, too.
    """
    refusals = []
    for topk in found.view.graph.find_nodes(op="call_function", target=aten.topk.default):
        weighted = _weighted_by(found.reader, topk)
        if len({weight for _, weight in weighted}) > 1:
            refusals.append(_refuse(found, min(node for node, _ in weighted), _unknown_choice(found.reader, topk)))
    return refusals


def _weighted_by(read: Reader, topk: Node) -> list[tuple[Node, Node]]:
    """Products of what is made of ``topk`` and outputs of linear maps, each with the weight of a map."""
    products = [node for node in _reached(topk, but=aten.linear.default) if functional_form(node) is aten.mul.Tensor]
    factors = [(node, factor) for node in products for factor in node.all_input_nodes]
    return [(node, weight) for node, factor in factors for weight in _weights_of_maps(read, factor)]


def _weights_of_maps(read: Reader, node: Node) -> list[Node]:
    """The weights of the linear maps whose outputs ``node`` holds: one, several stacked, or some of these."""
    node = read.root(node)
    if node.target is aten.linear.default:
        return [node.args[1]]
    if node.target is aten.stack.default:
        return [weight for part in node.args[0] for weight in _weights_of_maps(read, part)]
    return _weights_of_maps(read, node.args[0]) if node.target is aten.gather.default else []


def _unknown_choice(read: Reader, topk: Node) -> str:
    if read.dim(topk.args[0]) > 2:
        return (
            f"the choice of {read.describe(topk)} is among scores with {read.dim(topk.args[0])} axes; loops over "
            "experts and experts on all tokens are recognised with scores [T, E]: flatten the tokens before the router"
        )
    return f"outputs of experts are weighted by the choice of {read.describe(topk)} in a way that no rule knows"


def _lost_loops(found: Interpretation) -> list[Refusal]:
    read = found.reader
    values = {node: value for node in found.view.graph.nodes if isinstance(value := read.value(node), _LOOP_VALUES)}
    summed = {value.term.ids for value in values.values() if isinstance(value, ExpertSum) and value.term is not None}
    summed |= {value.weights.ids for value in values.values() if isinstance(value, DenseSum)}
    experts: dict[Node, dict[int, Node]] = {}
    for node, value in values.items():
        by_expert = value.mask if isinstance(value, HitRows) else value
        is_used = not isinstance(value, ExpertWeights) or _weighs_a_product(read, node)
        if isinstance(by_expert, (ExpertMask, ExpertWeights)) and is_used:
            experts.setdefault(by_expert.ids, {}).setdefault(by_expert.expert, node)
    lost = [nodes for ids, nodes in experts.items() if ids not in summed and len(nodes) > 1]
    where = "between the rows of an expert and a sum over experts"
    return [_refuse(found, *_first_problem(found, min(nodes.values()), where)) for nodes in lost]


def _weighs_a_product(read: Reader, node: Node) -> bool:
    """Whether weights multiply what comes out of a linear map."""
    others = [
        source for user in node.users if functional_form(user) is aten.mul.Tensor for source in user.all_input_nodes
    ]
    return any(product_of_matrix(read, read.root(source)) is not None for source in others)


def _lost_stacks(found: Interpretation) -> list[Refusal]:
    """Experts that run all at once, and of which no sum by their weights was found."""
    read, graph = found.reader, found.view.graph
    sums = [value for node in graph.nodes if isinstance(value := read.value(node), DenseSum)]
    summed = {linear.weight for each in sums for body in each.bodies for linear in (*body.first, body.down)}
    products = {node: _product_of_parameter(read, node) for node in graph.nodes}
    refusals: dict[Node, Refusal] = {}
    for node, product in products.items():
        if product is None or product.rows_axes or read.dim(product.rows) != 2 or product.linear.weight in summed:
            continue
        following = sorted(node for node in _reached(node) if (other := products[node]) is not None and other.rows_axes)
        if following and following[0] not in refusals:
            body = read_body(read, following[0], product_of_stack)
            where = "between the outputs of all experts and their sum"
            problem = (following[0], body) if isinstance(body, str) else _first_problem(found, following[0], where)
            refusals[following[0]] = _refuse(found, *problem)
    return list(refusals.values())


def _product_of_parameter(read: Reader, node: Node) -> Product | None:
    product = product_of_stack(read, node) if node.op == "call_function" and read.dim(node) == 3 else None
    return product if product is not None and product.linear.weight.op == "placeholder" else None


def _capacities(found: Interpretation) -> list[Refusal]:
    """Tokens that are dispatched into slots of experts by one product, and combined by another."""
    dispatches = [node for node in found.view.graph.nodes if _has_letters(node, "tec,td->ecd")]
    combines = any(_has_letters(node, "tec,ecd->td") for node in found.view.graph.nodes)
    return [_refuse(found, node, _dropped_tokens(found.reader, node)) for node in dispatches if combines]


def _dropped_tokens(read: Reader, dispatch: Node) -> str:
    return (
        f"its tokens go into a limited number of slots for each expert at {read.describe(dispatch)}, and those that "
        "find none are dropped; perseus ops drop no token"
    )


def _has_letters(node: Node, equation: str) -> bool:
    """Whether a node is an einsum with ``equation``, whatever its letters are called."""
    if node.target is not aten.einsum.default:
        return False
    given = str(node.args[0]).replace(" ", "")
    if len(given) != len(equation):
        return False
    pairs = set(zip(given, equation, strict=True))
    return len(pairs) == len({one for one, _ in pairs}) == len({other for _, other in pairs})


def _reached(first: Node, *, but: Any = None) -> set[Node]:
    """``first`` and what follows from it, not through calls of ``but``."""
    reached, pending = {first}, [first]
    while pending:
        for user in pending.pop().users:
            is_followed = carries_tensors(user) and user.op != "output" and (but is None or user.target is not but)
            if user not in reached and is_followed:
                reached.add(user)
                pending.append(user)
    return reached


def _first_problem(found: Interpretation, first: Node, where: str) -> tuple[Node, str]:
    """The first step with a sentence on the way from ``first``, or the first one that has no meaning."""
    reached = _reached(first)
    explained = [node for node in (*reached, *_beside(reached)) if node in found.sentences]
    if explained:
        return min(explained), found.sentences[min(explained)]
    unknown = min((node for node in reached if node is not first and found.reader.value(node) is None), default=first)
    return unknown, f"{found.reader.describe(unknown)} has no meaning {where}"


def _beside(reached: Iterable[Node]) -> set[Node]:
    """What ``reached`` reads, and what that reads: weights come by a few steps of their own."""
    sources = {source for node in reached for source in node.all_input_nodes}
    return sources | {before for source in sources for before in source.all_input_nodes}


def _refuse(found: Interpretation, node: Node, reason: str) -> Refusal:
    return refuse(found, node, reason, rule_checks(found, [node], lost=[node]))
