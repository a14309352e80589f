"""What does Dynamo's graph compute, as ATen operators? Stage 1: builds the view that matching reads.

The view is a pre-dispatch ``make_fx`` trace of Dynamo's graph over Dynamo's own fake tensors. Every spelling of an
operation (function, method, operator) becomes one ATen overload there, while gradient modes, dropout and in-place
writes stay visible. The view is only read; rewriting edits Dynamo's graph, with the maps kept here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node, Proxy
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    track_tensor_tree,
)
from torch.fx.traceback import preserve_node_meta

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ExecutionState:
    """The modes that hold where a node of Dynamo's graph runs, as far as they change numbers or gradients."""

    grad: bool
    inference_depth: int
    autocast: bool
    transform: bool  # under vmap, grad, jvp and the like of torch.func


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
    """

    graph: torch.fx.Graph
    source: GraphModule
    origin: dict[Node, Node]
    results: dict[Node, list[Node]]
    state: dict[Node, ExecutionState]
    opaque: frozenset[Node]

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


def aten_view(gm: GraphModule) -> AtenView:
    """Traces ``gm``, a graph from Dynamo, to ATen without adding a guard.

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
    tracer = _ViewTracer(gm)
    with fake_mode, _no_new_guards(fake_mode), preserve_node_meta(enable=False):
        try:
            view = make_fx(tracer.run, pre_dispatch=True)(*values)
        except Exception as error:
            what = next(iter(str(error).splitlines()), "")  # torch appends the stack of the node
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


class _ViewTracer(Interpreter):
    """Runs Dynamo's graph node by node under ``make_fx`` and records which view nodes each one created."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self._origin_by_name: dict[str, Node] = {}
        self._results_by_name: dict[str, list[Node]] = {}
        self._opaque_names: set[str] = set()
        self._state: dict[Node, ExecutionState] = {}
        self._grad = torch.is_grad_enabled()  # Dynamo restores the mode of the graph's start for its backend
        self._inference_depth = 0
        self._autocast_depth = 0
        self._transform_depth = 0

    def run_node(self, n: Node) -> Any:
        self._track_state(n)
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
        return result

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

    def _track_state(self, n: Node) -> None:
        # Names, since torch exposes these functions under different modules in different releases.
        name = getattr(n.target, "__name__", "")
        if name == "_set_grad_enabled":
            self._grad = bool(n.args[0])
        elif name in ("_enter_inference_mode", "_exit_inference_mode"):
            self._inference_depth += 1 if "enter" in name else -1
        elif name == "_enter_autocast":
            self._autocast_depth += 1
        elif name == "_exit_autocast":
            self._autocast_depth -= 1
        elif name.endswith(("_increment_nesting", "_enter_dual_level")):
            self._transform_depth += 1
        elif name.endswith(("_decrement_nesting", "_exit_dual_level")):
            self._transform_depth -= 1
        self._state[n] = ExecutionState(
            self._grad, self._inference_depth, self._autocast_depth > 0, self._transform_depth > 0
        )

    def _run_or_make_opaque(self, n: Node) -> Any:
        if n.op == "get_attr" or isinstance(n.target, torch._ops.HigherOrderOperator):
            return self._opaque(n)
        try:
            return super().run_node(n)
        except Exception as error:
            if "example_value" not in n.meta:
                raise
            log.debug("%s is opaque to the matcher: %s", n.name, error)
            return self._opaque(n)

    def _opaque(self, n: Node) -> Any:
        """Stands for ``n`` by its recorded value, so that matching can see around it but never through it."""
        if "example_value" not in n.meta:
            return super().run_node(n)
        value = n.meta["example_value"]
        tracer = _tracer()
        proxy = tracer.create_proxy("call_function", _opaque_value, (), {}, name=f"opaque_{n.name}")
        self._opaque_names.add(proxy.node.name)
        track_tensor_tree(value, proxy, constant=None, tracer=tracer)
        return value

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
        return AtenView(view.graph, self.module, origin, results, self._state, opaque)


def _opaque_value() -> None:
    """Target of the view nodes that stand for something that was not traced."""


def _tracer() -> Any:
    mode = get_proxy_mode()
    assert mode is not None, "the view tracer runs only under make_fx"
    return mode.tracer
