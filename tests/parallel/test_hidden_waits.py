"""Is an autograd function that only waits for a collective read as the wait, and nothing else as one?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule

from perseus_compile.hidden_waits import waited_for

wait = torch.ops._c10d_functional.wait_tensor


class Wait(torch.autograd.Function):
    """As torch 2.11 writes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return wait(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


class OtherGradient(Wait):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2


class NoGradient(Wait):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None


class OtherValue(Wait):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return wait(x) + 1


class NoWait(Wait):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()


@pytest.mark.parametrize("kind", [Wait, OtherGradient, NoGradient, OtherValue, NoWait])
def test_only_a_wait_is_read(group: dist.ProcessGroup, kind: type[Wait]) -> None:
    found = []

    def backend(gm: GraphModule, example_inputs: Any) -> Any:
        for node in gm.graph.nodes:
            if node.target is torch.ops.higher_order.autograd_function_apply:
                source = waited_for(node, gm)
                found.append(source is not None and source in node.all_input_nodes)
        return gm.forward

    torch.compile(lambda x: kind.apply(x * 2) * 3, backend=backend, fullgraph=True)(torch.ones(3, requires_grad=True))
    assert found == [kind is Wait]
