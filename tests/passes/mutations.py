"""Every single change of an ATen graph that could make a MoE layer into something else: the data of the fuzzer.

A mutation is a name and a function that yields the edits it can make at one node. An edit changes one node, argument or
edge of the graph, in place; most edits make another function, some do not run at all, a few change nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from mutation_steps import STEPS, WRITES
from torch._ops import OpOverload
from torch.fx import Graph, Node

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Edit:
    """One change at one place. ``what`` tells it to a reader; ``apply`` makes it, once."""

    what: str
    apply: Callable[[], object]


Edits: TypeAlias = Iterator[Edit]


def edits(graph: Graph, mutation: str) -> Edits:
    """Every edit of ``graph`` that a mutation can make. Nodes carry fake values in ``meta["val"]``."""
    return (edit for node in graph.nodes if node.op != "output" for edit in MUTATIONS[mutation](node))


# ---- what a node is


def tensor(node: Any) -> torch.Tensor | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def is_call(node: Node) -> bool:
    return node.op == "call_function"


def _like(node: Node) -> list[Node]:
    """Earlier and later nodes whose tensors have the dtype and the number of axes of ``node``'s."""
    mine = tensor(node)
    assert mine is not None, "only tensors are exchanged"
    others = [(other, tensor(other)) for other in node.graph.nodes if other is not node]
    return [other for other, value in others if value is not None and _kind(value) == _kind(mine)]


def _kind(value: torch.Tensor) -> tuple[torch.dtype, int]:
    return value.dtype, value.dim()


def unchanged(node: Node) -> Edits:
    """The graph as it is."""
    if node.prev.op == "root":
        yield Edit("nothing", lambda: None)


# ---- operators


_SIBLINGS: tuple[tuple[OpOverload, ...], ...] = (
    (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default, aten.pow.Tensor_Tensor),
    (
        aten.silu.default,
        aten.gelu.default,
        aten.relu.default,
        aten.sigmoid.default,
        aten.tanh.default,
        aten.neg.default,
        aten.abs.default,
        aten.square.default,
        aten.mish.default,
        aten.clone.default,
    ),
    (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.logsumexp.default, aten.prod.dim_int),
    (aten.softmax.int, aten.log_softmax.int, aten.cumsum.default, aten.logcumsumexp.default),
    (aten.floor_divide.default, aten.remainder.Scalar, aten.mul.Tensor, aten.bitwise_right_shift.Tensor_Scalar),
    (aten.sort.default, aten.sort.stable, aten.cummax.default, aten.topk.default),
    (aten.argsort.default, aten.argsort.stable, aten.clone.default, aten.cumsum.default),
    (aten.cumsum.default, aten.cumprod.default, aten.flip.default),
    (aten.ge.Scalar, aten.gt.Scalar, aten.le.Scalar, aten.lt.Scalar, aten.eq.Scalar, aten.ne.Scalar),
    (aten.zeros_like.default, aten.ones_like.default),
    (aten.scatter.value, aten.scatter.src, aten.index_fill.int_Scalar),
    (aten.bitwise_not.default, aten.logical_not.default, aten.clone.default),
    (aten.clamp.default, aten.hardtanh.default),
    (aten.clamp_max.default, aten.clamp_min.default),
    (aten.transpose.int, aten.narrow_copy.default),
    (aten.gather.default, aten.index_select.default),
    (aten.repeat_interleave.self_int, aten.tile.default),
    (aten.chunk.default, aten.tensor_split.sections, aten.split.Tensor),
    (aten.unsqueeze.default, aten.squeeze.dim),
    (aten.view.default, aten.expand.default, aten.reshape.default),
    (aten.masked_fill.Scalar, aten.mul.Tensor),
)


def sibling(node: Node) -> Edits:
    """An operator of the same signature, of the in-place kind where it is one."""
    for family in _SIBLINGS:
        for members in (family, tuple(filter(None, map(_in_place, family)))):
            if node.target in members:
                for other in members:
                    if other is not node.target:
                        yield Edit(f"{node.target} {node} -> {other}", _target_setter(node, other))


def _in_place(target: OpOverload) -> OpOverload | None:
    name = target._schema.name.removeprefix("aten::")
    return getattr(getattr(aten, f"{name}_", None), target._overloadname, None)


def _target_setter(node: Node, target: OpOverload) -> Callable[[], None]:
    def apply() -> None:
        node.target = target
        names = {argument.name for argument in target._schema.arguments}
        node.kwargs = {name: value for name, value in node.kwargs.items() if name in names}

    return apply


def tile_tokens(node: Node) -> Edits:
    """x.repeat(K, 1) for x.repeat_interleave(K, 0): the same rows in another order."""
    if node.target is aten.repeat_interleave.self_int:

        def apply() -> None:
            axes = tensor(node.args[0]).dim()
            node.target, node.args = aten.repeat.default, (node.args[0], [node.args[1], *[1] * (axes - 1)])

        yield Edit(f"{node} repeats all tokens together", apply)


# ---- arguments


_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.bool,
)


def _other_numbers(value: Any) -> list[Any]:
    """Values of the type of ``value`` to put in its place."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return sorted({value + 1, value - 1, -value, 0, 2 * value, value // 2} - {value})
    if isinstance(value, float):
        candidates = [-value, value + 1.0, value * 1.5, value / 2, 0.0, 1e-3]
        return [other for other in dict.fromkeys(candidates) if not math.isnan(other) and other != value]
    if isinstance(value, torch.dtype):
        return [dtype for dtype in _DTYPES if dtype != value]
    if isinstance(value, str):
        return _other_strings(value)
    return []


def _other_strings(value: str) -> list[str]:
    if "->" not in value:
        return [other for other in ("none", "tanh", "floor", "trunc") if other != value]
    letters = sorted(set(value) & set("abcdefghijklmnopqrstuvwxyz"))
    spots = [spot for spot, letter in enumerate(value) if letter in letters]
    changed = [value[:spot] + letter + value[spot + 1 :] for spot in spots for letter in letters]
    left, _, out = value.partition("->")
    return [other for other in dict.fromkeys([*changed, f"{left}->{out[::-1]}"]) if other != value]


def argument(node: Node) -> Edits:
    """Another number, dtype or string in one place, lists included."""
    if not is_call(node):
        return
    for position, value in enumerate(node.args):
        for other in (*_other_numbers(value), *_other_lists(value)):
            yield Edit(
                f"{_name(node)} argument {position}: {value} -> {other}",
                lambda position=position, other=other: node.update_arg(position, other),
            )
    for name, value in node.kwargs.items():
        for other in (*_other_numbers(value), *_other_lists(value)):
            yield Edit(
                f"{_name(node)} {name}: {value} -> {other}",
                lambda name=name, other=other: node.update_kwarg(name, other),
            )


def _other_lists(value: Any) -> Iterator[list[Any]]:
    if not isinstance(value, (list, tuple)):
        return
    items = list(value)
    for spot, item in enumerate(items):
        for other in _other_numbers(item):
            yield [*items[:spot], other, *items[spot + 1 :]]
        yield [*items[:spot], *items[spot + 1 :]]
        if spot and items[spot] is not items[spot - 1]:
            yield [*items[: spot - 1], items[spot], items[spot - 1], *items[spot + 1 :]]


# What an optional argument that a node leaves out may become, by its type in the schema.
_OPTIONAL: dict[str, tuple[Any, ...]] = {
    "bool": (True, False),
    "int": (0, 1, 2, -1),
    "SymInt": (0, 1, 2),
    "Optional[SymInt]": (1, 3),
    "Optional[int]": (0, 1),
    "number": (2, 0.5, 0),
    "Optional[number]": (0, 0.5, 1),
    "float": (0.5,),
    "Optional[float]": (0.5,),
    "str": ("tanh",),
    "Optional[str]": ("floor", "trunc"),
    "Optional[int] dtype": _DTYPES,
}


def optional_argument(node: Node) -> Edits:
    """An optional argument that the node leaves out, as the dispatcher hands it on: by position where it can be."""
    if not isinstance(node.target, OpOverload):
        return
    for position, spec in enumerate(node.target._schema.arguments):
        given = position < len(node.args) or spec.name in node.kwargs
        if given or not spec.has_default_value():
            continue
        for value in _OPTIONAL.get(f"{spec.type} dtype" if spec.name == "dtype" else str(spec.type), ()):
            if value != spec.default_value:
                yield Edit(
                    f"{_name(node)} {spec.name}: {value}",
                    lambda position=position, value=value: _set_optional(node, position, value),
                )


def _set_optional(node: Node, position: int, value: Any) -> None:
    specs = node.target._schema.arguments
    if specs[position].kwarg_only:
        node.update_kwarg(specs[position].name, value)
    else:
        left_out = [spec.default_value for spec in specs[len(node.args) : position]]
        node.args = (*node.args, *left_out, value)


# ---- edges


def other_operand(node: Node) -> Edits:
    """A node reads another tensor of the same dtype and number of axes."""
    if not is_call(node):
        return
    for source in node.all_input_nodes:
        if tensor(source) is None:
            continue
        for other in _like(source):
            if other < node:
                yield Edit(
                    f"{_name(node)} reads {other} for {source}",
                    lambda source=source, other=other: node.replace_input_with(source, other),
                )


def swapped_operands(node: Node) -> Edits:
    spots = [spot for spot, value in enumerate(node.args) if isinstance(value, Node)] if is_call(node) else []
    for i, first in enumerate(spots):
        for second in spots[i + 1 :]:
            args = list(node.args)
            args[first], args[second] = args[second], args[first]
            yield Edit(
                f"{_name(node)} swaps {first} and {second}", lambda args=args: setattr(node, "args", tuple(args))
            )


def exchanged_nodes(node: Node) -> Edits:
    """All readers of two tensors of one shape trade them: ids of two choices, gate and up, two weights."""
    if tensor(node) is None:
        return
    for other in _like(node):
        # As text, since sizes that depend on values cannot be compared.
        if node < other and str(tensor(other).shape) == str(tensor(node).shape):
            yield Edit(f"{node} <-> {other}", lambda other=other: _exchange(node, other))


def _exchange(first: Node, second: Node) -> None:
    readers = [reader for reader in first.users if reader > second], list(second.users)
    for reader in readers[0]:
        if reader not in readers[1]:
            reader.replace_input_with(first, second)
    for reader in readers[1]:
        if reader not in readers[0]:
            reader.replace_input_with(second, first)


def inserted_step(node: Node) -> Edits:
    """A step between a tensor and one of its readers, or all of them."""
    if tensor(node) is None:
        return
    readers = list(node.users)
    for name, make in STEPS.items():
        for reader in readers:
            yield Edit(
                f"{name} between {node} and {reader}",
                lambda make=make, reader=reader: _insert(node, make, reader, [reader]),
            )
        if len(readers) > 1:
            yield Edit(
                f"{name} between {node} and all readers",
                lambda make=make: _insert(node, make, min(readers), readers),
            )


def _insert(node: Node, make: Callable[[Node], Node], before: Node, readers: list[Node]) -> None:
    with node.graph.inserting_before(before):
        made = make(node)
    for reader in readers:
        reader.replace_input_with(node, made)


def removed(node: Node) -> Edits:
    """The readers of a node read one of its inputs instead."""
    if is_call(node) and tensor(node) is not None:
        for source in node.all_input_nodes:
            if tensor(source) is not None:
                yield Edit(f"{_name(node)} removed, {source} instead", lambda source=source: _remove(node, source))


def _remove(node: Node, source: Node) -> None:
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)


# ---- the outside


def extra_output(node: Node) -> Edits:
    """The caller gets a value from inside the graph."""
    if tensor(node) is not None and is_call(node):
        output = node.graph.output_node()
        yield Edit(f"{node} is an output too", lambda: output.update_arg(0, (*output.args[0], node)))


def extra_reader(node: Node) -> Edits:
    """The caller gets something that is computed from a value inside the graph."""
    if tensor(node) is None or not is_call(node):
        return
    output = node.graph.output_node()

    def apply() -> None:
        with node.graph.inserting_before(output):
            reader = node.graph.call_function(aten.sum.default, (node,))
        output.update_arg(0, (*output.args[0], reader))

    yield Edit(f"the sum of {node} is an output too", apply)


def written_in_place(node: Node) -> Edits:
    """A tensor is written to, before any node after it."""
    if tensor(node) is None:
        return
    nodes = list(node.graph.nodes)
    later = [other for other in nodes[nodes.index(node) + 1 :] if other.op != "placeholder"]
    for name, make in WRITES.items():
        for before in later:
            yield Edit(f"{node}.{name} before {before}", lambda make=make, before=before: _write(node, make, before))


def _write(node: Node, make: Callable[[Node], Node], before: Node) -> None:
    readers = [reader for reader in node.users if reader is before or reader > before]
    with node.graph.inserting_before(before):
        made = make(node)
    if made.args[0] is node:  # as in a view: what reads a tensor after a write to it reads the node of the write
        for reader in readers:
            reader.replace_input_with(node, made)


def _name(node: Node) -> str:
    return f"{getattr(node.target, '__name__', node.target)} ({node})"


MUTATIONS: dict[str, Callable[[Node], Edits]] = {
    "unchanged": unchanged,
    "sibling operator": sibling,
    "tokens tiled": tile_tokens,
    "argument": argument,
    "optional argument": optional_argument,
    "other operand": other_operand,
    "swapped operands": swapped_operands,
    "exchanged nodes": exchanged_nodes,
    "inserted step": inserted_step,
    "removed node": removed,
    "extra output": extra_output,
    "extra reader": extra_reader,
    "in-place write": written_in_place,
}
