"""What does each node of the view mean? Runs the rules once over the graph, in order; reads and never edits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..capture import AtenView
from .in_place import functional_form, is_idle_dropout, write_problem
from .rule import Rule
from .values import Number, Value

aten = torch.ops.aten
CASTS = (aten.to.dtype, aten._to_copy.default)
INTEGERS = (torch.int32, torch.int64)

# Operators whose result holds the numbers of their first argument; only shape, dtype or strides can differ.
_SAME_NUMBERS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.flatten.using_ints,
        aten.alias.default,
        aten.contiguous.default,
        aten.clone.default,
        aten.expand.default,
        aten.slice.Tensor,
        aten.to.dtype,
        aten.to.dtype_layout,
        aten.to.device,
        aten.to.other,
        aten._to_copy.default,
        aten.type_as.default,
    }
)
_RESHAPES = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints})


class Reader:
    """What the rules may ask about nodes of the view."""

    def __init__(self, view: AtenView) -> None:
        self._view = view
        self._values: dict[Node, Value] = {}
        self._roots: dict[Node, Node] = {}

    def value(self, arg: Any) -> Value | None:
        """The meaning of an argument, if it is a node that has one."""
        return self._values.get(arg) if isinstance(arg, Node) else None

    def root(self, node: Node) -> Node:
        """The first node that holds the same tensor: same numbers, same shape, same dtype."""
        return self._roots.get(node, node)

    def shape(self, node: Node) -> tuple[int | torch.SymInt, ...]:
        return tuple(node.meta["val"].shape)

    def arguments(self, node: Node, *defaults: Any) -> list[Any]:
        """The positional arguments of ``node``, those that it leaves out taken from ``defaults``."""
        return [*node.args, *defaults[len(node.args) :]]

    def static_size(self, node: Node, axis: int) -> int | None:
        """The size of one axis, if it is the same at every call."""
        size = self.shape(node)[axis]
        return size if isinstance(size, int) else None

    def dim(self, node: Any) -> int:
        """Number of axes; -1 for what is not a tensor."""
        value = node.meta.get("val") if isinstance(node, Node) else None
        return value.dim() if isinstance(value, torch.Tensor) else -1

    def dtype(self, node: Node) -> torch.dtype:
        return node.meta["val"].dtype

    def holds(self, node: Node, dtype: torch.dtype) -> bool:
        """Whether ``node`` has a dtype that holds every number of ``dtype``, so that a cast to it rounds nothing."""
        return torch.promote_types(dtype, self.dtype(node)) == self.dtype(node)

    def axis(self, node: Node, axis: int) -> int:
        """``axis`` of the tensor ``node``, counted from the front."""
        return axis % self.dim(node)

    def same_tensor(self, a: Node, b: Node) -> bool:
        """Whether both hold the same numbers in the same shape; reshapes on the way do not matter."""
        return self._reshapes(a)[-1] is self._reshapes(b)[-1] and self.same_sizes(self.shape(a), self.shape(b))

    def same_gradient(self, a: Node, b: Node) -> bool:
        """Whether two reshapes of one tensor were made in one mode, so that gradients pass both or neither."""
        if self.root(a) is self.root(b):
            return True
        steps = (*self._reshapes(a)[:-1], *self._reshapes(b)[:-1])
        return len({self._view.state[self._view.origin[node]] for node in steps}) <= 1

    def same_sizes(self, a: Sequence[Any], b: Sequence[Any]) -> bool:
        # statically_known_true adds no guard: a size that is only equal today does not match.
        return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b, strict=True))

    def number(self, arg: Any) -> Number | None:
        """A Python number, or a symbolic one that has a value now (Dynamo makes floats inputs under dynamic=True)."""
        if isinstance(arg, Node):
            arg = arg.meta.get("val")
        if isinstance(arg, bool) or arg is None:
            return None
        if isinstance(arg, (int, float)):
            return Number(float(arg))
        if isinstance(arg, (torch.SymInt, torch.SymFloat)) and arg.node.has_hint():
            return Number(float(arg.node.hint), arg)
        return None

    def cast_source(self, node: Node) -> Node:
        """What ``node`` was before a change of dtype alone, or ``node`` itself."""
        root = self.root(node)
        if root.target in _SAME_NUMBERS and root.target not in _RESHAPES:
            source = root.args[0]
            if isinstance(source, Node) and self.same_sizes(self.shape(root), self.shape(source)):
                return self.root(source)
        return root

    def records_gradients(self, node: Node) -> bool:
        """Whether gradients may flow through ``node``: nothing forbids it where it runs."""
        state = self._view.state[self._view.origin[node]]
        return state.grad and state.inference_depth == 0

    def describe(self, node: Node) -> str:
        """``node`` as refusals name it: the operator, and the node of Dynamo's graph that it comes from."""
        origin = self._view.origin.get(node, node)
        if node.op != "call_function" or node in self._view.opaque:
            return origin.name
        target = node.target if isinstance(node.target, OpOverload) else getattr(node.target, "__name__", node.target)
        return f"{target} ({origin.name})"

    def _reshapes(self, node: Node) -> list[Node]:
        """``node``, the tensor that it is a reshape of, and so on down to one that is no reshape."""
        chain = [node]
        while (chain[-1] in self._roots or chain[-1].target in _RESHAPES) and isinstance(chain[-1].args[0], Node):
            chain.append(chain[-1].args[0])
        return chain

    # -- written by interpret() only --

    def _record(self, node: Node, value: Value) -> None:
        self._values[node] = value

    def _record_root(self, node: Node) -> Node | None:
        """Notes and returns the source of a node that only repeats its first argument."""
        repeats = node.target in _SAME_NUMBERS or is_idle_dropout(node)
        if not repeats or not node.args or not isinstance(node.args[0], Node):
            return None
        source = node.args[0]
        if self.dim(source) < 0 or self.dim(node) < 0:
            return None
        same = self.dtype(node) == self.dtype(source) and self.same_sizes(self.shape(node), self.shape(source))
        if not same or node.meta["val"].device != source.meta["val"].device:
            return None
        if node.target is aten.slice.Tensor and len(node.args) > 4 and node.args[4] != 1:
            return None
        self._roots[node] = self.root(source)
        return source


@dataclasses.dataclass(frozen=True)
class Interpretation:
    """The meanings of a view's nodes.

    Attributes:
        reader: answers for every node of the view.
        sentences: for nodes without a meaning at which a rule stopped, why.
        rules: the rule that gave a node its meaning, or its sentence.
        sums: for matched layers, the node that the rewrite replaces, by the first node that holds the same sum.
    """

    view: AtenView
    reader: Reader
    sentences: dict[Node, str]
    rules: dict[Node, Rule]
    sums: dict[Node, Node] = dataclasses.field(default_factory=dict)

    def dynamo_value(self, node: Node) -> Node | None:
        """The Dynamo node that holds ``node`` once every layer matched so far is rewritten, if there is one."""
        return self.view.dynamo_value(self.sums.get(self.reader.root(node), node))


def interpret(view: AtenView, rules: Iterable[Rule]) -> Interpretation:
    """Derives the meaning of every node, in graph order. Linear in the number of nodes."""
    by_target: dict[OpOverload, list[Rule]] = {}
    for rule in rules:
        for target in rule.targets:
            by_target.setdefault(target, []).append(rule)
    reader = Reader(view)
    sentences: dict[Node, str] = {}
    rule_of: dict[Node, Rule] = {}
    for node in view.graph.nodes:
        if node.op != "call_function" or node in view.opaque:
            continue
        source = reader._record_root(node)
        if source is not None:
            value = reader.value(source)
            if value is not None:
                reader._record(node, value)
            continue
        target = functional_form(node)
        problem = write_problem(node) if target is not node.target else None
        for rule in by_target.get(target, ()):
            answer = rule.derive(reader, node) if problem is None else problem
            if isinstance(answer, str):
                sentences.setdefault(node, answer)
                rule_of.setdefault(node, rule)
            elif answer is not None:
                reader._record(node, answer)
                rule_of[node] = rule
                sentences.pop(node, None)
                break
    return Interpretation(view, reader, sentences, rule_of)
