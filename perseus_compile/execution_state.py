"""Under which modes does each node of Dynamo's graph run? Reads the graph in order; edits nothing."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

_AUTOCAST_DEVICES = ("cpu", "cuda")


class Autocast(NamedTuple):
    """That ``torch.autocast`` casts the tensors of a device."""

    device_type: str
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class ExecutionState:
    """The modes that hold where a node runs, as far as they change numbers or gradients."""

    grad: bool
    inference_depth: int
    autocast: frozenset[Autocast]
    transform: bool  # under vmap, grad, jvp and the like of torch.func

    def casts(self, device_type: str) -> bool:
        """Whether ``torch.autocast`` casts tensors on ``device_type``."""
        return any(each.device_type == device_type for each in self.autocast)


def current_state() -> ExecutionState:
    """The modes of this moment; Dynamo restores those of the graph's start for its backend."""
    enabled = (device_type for device_type in _AUTOCAST_DEVICES if torch.is_autocast_enabled(device_type))
    autocast = frozenset(Autocast(device_type, torch.get_autocast_dtype(device_type)) for device_type in enabled)
    return ExecutionState(torch.is_grad_enabled(), 0, autocast, transform=False)


@contextlib.contextmanager
def autocast_as_in(state: ExecutionState) -> Iterator[None]:
    """Casts inside as ``torch.autocast`` does under ``state``. A trace does not, since it only records such regions."""
    dtypes = {device_type: torch.get_autocast_dtype(device_type) for device_type in _AUTOCAST_DEVICES}
    enabled = {device_type: torch.is_autocast_enabled(device_type) for device_type in _AUTOCAST_DEVICES}
    wanted = dtypes | dict(state.autocast)
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # a cached cast would appear where it is first used, and only there
    try:
        _set_autocast({device_type: state.casts(device_type) for device_type in enabled}, wanted)
        yield
    finally:
        _set_autocast(enabled, dtypes)
        torch.set_autocast_cache_enabled(caches)


def is_autocast_switch(node: Node) -> bool:
    """Whether ``node`` of a Dynamo graph only enters or leaves a region of ``torch.autocast``."""
    return getattr(node.target, "__name__", "") in ("_enter_autocast", "_exit_autocast")


def _set_autocast(enabled: dict[str, bool], dtypes: dict[str, torch.dtype]) -> None:
    for device_type in _AUTOCAST_DEVICES:
        torch.set_autocast_enabled(device_type, enabled[device_type])
        torch.set_autocast_dtype(device_type, dtypes[device_type])


def strictest(states: Iterable[ExecutionState]) -> ExecutionState:
    """What has to be expected of a graph that is called under each of ``states``."""
    states = list(states)
    return ExecutionState(
        grad=any(state.grad for state in states),
        inference_depth=max(state.inference_depth for state in states),
        autocast=frozenset().union(*(state.autocast for state in states)),
        transform=any(state.transform for state in states),
    )


def execution_states(graph: Graph, start: ExecutionState) -> dict[Node, ExecutionState]:
    """The modes of each node of ``graph``, which begins under ``start``."""
    grad, inference_depth = start.grad, start.inference_depth
    autocast = [start.autocast]  # around the graph, then inside each region that was entered and not yet left
    transform_depth = 0
    states = {}
    for node in graph.nodes:
        # Names, since torch exposes these functions under different modules in different releases.
        name = getattr(node.target, "__name__", "")
        if name == "_set_grad_enabled":
            grad = bool(node.args[0])
        elif name in ("_enter_inference_mode", "_exit_inference_mode"):
            inference_depth += 1 if "enter" in name else -1
        elif name == "_enter_autocast":
            device_type, dtype, is_enabled = node.args[:3]
            others = frozenset(each for each in autocast[-1] if each.device_type != device_type)
            autocast.append(others | {Autocast(device_type, dtype)} if is_enabled else others)
        elif name == "_exit_autocast":
            autocast.pop()
        elif name.endswith(("_increment_nesting", "_enter_dual_level")):
            transform_depth += 1
        elif name.endswith(("_decrement_nesting", "_exit_dual_level")):
            transform_depth -= 1
        states[node] = ExecutionState(grad, inference_depth, autocast[-1], start.transform or transform_depth > 0)
    return states
