"""What does Dynamo's graph compute, as ATen operators? Stage 1: builds the view that matching reads.

The view is a pre-dispatch ``make_fx`` trace of Dynamo's graph over Dynamo's own fake tensors. Every spelling of an
operation (function, method, operator) becomes one ATen overload there, while gradient modes, dropout and in-place
writes stay visible. The view is only read; rewriting edits Dynamo's graph, with the maps kept here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node, Proxy
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    track_tensor_tree,
)
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

from .dynamo_writes import written_node
from .execution_state import ExecutionState, autocast_as_in, current_state, execution_states
from .hidden_waits import waited_for
from .plain_nodes import plain_nodes

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class AtenView:
    """An ATen trace of one Dynamo graph, and how its nodes relate to that graph.

    Attributes:
        graph: the ATen graph; ``meta["val"]`` of its nodes holds fake values.
        source: the Dynamo graph.
        origin: for each view node, the Dynamo node whose execution created it.
        results: for each view node, the Dynamo nodes whose whole result it is, in order.
        state: execution state of each Dynamo node.
        opaque: view nodes that stand for a Dynamo node that was not traced (a higher-order operator, a failed op).
        plain: opaque nodes that stand for the end of a part which no rule reads, and which writes nothing in place.
    """

    graph: torch.fx.Graph
    source: GraphModule
    origin: dict[Node, Node]
    results: dict[Node, list[Node]]
    state: dict[Node, ExecutionState]
    opaque: frozenset[Node]
    plain: frozenset[Node] = frozenset()

    @functools.cached_property
    def writers(self) -> tuple[Node, ...]:
        """The traced nodes that write in place, in order."""
        traced = (node for node in self.graph.nodes if isinstance(node.target, OpOverload))
        return tuple(node for node in traced if node.target._schema.is_mutable)

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
        CaptureError: no placeholder carries a fake tensor, or the trace failed.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    values = [node.meta.get("example_value") for node in placeholders]
    fake_mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    if fake_mode is None:
        raise CaptureError("the graph has no tensor input", is_failure=False)
    if any(value is None for value in values):
        raise CaptureError("an input of the graph has no example value")
    tracer = _ViewTracer(gm, execution_states(gm.graph, start or current_state()), plain_nodes(gm.graph))
    with fake_mode, _no_new_guards(fake_mode), _no_idle_cache(fake_mode, gm.graph), preserve_node_meta(enable=False):
        try:
            view = make_fx(tracer.run, pre_dispatch=True)(*values)
        except Exception as error:
            what = next(iter(str(error).splitlines()), "")  # torch appends the stack of the node
            if isinstance(error, CaptureError):
                raise CaptureError(what) from error
            raise CaptureError(f"tracing the graph to ATen failed: {type(error).__name__}: {what}") from error
    return tracer.finish(view, placeholders)


@contextlib.contextmanager
def _no_new_guards(fake_mode: FakeTensorMode) -> Iterator[None]:
    shape_env = fake_mode.shape_env
    if shape_env is None:
        yield
        return
    with shape_env.ignore_fresh_unbacked_symbols(), shape_env.suppress_guards():
        yield


@contextlib.contextmanager
def _no_idle_cache(fake_mode: FakeTensorMode, graph: Graph) -> Iterator[None]:
    """Without the cache of fake results where sizes depend on values.

    Such sizes are new symbols each time, so nothing is found in it, and filling it takes a third of the trace of a loop
    over 64 experts (1300 nodes, torch 2.13, one core, measured 2026-11-30).
    """
    was_enabled = fake_mode.cache_enabled
    fake_mode.cache_enabled = was_enabled and not any(node.meta.get("unbacked_bindings") for node in graph.nodes)
    try:
        yield
    finally:
        fake_mode.cache_enabled = was_enabled


class _ViewTracer(Interpreter):
    """Runs Dynamo's graph node by node under ``make_fx`` and records which view nodes each one created."""

    def __init__(self, gm: GraphModule, state: dict[Node, ExecutionState], plain: dict[Node, Node]) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self._state, self._plain = state, plain
        self._outside = current_state()
        self._origin_by_name: dict[str, Node] = {}
        self._results_by_name: dict[str, list[Node]] = {}
        self._opaque_names: set[str] = set()
        self._shown: set[Node] = set()

    def run_node(self, n: Node) -> Any:
        if n in self._plain and all(each in self._plain or each.op == "placeholder" for each in n.all_input_nodes):
            return self._plain[n].meta["example_value"]
        for source in n.all_input_nodes:
            if source in self._plain:
                self._show(self._plain[source])
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        graph = _tracer().graph
        last_before = next(iter(reversed(graph.nodes)), None)
        result = self._as_recorded(n, self._run_or_make_opaque(n))
        for node in reversed(graph.nodes):
            if node is last_before:
                break
            self._origin_by_name[node.name] = n
        if isinstance(result, torch.Tensor):
            slot = get_proxy_slot(result, _tracer(), None)
            if slot is not None:
                self._results_by_name.setdefault(slot.proxy.node.name, []).append(n)
        # What follows a plain sum is not traced, so that its storage is that of Dynamo's values throughout.
        return n.meta["example_value"] if n in self._plain else result

    def _show(self, n: Node) -> None:
        """Puts the value of a plain node into the view, where a node that is traced reads it."""
        if n not in self._shown:
            proxy = self._stand_in(n, n.meta["example_value"])
            self._origin_by_name[proxy.node.name] = n
            self._results_by_name[proxy.node.name] = [n]
            self._shown.add(n)

    def _as_recorded(self, n: Node, result: Any) -> Any:
        """``result``, or Dynamo's symbol for it where the host reads a number from a tensor.

        Running ``item`` again makes a new symbol, of which nothing is known, such as that it is no negative size.
        """
        recorded = n.meta.get("example_value")
        tracer = _tracer()
        node = next(iter(reversed(tracer.graph.nodes)), None)
        if not isinstance(recorded, torch.SymInt) or node is None or node.target is not torch.ops.aten.item.default:
            return result
        track_tensor_tree(recorded, Proxy(node, tracer), constant=None, tracer=tracer)
        return recorded

    def _run_or_make_opaque(self, n: Node) -> Any:
        waited = waited_for(n, self.module)
        if waited is not None:
            return (torch.ops._c10d_functional.wait_tensor(self.env[waited]),)
        if n.op == "get_attr" or isinstance(n.target, torch._ops.HigherOrderOperator):
            return self._opaque(n)
        if any(is_distributed(source.meta.get("example_value")) for source in n.all_input_nodes):
            return self._distributed(n)
        is_region = self._state[n].autocast != self._outside.autocast
        try:
            with autocast_as_in(self._state[n]) if is_region else contextlib.nullcontext():
                return super().run_node(n)
        except Exception as error:
            if "example_value" not in n.meta:
                raise
            log.debug("%s is opaque to the matcher: %s", n.name, error)
            return self._opaque(n)

    def _distributed(self, n: Node) -> Any:
        """Stands for ``n``, which reads DTensors: a trace of it would show one rank's part of them, or fail.

        make_fx cannot follow DTensors, so those that come out are not in the view; a local tensor is an opaque node.
        """
        if written_node(n) is not None:
            raise CaptureError(f"{n.name} writes in place to a distributed tensor, whose local part others may hold")
        value = n.meta["example_value"]
        if any(map(is_distributed, pytree.tree_leaves(value))):
            return value
        return self._opaque(n)

    def _opaque(self, n: Node) -> Any:
        """Stands for ``n`` by its recorded value, so that matching can see around it but never through it."""
        if "example_value" not in n.meta:
            return super().run_node(n)
        value = n.meta["example_value"]
        self._stand_in(n, value)
        return value

    def _stand_in(self, n: Node, value: Any) -> Any:
        tracer = _tracer()
        proxy = tracer.create_proxy("call_function", _opaque_value, (), {}, name=f"opaque_{n.name}")
        self._opaque_names.add(proxy.node.name)
        track_tensor_tree(value, proxy, constant=None, tracer=tracer)
        return proxy

    def finish(self, view: GraphModule, placeholders: list[Node]) -> AtenView:
        by_name = {node.name: node for node in view.graph.nodes}
        view_placeholders = view.graph.find_nodes(op="placeholder")
        origin = dict(zip(view_placeholders, placeholders, strict=True))
        results = {node: [source] for node, source in origin.items()}
        for name, node in self._origin_by_name.items():
            if name in by_name:  # make_fx drops nodes that it found dead
                origin[by_name[name]] = node
        for name, nodes in self._results_by_name.items():
            if name in by_name:
                results.setdefault(by_name[name], []).extend(nodes)
        opaque = frozenset(by_name[name] for name in self._opaque_names if name in by_name)
        plain = frozenset(node for node in opaque if origin[node] in self._shown)
        return AtenView(view.graph, self.module, origin, results, self._state, opaque, plain)


def is_distributed(value: object) -> bool:
    """Whether ``value`` is a DTensor."""
    tensors = sys.modules.get("torch.distributed.tensor")  # there are none before somebody imports it
    return tensors is not None and isinstance(value, tensors.DTensor)


def _opaque_value() -> None:
    """Target of the view nodes that stand for something that was not traced."""


def _tracer() -> Any:
    mode = get_proxy_mode()
    assert mode is not None, "the view tracer runs only under make_fx"
    return mode.tracer
