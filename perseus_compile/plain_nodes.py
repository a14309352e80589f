"""Which nodes of Dynamo's graph can be no part of a MoE layer, so that tracing them would only take time?

Attention, norms and rotary embeddings are most of a decoder layer. They are known by what they compute and on which
shapes, never by names of modules. Reads Dynamo's graph and its example values; runs nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .dynamo_writes import written_node

# Out of place, and without a meaning for any rule where all tensors are floating point with at least _MIN_AXES axes.
_PASSING = frozenset(
    {
        *(operator.mul, operator.add, operator.sub, operator.truediv, operator.neg, operator.pow, operator.getitem),
        *(torch.mul, torch.add, torch.sub, torch.div, torch.neg, torch.pow, torch.cat, torch.tanh, torch.sigmoid),
        *(F.silu, F.gelu, F.softmax, F.relu, F.dropout),
        *("to", "float", "pow", "type_as", "contiguous", "view", "reshape", "transpose", "permute", "expand"),
        *("unsqueeze", "flatten", "mul", "add", "neg"),
    }
)
# The same, and no meaning of an input could pass through them.
_ENDING = frozenset(
    {
        *(F.linear, F.embedding, F.scaled_dot_product_attention, F.layer_norm, F.rms_norm, F.group_norm),
        *(torch.cos, torch.sin, torch.rsqrt, torch.mean, "cos", "sin", "rsqrt", "mean"),
    }
)
_SUMS = frozenset({operator.add, torch.add})
# These return their input where it is already what they make of it.
_CASTS = ("to", "float", "type_as", "contiguous")
# Routing and products with the weights of experts: what leads to them must be seen.
_ROUTING = frozenset(
    {
        *(torch.topk, torch.argmax, torch.max, torch.sort, torch.argsort, torch.gather, torch.scatter, torch.cumsum),
        *(torch.einsum, torch.functional.einsum, torch.bmm, torch.baddbmm),
        *("topk", "argmax", "max", "sort", "argsort", "gather", "scatter", "cumsum", "bmm", "baddbmm"),
    }
)
_MIN_AXES = 3


def plain_nodes(graph: Graph) -> dict[Node, Node]:
    """Nodes whose values no rule reads, each with the first one that holds the same tensor: itself, or a plain node.

    None at all where such a value meets another one in more than a sum, or is written in place. A sum of a plain value
    and another of its shape is plain, whatever the other is: a residual connection.
    """
    before_routing = _before_routing(graph)
    plain: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        if node not in before_routing and _is_wide(node) and _is_plain(node, plain):
            plain[node] = _first_holder(node, plain)
        elif any(source in plain for source in node.all_input_nodes) and _meets_others(node, plain):
            return {}
    return {} if _is_written(graph, plain) else plain


def _before_routing(graph: Graph) -> set[Node]:
    """The nodes that lead to routing, back to the linear maps and norms that they begin with."""
    found: set[Node] = set()
    pending = [node for node in graph.nodes if node.target in _ROUTING]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in found and source.op in ("call_function", "call_method"):
                found.add(source)
                if source.target not in _ENDING:
                    pending.append(source)
    return found


def _is_plain(node: Node, plain: Container[Node]) -> bool:
    if _may_write(node):
        return False
    if node.target in _ENDING:
        return node.target is not F.linear or _value(node.args[0]).dim() >= _MIN_AXES
    others = [source for source in node.all_input_nodes if source not in plain]
    if node.target in _SUMS and len(others) == 1 and len(node.all_input_nodes) == 2:
        return _is_wide(others[0]) and _same_sizes(_value(others[0]), _value(node))
    if node.target in _PASSING and len(others) < len(node.all_input_nodes):
        return all(
            each.op == "placeholder" and _is_floating(each) and _value(each).dim() < _MIN_AXES for each in others
        )
    return False


def _may_write(node: Node) -> bool:
    """Whether an argument says that the function writes in place, or may say so."""
    if node.kwargs.get("inplace") or "out" in node.kwargs or any(arg is True for arg in node.args):
        return True
    max_norms = (*node.args[3:4], node.kwargs.get("max_norm"))  # embedding rescales the rows that it reads
    return node.target is F.embedding and any(norm is not None for norm in max_norms)


def _meets_others(node: Node, plain: Container[Node]) -> bool:
    """Whether a value that is neither plain nor an input of the graph comes in beside a plain one."""
    others = [source for source in node.all_input_nodes if source not in plain and source.op != "placeholder"]
    return any(map(_is_floating, others))


def _first_holder(node: Node, plain: Mapping[Node, Node]) -> Node:
    source = node.args[0] if node.args else None
    if node.target in _CASTS and isinstance(source, Node) and source in plain:
        value, before = _value(node), _value(source)
        if value.untyped_storage()._cdata == before.untyped_storage()._cdata and value.dtype == before.dtype:
            return plain[source]
    return node


def _is_written(graph: Graph, plain: Mapping[Node, Node]) -> bool:
    written = [each for node in graph.nodes if (each := written_node(node)) is not None]
    storages = {_value(each).untyped_storage()._cdata for each in written if type(_value(each)) is FakeTensor}
    return any(_value(node).untyped_storage()._cdata in storages for node in plain) if storages else False


def _is_wide(node: Node) -> bool:
    value = _value(node)
    return type(value) is FakeTensor and _is_floating(node) and value.dim() >= _MIN_AXES


def _is_floating(node: Node) -> bool:
    return isinstance(_value(node), Tensor) and _value(node).is_floating_point()


def _same_sizes(a: Tensor, b: Tensor) -> bool:
    return a.dim() == b.dim() and all(statically_known_true(x == y) for x, y in zip(a.shape, b.shape, strict=True))


def _value(node: Any) -> Any:
    return node.meta.get("example_value")
