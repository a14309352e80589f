"""Is a matched layer rewritten, and into which op? Stage 3: decides, never edits the graph.

A plan may say no: the answer is then a ``Refusal`` with a sentence, and the layer keeps its own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.fx import Node

from . import grouped
from .conditions import Condition, ask
from .errors import UnsupportedMoE
from .facts import LIST_AXES, MoEMatch, MoEPlan, Refusal, RouterMatch, Weights, nodes_of
from .lower import (
    SUPPORTED_DTYPES,
    Arg,
    ExpertsArgs,
    RouterArgs,
    check_experts,
    check_routing,
    listed_args,
    token_arg,
    whole_arg,
)


def plan(match: MoEMatch, *, verify: bool = False) -> MoEPlan | Refusal:
    """Decides what becomes of ``match``. ``verify``: its rewrite must be one that this process can check alone.

    Where the layer holds numbers that Dynamo made inputs of the graph (under ``dynamic=True`` every Python float of a
    module is one), rewriting fixes them in the op, and this adds the guards that say so. Token counts are never fixed.
    """
    checks = list(match.checks)
    reason = ask(_conditions(match, verify), "plan", checks)
    if reason is not None:
        return Refusal(layer=match.layer, stage="plan", reason=reason, node=match.output.name, checks=tuple(checks))
    for symbol in match.symbols:
        # Reading the value is what adds the guard.
        (float if isinstance(symbol, torch.SymFloat) else int)(symbol)
    if not isinstance(match.gate_up, Node):
        return MoEPlan(op="experts_list", why=f"experts alone: {match.router_reason}", checks=tuple(checks))
    if match.parallel is not None:
        num_local = _value(match.gate_up).shape[0]
        why = match.parallel.describe(match.spec.num_experts, num_local)
        return MoEPlan(op="experts_parallel", why=why, checks=tuple(checks))
    apart = match.router_reason if match.router is None else _illegal_router(match, match.router)
    if match.router is not None:
        ask([Condition("op covers the router", apart)], "plan", checks)
    if apart is None:
        return MoEPlan(op="moe", why="router and experts are one node", checks=tuple(checks))
    return MoEPlan(op="experts", why=f"experts alone: {apart}", checks=tuple(checks))


def _conditions(match: MoEMatch, verify: bool) -> Iterator[Condition]:
    """What must hold so that the op runs wherever the layer's own code did."""
    x = match.x_TD.meta["example_value"]
    has_device = x.device.type in ("cpu", "cuda")
    yield Condition("device", None if has_device else f"perseus ops run on cpu and cuda, the layer is on {x.device}")
    supported = ", ".join(str(dtype) for dtype in SUPPORTED_DTYPES)
    has_dtype = x.dtype in SUPPORTED_DTYPES
    yield Condition("dtype", None if has_dtype else f"the layer's dtype must be one of {supported}, got {x.dtype}")
    yield Condition("op covers the experts", _illegal_experts(match))
    if x.device.type == "cuda" and isinstance(match.gate_up, Node):
        # Gradients, and what the fused kernel leaves out, take the plain path: it must cover the layer.
        uncovered = grouped.unsupported_reason(x, _value(match.gate_up), _value(match.down), match.spec)
        yield Condition("plain path covers the experts", uncovered)
    if verify and match.parallel is not None:
        yield Condition(
            "can be verified",
            "option 'verify' runs a layer on one process, and the ranks of this one exchange rows; leave verify off",
        )


def _illegal_experts(match: MoEMatch) -> str | None:
    """Why ``perseus::experts`` would raise on this layer, if it would: code that runs must not stop to run."""
    x, ids = token_arg(_value(match.x_TD)), token_arg(_value(match.ids_TK))
    ids = ids._replace(shape=ids.shape or (1,))
    weights = ids._replace(dtype=x.dtype)
    if match.weights_TK is not None:
        weights = token_arg(_value(match.weights_TK))
        weights = weights._replace(shape=weights.shape or (1,))

    def check() -> None:
        if isinstance(match.gate_up, Node):
            args = ExpertsArgs._make([x, ids, weights, *(_whole_arg(node) for node in match.experts)])
        else:
            lists = [_entry_args(each, num_axes) for each, num_axes in zip(match.experts, LIST_AXES, strict=True)]
            args = listed_args((x, ids, weights), lists, match.spec)
        check_experts(args, match.spec)

    return _error_of(check)


def _entry_args(weights: Weights | None, num_axes: int) -> list[Arg]:
    """The facts of each tensor of a list; a stack stands for its entries, which have so many axes."""
    args = []
    for arg in (whole_arg(_value(node)) for node in nodes_of(weights)):
        is_stack = len(arg.shape) > num_axes
        args += [arg._replace(shape=arg.shape[1:])] * arg.shape[0] if is_stack else [arg]
    return args


def _illegal_router(match: MoEMatch, router: RouterMatch) -> str | None:
    weight = whole_arg(_value(router.weight_ED))
    assert weight is not None, "whole_arg answers None for None alone"
    args = RouterArgs(
        token_arg(_value(match.x_TD)), weight, _whole_arg(router.bias_E), _whole_arg(router.correction_bias_E)
    )
    return _error_of(lambda: check_routing(args, router.spec, match.spec.num_experts))


def _error_of(check: Callable[[], None]) -> str | None:
    try:
        check()
    except UnsupportedMoE as error:
        return str(error)
    return None


def _value(node: Node) -> torch.Tensor:
    value = node.meta["example_value"]
    assert isinstance(value, torch.Tensor), "a match names tensors"
    return value


def _whole_arg(node: Node | None) -> Arg | None:
    return None if node is None else whole_arg(_value(node))
