"""How the tests of training compare: a compiled model and its eager twin do the same steps, in float32."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from perseus_compile import observe
from perseus_compile.backend import perseus

Step = Callable[[nn.Module], Tensor]  # of a model, its loss


def weighted_sum(output: Tensor) -> Tensor:
    """A loss that gives every element of ``output`` its own weight."""
    return (output * torch.arange(output.numel(), dtype=torch.float32).cos().view_as(output)).sum()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of the layers.

    Attributes:
        ops: the perseus op of each rewritten layer.
        whys: why it is this op.
        refusals: the sentence of each layer that kept its code.
        graphs: how many graphs were compiled.
    """

    ops: list[str]
    whys: list[str]
    refusals: list[str]
    graphs: int


def outcome_of(graphs: list[observe.GraphReport]) -> Outcome:
    layers = [layer for graph in graphs for layer in graph.layers]
    refusals = [refusal.reason for graph in graphs for refusal in graph.refusals]
    return Outcome([layer.op for layer in layers], [layer.why for layer in layers], refusals, len(graphs))


def train_beside_eager(
    model: nn.Module, step: Step, *, num_backwards: int = 1, inner: str = "aot_eager", fullgraph: bool = False
) -> Outcome:
    """Compiles a copy of ``model``, and compares every loss and all gradients after ``num_backwards`` backwards."""
    twin = copy.deepcopy(model)
    model.compile(backend=perseus, options={"inner": inner}, fullgraph=fullgraph)
    with observe.collect() as graphs:
        losses = [_backward(model, step) for _ in range(num_backwards)]
    torch.testing.assert_close(losses, [_backward(twin, step) for _ in range(num_backwards)], rtol=1e-5, atol=1e-5)
    assert_same_gradients(model, twin)
    return outcome_of(graphs)


def assert_same_gradients(actual: nn.Module, expected: nn.Module) -> None:
    """The same parameters have a gradient, and the same one."""
    gradients = [{name: each.grad for name, each in model.named_parameters()} for model in (actual, expected)]
    assert any(gradient is not None for gradient in gradients[1].values())
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)  # None only beside None; names what differs


def _backward(model: nn.Module, step: Step) -> Tensor:
    loss = step(model)
    loss.backward()
    return loss.detach()
