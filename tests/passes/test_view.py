"""What does matching read? The view has the steps that the code really takes, whether they were run for it or not."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule

from perseus_compile import capture
from perseus_compile.capture import AtenView, aten_view, storages
from perseus_compile.dynamo_writes import written_node

X_TD = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


def _views(call: Callable[..., Any], *args: Tensor, dynamic: bool = False) -> tuple[AtenView, AtenView]:
    """The view of ``call``, and that for which every step was run."""
    views: list[AtenView] = []

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        views.append(aten_view(gm))
        with mock.patch.object(capture, "is_one_call", lambda node: False):
            views.append(aten_view(gm))
        return gm.forward

    torch.compile(call, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    given, run = views
    return given, run


def _shared_storages(view: AtenView) -> list[frozenset[int]]:
    """For every node, the positions of those that share storage with it."""
    found = [storages(node.meta.get("val")) for node in view.graph.nodes]
    return [frozenset(i for i, others in enumerate(found) if not own.isdisjoint(others)) for own in found]


def _steps(view: AtenView) -> list[str]:
    return [str(node.target) for node in view.graph.nodes if node.op == "call_function"]


def slices(x: Tensor) -> Tensor:
    """The second slice of each is whole where the first one returned what both return together."""
    return x[:, :4] * x[1:, 4:][:1] + x[0, None, :4]


def mixed_indices(x: Tensor) -> Tensor:
    rows, columns = torch.where(x > 0)
    return x[rows] * x[rows, columns, None]


def written(x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    total.index_add_(0, torch.arange(5), x)
    total[1] += 1
    total += x
    return total


def of_several_calls(x: Tensor) -> Tensor:
    """Functions of torch that call more than one ATen operator."""
    first, second = x.split(4, -1)
    return 1 / (F.normalize(first) + torch.einsum("td,td->t", first, second)[:, None])


def views_of_several_calls(x: Tensor) -> Tensor:
    y = F.normalize(x)
    first = y[0]
    first += 1
    halves = y.T.chunk(2)
    return halves[0].contiguous() * y.view(-1)[:5]


def shape_changes(x: Tensor) -> Tensor:
    y = x * 2
    y.t_()
    return y @ x


CALLS = (slices, mixed_indices, written, of_several_calls, views_of_several_calls, shape_changes)


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("call", CALLS)
def test_steps_and_values_are_those_of_a_run(call: Callable[[Tensor], Tensor], dynamic: bool) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        given, run = _views(call, X_TD, dynamic=dynamic)
    assert _steps(given) == _steps(run)
    assert _shared_storages(given) == _shared_storages(run)
    for node, same in zip(given.graph.nodes, run.graph.nodes, strict=True):
        value, wanted = node.meta.get("val"), same.meta.get("val")
        if isinstance(value, Tensor):
            assert value.dtype == wanted.dtype, node
            # Sizes that depend on values are new symbols at every run.
            sizes = [(size, other) for size, other in zip(value.shape, wanted.shape, strict=True) if type(size) is int]
            assert all(size == other for size, other in sizes), node


def test_a_write_is_what_later_reads_see() -> None:
    view, _ = _views(written, X_TD)
    output = next(iter(reversed(view.graph.nodes)))
    (last,) = output.args[0]
    assert last.target is torch.ops.aten.add_.Tensor
    assert last.args[0].target is torch.ops.aten.index_add_.default


def under_vmap(x: Tensor) -> Tensor:
    return torch.vmap(torch.sin)(x)


def test_a_tensor_that_no_operator_returned_is_opaque() -> None:
    view, _ = _views(under_vmap, X_TD)
    (sin,) = (node for node in view.graph.nodes if node.target is torch.ops.aten.sin.default)
    assert sin.args[0] in view.opaque


# iadd beside add, and so on; iconcat is of lists.
OF_TENSORS = {name for name in dir(operator) if name[0] == "i" and f"__{name[1:]}__" in dir(operator)} - {"iconcat"}


@pytest.mark.parametrize("name", sorted(OF_TENSORS))
def test_operators_that_write_are_known(name: str) -> None:
    """Compared with what they do to a tensor; ``%=`` and ``**=`` were taken for functions."""
    call, x = getattr(operator, name), torch.ones(2, 2, dtype=torch.float64 if name == "itruediv" else torch.int64)
    writes = call(x, torch.ones_like(x)) is x
    graph = Graph()
    left, right = graph.placeholder("left"), graph.placeholder("right")
    assert (written_node(graph.call_function(call, (left, right))) is left) == writes
