"""Which ATen operators does a piece of code call? Writes a node for each, before autograd and decompositions see it."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, PythonKeyTracer

aten = torch.ops.aten
# What torch binds in C++ hands on what its first call returns or calls on; so do these, written in Python.
_BOUND = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_ONE_CALL_IN_PYTHON = frozenset({F.silu, F.relu, F.softmax, F.dropout, F.embedding, F.layer_norm, F.rms_norm})
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _Call(NamedTuple):
    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class _SeveralCallsError(Exception):
    """Code that was expected to make one call makes another one."""


class CallRecorder(ProxyTorchDispatchMode):
    """A mode that appends a node for every ATen call to ``graph``, with its value as ``meta["val"]``.

    Before autograd, torch admits only modes of this class; the recorder uses nothing else of it.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(PythonKeyTracer(), "real", pre_dispatch=True)
        self.graph = graph
        self._expected: Any = None
        self._only_call: _Call | None = None
        self._node_of: dict[int, Node] = {}
        self._source_of_symbol: dict[Any, Node | tuple[Node, int]] = {}
        self._num_constants = 0
        self._kept: list[object] = []  # so that ids stay those of the objects that are known

    def node_of(self, value: object) -> Node | None:
        """The last node whose value is this very object."""
        return self._node_of.get(id(value))

    def track(self, value: Any, node: Node) -> None:
        """Lets ``node`` stand for ``value`` and, through nodes of their own, for its elements."""
        node.meta["val"] = value
        if isinstance(value, (list, tuple)):
            for index, element in enumerate(value):
                if isinstance(element, (Tensor, *SYMBOLS)):
                    self.track(element, self.graph.call_function(operator.getitem, (node, index)))
        elif isinstance(value, Tensor):
            self._kept.append(value)
            self._node_of[id(value)] = node
            for axis, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    self._source_of_symbol.setdefault(size.node.expr, (node, axis))
        elif isinstance(value, SYMBOLS):
            self._source_of_symbol[value.node.expr] = node

    def run(self, code: Callable[[], Any]) -> Any:
        """The result of ``code``, whose ATen calls are recorded."""
        last_before = next(iter(reversed(self.graph.nodes)), None)
        result = code()
        if isinstance(result, Tensor) and self.node_of(result) is None:
            last = next(iter(reversed(self.graph.nodes)), None)
            if last is not None and last is not last_before and _is_same(result, last.meta.get("val")):
                self.track(result, last)
        return result

    def run_as_one_call(self, code: Callable[[], Any], expected: Any) -> Any:
        """The result of ``code``, whose only ATen call is not run but taken to return ``expected``.

        None, with nothing recorded, where that cannot be: ``code`` makes several calls or none, changes what its call
        returned, or fails.
        """
        self._expected, self._only_call = expected, None
        try:
            result = code()
        except Exception:  # also that of code which cannot go on with what is no result of its first call
            return None
        finally:
            self._expected, call = None, self._only_call
        if call is None or not _is_same(result, call.result):
            return None
        return self._record(call.func, call.args, call.kwargs, lambda: call.result)

    def as_arguments(self, value: Any) -> Any:
        """``value`` with nodes for its tensors and symbols."""
        if isinstance(value, Tensor):
            return self._node_of.get(id(value)) or self._constant(value)
        if isinstance(value, (list, tuple)):
            return [self.as_arguments(element) for element in value]
        if isinstance(value, dict):
            return {key: self.as_arguments(element) for key, element in value.items()}
        return self._symbol(value) if isinstance(value, SYMBOLS) else value

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if self._expected is None:
            return self._record(func, args, kwargs, lambda: func(*args, **kwargs))
        if self._only_call is not None:
            raise _SeveralCallsError
        result = args[0] if _returns_its_first_argument(func) else self._expected
        self._only_call = _Call(func, args, kwargs, result)
        return result

    def __sym_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def _record(self, func: OpOverload, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        # A tensor made of Python numbers is lifted into the trace; whoever runs the graph has to lift a copy.
        target = aten.lift_fresh_copy.default if func is aten.lift_fresh.default else func
        result = run()
        self.track(result, self.graph.call_function(target, tuple(self.as_arguments(args)), self.as_arguments(kwargs)))
        return result

    def _constant(self, value: Tensor) -> Node:
        """A node for a tensor that no call returned, such as one of Python numbers."""
        owner = self.graph.owning_module
        assert owner is not None, "the recorder's graph has a module that holds constants"
        name = f"_tensor_constant{self._num_constants}"
        self._num_constants += 1
        owner.register_buffer(name, value)
        node = self.graph.get_attr(name)
        self.track(value, node)
        return node

    def _symbol(self, value: Any) -> Any:
        """The node that computes ``value``, or reads it as the size of a tensor."""
        expression = value.node.expr
        if expression.is_number:
            return value.node.pytype(expression)
        source = self._source_of_symbol.get(expression)
        if not isinstance(source, Node):
            target = unknown if source is None else aten.sym_size.int
            source = self.graph.call_function(target, source)
            self.track(value, source)
        return source


def unknown() -> None:
    """Target of nodes for numbers that nothing in the graph is known to compute."""


def is_one_call(node: Node) -> bool:
    """Whether ``node`` of a Dynamo graph hands on what its first ATen call returns, if that is its only one."""
    if node.target is operator.getitem:
        indices = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        # Slices that are whole by the size of what the slice before them returned are left out.
        return sum(index is not Ellipsis for index in indices) == 1 or all(isinstance(i, Node) for i in indices)
    target = getattr(Tensor, node.target, None) if isinstance(node.target, str) else node.target
    return isinstance(target, (*_BOUND, OpOverload, OpOverloadPacket)) or target in _ONE_CALL_IN_PYTHON


@functools.cache
def _returns_its_first_argument(func: OpOverload) -> bool:
    """Whether ``func`` writes to its first argument and returns it, with the shape that it had."""
    schema = func._schema
    if not schema.is_mutable or len(schema.returns) != 1 or torch.Tag.inplace_view in func.tags:
        return False
    first, result = schema.arguments[0].alias_info, schema.returns[0].alias_info
    return first is not None and result is not None and first.is_write and first.before_set == result.before_set


def _is_same(a: Any, b: Any) -> bool:
    """Whether both are one tensor, or lists of such. Factories return a new object where others hold the first one."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.dim() == b.dim() and a.untyped_storage()._cdata == b.untyped_storage()._cdata)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return a is b
