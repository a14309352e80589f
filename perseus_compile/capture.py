"""What does Dynamo's graph compute, as ATen operators? Stage 1: builds the view that matching reads.

The view holds the ATen calls of Dynamo's graph, as they are before autograd, over Dynamo's own fake tensors. Every
spelling of an operation (function, method, operator) becomes one ATen overload there, while gradient modes, dropout and
in-place writes stay visible. The view is only read; rewriting edits Dynamo's graph, with the maps kept here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import operator
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import disable_autocast_cache
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

from .call_recorder import SYMBOLS, CallRecorder, is_one_call
from .dynamo_writes import changes_shape, written_node
from .execution_state import ExecutionState, autocast_as_in, current_state, execution_states, is_autocast_switch
from .hidden_waits import waited_for

log = logging.getLogger(__name__)
CHECKS = (torch.ops.aten._assert_scalar.default, torch._check)  # of numbers that the host has


@dataclasses.dataclass(frozen=True)
class AtenView:
    """The ATen calls of one Dynamo graph, and how their nodes relate to that graph.

    Attributes:
        graph: the ATen graph; ``meta["val"]`` of its nodes holds fake values.
        source: the Dynamo graph.
        origin: for each view node, the Dynamo node whose execution created it.
        results: for each view node, the Dynamo nodes whose whole result it is, in order.
        state: execution state of each Dynamo node.
        opaque: view nodes that stand for a Dynamo node whose calls are not seen (a higher-order operator, a failed op).
    """

    graph: torch.fx.Graph
    source: GraphModule
    origin: dict[Node, Node]
    results: dict[Node, list[Node]]
    state: dict[Node, ExecutionState]
    opaque: frozenset[Node]

    @functools.cached_property
    def writers(self) -> tuple[Node, ...]:
        """The calls that write in place, in order."""
        calls = (node for node in self.graph.nodes if isinstance(node.target, OpOverload))
        return tuple(node for node in calls if node.target._schema.is_mutable)

    def dynamo_value(self, node: Node) -> Node | None:
        """The first Dynamo node whose result ``node`` is; None where it exists only inside one of Dynamo's nodes."""
        return next(iter(self.results.get(node, ())), None)

    def dynamo_nodes(self, region: Iterable[Node]) -> frozenset[Node]:
        """The Dynamo nodes that compute ``region``, those included that only hand a result on (``getitem``)."""
        nodes = set()
        for node in region:
            nodes.add(self.origin[node])
            nodes.update(self.results.get(node, ()))
        return frozenset(nodes)


class CaptureError(Exception):
    """The graph cannot be viewed; its MoE layers, if it has any, keep their own code.

    ``is_failure`` is False where there is nothing to view: the graph computes on no tensors.
    """

    def __init__(self, message: str, *, is_failure: bool = True) -> None:
        super().__init__(message)
        self.is_failure = is_failure


def aten_view(gm: GraphModule, start: ExecutionState | None = None) -> AtenView:
    """Traces ``gm``, a graph from Dynamo, to ATen without adding a guard.

    Args:
        start: the modes under which the graph is called; without it, those of this moment.

    Raises:
        CaptureError: no placeholder carries a fake tensor, or running the graph's nodes failed.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    values = [node.meta.get("example_value") for node in placeholders]
    fake_mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    if fake_mode is None:
        raise CaptureError("the graph has no tensor input", is_failure=False)
    if any(value is None for value in values):
        raise CaptureError("an input of the graph has no example value")
    builder = _ViewBuilder(gm, execution_states(gm.graph, start or current_state()))
    with (
        fake_mode,
        _no_new_guards(fake_mode),
        disable_autocast_cache(),
        enable_python_dispatcher(),
        preserve_node_meta(enable=False),
        builder.recorder,
    ):
        try:
            builder.run(*values, enable_io_processing=False)
        except Exception as error:
            what = next(iter(str(error).splitlines()), "")  # torch appends the stack of the node
            if isinstance(error, CaptureError):
                raise CaptureError(what) from error
            raise CaptureError(f"tracing the graph to ATen failed: {type(error).__name__}: {what}") from error
    return builder.finish()


@contextlib.contextmanager
def _no_new_guards(fake_mode: FakeTensorMode) -> Iterator[None]:
    shape_env = fake_mode.shape_env
    if shape_env is None:
        yield
        return
    with shape_env.ignore_fresh_unbacked_symbols(), shape_env.suppress_guards():
        yield


class _ViewBuilder(Interpreter):
    """Runs Dynamo's graph node by node and notes which view nodes each one created.

    Where a node makes one ATen call, that call is not run: its result is the value that Dynamo recorded for the node.
    """

    def __init__(self, gm: GraphModule, state: dict[Node, ExecutionState]) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.recorder = CallRecorder(Graph(owning_module=torch.nn.Module()))
        self._state = state
        self._outside = current_state()
        # The values that Dynamo recorded have the shapes of the graph's end.
        self._keeps_shapes = not any(map(changes_shape, gm.graph.nodes))
        self._origin: dict[Node, Node] = {}
        self._results: dict[Node, list[Node]] = {}
        self._opaque: set[Node] = set()

    def run_node(self, n: Node) -> Any:
        graph = self.recorder.graph
        last_before = next(iter(reversed(graph.nodes)), None)
        result = self._run(n)
        for node in reversed(graph.nodes):
            if node is last_before:
                break
            self._origin[node] = n
        made = self.recorder.node_of(result)
        if made is not None:
            self._results.setdefault(made, []).append(n)
        return result

    def finish(self) -> AtenView:
        graph = self.recorder.graph
        for node in reversed(graph.find_nodes(op="call_function", target=operator.getitem)):
            if not node.users:
                graph.erase_node(node)
        kept = set(graph.nodes)
        return AtenView(
            graph,
            self.module,
            {node: origin for node, origin in self._origin.items() if node in kept},
            {node: sources for node, sources in self._results.items() if node in kept},
            self._state,
            frozenset(self._opaque),
        )

    def _run(self, n: Node) -> Any:
        if n.op == "placeholder":
            result = super().run_node(n)
            self.recorder.track(result, self.recorder.graph.placeholder(n.name))
            return result
        if n.op == "output":
            result = super().run_node(n)
            self.recorder.graph.output(self.recorder.as_arguments(result))
            return result
        return self._run_call(n)

    def _run_call(self, n: Node) -> Any:
        waited = waited_for(n, self.module)
        if waited is not None:
            return (torch.ops._c10d_functional.wait_tensor(self.env[waited]),)
        if getattr(n.target, "__name__", "") == "_get_data_attr":  # ``tensor.data`` calls no operator
            return torch.ops.aten.detach.default(self.env[n.args[0]])
        if n.op == "get_attr" or isinstance(n.target, torch._ops.HigherOrderOperator):
            return self._recorded_value(n)
        if any(is_distributed(source.meta.get("example_value")) for source in n.all_input_nodes):
            return self._distributed(n)
        if self._is_arithmetic(n):
            return n.meta["example_value"]
        if is_autocast_switch(n) or n.target in CHECKS:
            return None
        is_region = self._state[n].autocast != self._outside.autocast
        try:
            with autocast_as_in(self._state[n]) if is_region else contextlib.nullcontext():
                return self._recorded_run(n)
        except Exception as error:
            if "example_value" not in n.meta:
                raise
            log.debug("%s is opaque to the matcher: %s", n.name, error)
            return self._recorded_value(n)

    def _recorded_run(self, n: Node) -> Any:
        """The result of ``n``, whose ATen calls go to the recorder."""
        run = functools.partial(super().run_node, n)
        value = n.meta.get("example_value")
        if self._keeps_shapes and not self._state[n].transform and is_one_call(n) and self._is_recorded(n, value):
            result = self.recorder.run_as_one_call(run, value)
            if result is not None:
                return result
        result = self.recorder.run(run)
        if isinstance(result, torch.Tensor) and self.recorder.node_of(result) is None:
            self._stand_in(n, result)  # torch made it without an ATen call
        return result

    def _is_recorded(self, n: Node, value: object) -> bool:
        """Whether ``value``, which Dynamo recorded for ``n``, is fake and may stand for the result of ``n``.

        It may not where it is a view of a source that was run, whose storage is not the one that Dynamo recorded.
        """
        recorded = ((source, source.meta.get("example_value")) for source in n.all_input_nodes)
        replaced = [before for source, before in recorded if self.env[source] is not before]
        return _is_fake(value) and (not replaced or storages(value).isdisjoint(storages(replaced)))

    def _is_arithmetic(self, n: Node) -> bool:
        """Whether ``n`` makes a number, known to Dynamo, of numbers: sizes and what was computed from them."""
        if not isinstance(n.meta.get("example_value"), (int, float, *SYMBOLS)):
            return False
        return not any(isinstance(self.env.get(source), torch.Tensor) for source in n.all_input_nodes)

    def _distributed(self, n: Node) -> Any:
        """Stands for ``n``, which reads DTensors: its calls would show one rank's part of them, or fail.

        DTensors that come out are not in the view; a local tensor is an opaque node.
        """
        if written_node(n) is not None:
            raise CaptureError(f"{n.name} writes in place to a distributed tensor, whose local part others may hold")
        value = n.meta["example_value"]
        if any(map(is_distributed, pytree.tree_leaves(value))):
            return value
        return self._recorded_value(n)

    def _recorded_value(self, n: Node) -> Any:
        """Stands for ``n`` by the value that Dynamo recorded: matching can see around it but never through it."""
        if "example_value" not in n.meta:
            return super().run_node(n)
        self._stand_in(n, n.meta["example_value"])
        return n.meta["example_value"]

    def _stand_in(self, n: Node, value: Any) -> None:
        node = self.recorder.graph.create_node("call_function", _opaque_value, name=f"opaque_{n.name}")
        self._opaque.add(node)
        self.recorder.track(value, node)


def _is_fake(value: object) -> bool:
    values = value if isinstance(value, (list, tuple)) else (value,)
    return bool(values) and all(type(one) is FakeTensor or isinstance(one, torch.SymInt) for one in values)


def storages(value: Any) -> frozenset[int]:
    """Identities of the storages under the tensors in ``value``. Fake ones share them exactly where real ones do."""
    found = set()
    for tensor in pytree.tree_leaves(value):
        while isinstance(tensor, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            found.add(tensor.untyped_storage()._cdata)
    return frozenset(found)


def is_distributed(value: object) -> bool:
    """Whether ``value`` is a DTensor."""
    tensors = sys.modules.get("torch.distributed.tensor")  # there are none before somebody imports it
    return tensors is not None and isinstance(value, tensors.DTensor)


def _opaque_value() -> None:
    """Target of the view nodes that stand for something whose calls are not seen."""
