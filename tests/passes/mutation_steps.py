"""Which steps does the fuzzer insert into a graph? Each makes nodes from one that carries a tensor.

Most change numbers, some only shape, dtype or gradients, a few nothing; not every step runs on every tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

aten = torch.ops.aten


def _call(target: OpOverload, *args: Any, **kwargs: Any) -> Callable[[Node], Node]:
    return lambda source: source.graph.call_function(target, (source, *args), kwargs)


def _round_trip(dtype: torch.dtype) -> Callable[[Node], Node]:
    def make(source: Node) -> Node:
        there = source.graph.call_function(aten.to.dtype, (source, dtype))
        return source.graph.call_function(aten.to.dtype, (there, source.meta["val"].dtype))

    return make


def _pair(target: OpOverload, part: int, *args: Any) -> Callable[[Node], Node]:
    def make(source: Node) -> Node:
        return source.graph.call_function(operator.getitem, (source.graph.call_function(target, (source, *args)), part))

    return make


def _with_itself(target: OpOverload) -> Callable[[Node], Node]:
    return lambda source: source.graph.call_function(target, (source, source))


def _reshaped_transpose(source: Node) -> Node:
    """The same shape with the numbers read in transposed order."""
    value = source.meta["val"]
    swapped = source.graph.call_function(aten.transpose.int, (source, 0, value.dim() - 1))
    # Sizes that depend on the token count are not constants: one of them may be left to reshape.
    sizes = [size if isinstance(size, int) else -1 for size in value.shape]
    return source.graph.call_function(aten.reshape.default, (swapped, sizes))


def _normalised(source: Node) -> Node:
    return source.graph.call_function(aten.layer_norm.default, (source, [source.meta["val"].shape[-1]]))


def _first_everywhere(source: Node) -> Node:
    first = source.graph.call_function(aten.slice.Tensor, (source, 0, 0, 1))
    return source.graph.call_function(aten.expand_as.default, (first, source))


def _centred(source: Node) -> Node:
    mean = source.graph.call_function(aten.mean.dim, (source, [-1], True))
    return source.graph.call_function(aten.sub.Tensor, (source, mean))


def _write_through(view: OpOverload, *args: Any) -> Callable[[Node], Node]:
    """A write to a view: the tensor is written to, and none of its own nodes says so."""

    def make(node: Node) -> Node:
        return node.graph.call_function(aten.mul_.Tensor, (node.graph.call_function(view, (node, *args)), 2))

    return make


def _copy_first(node: Node) -> Node:
    """The last entry of each row becomes the first one, by a write through a view: two choices of one expert."""
    first, last = (node.graph.call_function(aten.slice.Tensor, (node, -1, *ends)) for ends in ((0, 1), (-1, 2**63 - 1)))
    return node.graph.call_function(aten.copy_.default, (last, first))


def _copy_flip(node: Node) -> Node:
    return node.graph.call_function(
        aten.copy_.default, (node, node.graph.call_function(aten.flip.default, (node, [0])))
    )


# Steps between a tensor and its readers.
STEPS: dict[str, Callable[[Node], Node]] = {
    "neg": _call(aten.neg.default),
    "relu": _call(aten.relu.default),
    "silu": _call(aten.silu.default),
    "tanh": _call(aten.tanh.default),
    "abs": _call(aten.abs.default),
    "* 1.5": _call(aten.mul.Tensor, 1.5),
    "* 2": _call(aten.mul.Tensor, 2),
    "+ 1": _call(aten.add.Tensor, 1),
    "- 1": _call(aten.sub.Tensor, 1),
    "+ 1e-2": _call(aten.add.Tensor, 1e-2),
    "+ itself": _with_itself(aten.add.Tensor),
    "* itself": _with_itself(aten.mul.Tensor),
    "clamp to [-0.5, 0.5]": _call(aten.clamp.default, -0.5, 0.5),
    "clamp to [0, 1]": _call(aten.clamp.default, 0, 1),
    "clamp to [1, inf)": _call(aten.clamp.default, 1),
    "clamp to at most 2": _call(aten.clamp_max.default, 2),
    "% 2": _call(aten.remainder.Scalar, 2),
    "detach": _call(aten.detach.default),
    "clone": _call(aten.clone.default),
    "contiguous": _call(aten.contiguous.default),
    "roll": _call(aten.roll.default, [1], [0]),
    "roll of the last axis": _call(aten.roll.default, [1], [-1]),
    "flip": _call(aten.flip.default, [0]),
    "flip of the last axis": _call(aten.flip.default, [-1]),
    "transpose": _call(aten.transpose.int, 0, 1),
    "transpose of the last axes": _call(aten.transpose.int, -1, -2),
    "mT": _call(aten.mT.default),
    "flat and back as it lies": _reshaped_transpose,
    "bfloat16 and back": _round_trip(torch.bfloat16),
    "float16 and back": _round_trip(torch.float16),
    "int32 and back": _round_trip(torch.int32),
    "int8 and back": _round_trip(torch.int8),
    "bool and back": _round_trip(torch.bool),
    "to float32": _call(aten.to.dtype, torch.float32),
    "to float64": _call(aten.to.dtype, torch.float64),
    "to bfloat16": _call(aten.to.dtype, torch.bfloat16),
    "to int32": _call(aten.to.dtype, torch.int32),
    "softmax": _call(aten.softmax.int, -1),
    "softmax over the first axis": _call(aten.softmax.int, 0),
    "sigmoid": _call(aten.sigmoid.default),
    "sorted": _pair(aten.sort.default, 0),
    "argsort": _call(aten.argsort.default),
    "sorted descending": _pair(aten.sort.default, 0, -1, True),
    "cumsum": _call(aten.cumsum.default, 0),
    "layer norm": _normalised,
    "dropout of everything": _call(aten.dropout.default, 1.0, True),
    "dropout in evaluation": _call(aten.dropout.default, 0.5, False),
    "nan_to_num": _call(aten.nan_to_num.default),
    "first entry everywhere": _first_everywhere,
    "upper triangle": _call(aten.triu.default),
    "unit axis in front": _call(aten.unsqueeze.default, 0),
    "unit axis behind": _call(aten.unsqueeze.default, -1),
    "sum with its axis": _call(aten.sum.dim_IntList, [-1], True),
    "sum over the first axis": _call(aten.sum.dim_IntList, [0], True),
    "slice from 1": _call(aten.slice.Tensor, 0, 1),
    "slice to -1": _call(aten.slice.Tensor, -1, 0, -1),
    "slice of everything": _call(aten.slice.Tensor, 0, 0, 2**63 - 1),
    "every second": _call(aten.slice.Tensor, -1, 0, 2**63 - 1, 2),
    "- its mean": _centred,
}


# Steps that write to the tensor.
WRITES: dict[str, Callable[[Node], Node]] = {
    "zero_": _call(aten.zero_.default),
    "mul_(2)": _call(aten.mul_.Tensor, 2),
    "add_(1)": _call(aten.add_.Tensor, 1),
    "neg_": _call(aten.neg_.default),
    "clamp_(0, 1)": _call(aten.clamp_.default, 0, 1),
    "[0].mul_(2)": _write_through(aten.select.int, 0, 0),
    "detach().mul_(2)": _write_through(aten.detach.default),
    "[..., :1].mul_(2)": _write_through(aten.slice.Tensor, -1, 0, 1),
    "copy_ of its flip": _copy_flip,
    "[..., -1:].copy_([..., :1])": _copy_first,
}
