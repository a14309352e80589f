"""What does the fuzzer start from? Layers captured once by Dynamo and viewed as ATen, one entry each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from loops import (
    BatchedStack,
    ChoiceLoop,
    DenseLoop,
    DenseStack,
    ExpertLoop,
    FlatLoop,
    StackedLoop,
    SwitchLoop,
    add_by_index,
    any_choice,
    one_hot,
    scattered,
    sum_of_choices,
)
from spellings import (
    BatchedMM,
    Experts,
    GroupedMM,
    changed,
    chosen_softmax_router,
    grouped_sigmoid_router,
    softmax_router,
)
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from perseus_compile.backend import CAPTURE_SETTINGS
from perseus_compile.capture import aten_view
from perseus_compile.moe_modules import find_moe_modules
from perseus_compile.testing.models import MODEL_TYPES, tiny_causal_lm

TRACED_TOKENS = 6  # no other size of the sources


@dataclasses.dataclass(frozen=True)
class Source:
    """A layer to start from: ``module(*args)``, with the token count in axis ``token_axis`` of every argument."""

    make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]
    token_axis: int = 0


def _layer(
    spelling: type[Experts], *, sizes: Mapping[str, Any] | None = None, dtype: torch.dtype = torch.float64, **steps: Any
) -> Source:
    """float64, where rounding hides no mistake, unless it is to be another."""

    def make() -> tuple[nn.Module, tuple[Tensor, ...]]:
        module = changed(spelling, **steps)(**(sizes or {}))
        return module.to(dtype), (torch.randn(TRACED_TOKENS, 8, dtype=dtype),)

    return Source(make)


def _correction(layer: Any) -> None:
    layer.correction = nn.Parameter(torch.randn(layer.num_experts))


def _clamped_gate(layer: Experts, hidden: Tensor) -> Tensor:
    gate, up = hidden[..., ::2], hidden[..., 1::2]
    gate, up = gate.clamp(min=None, max=0.7), up.clamp(min=-0.7, max=0.7)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def _gelu_gate(layer: Experts, hidden: Tensor) -> Tensor:
    return torch.nn.functional.gelu(hidden[:, :12], approximate="tanh") * hidden[:, 12:]


def _einsum(layer: Experts, rows: Tensor, weight: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
    return torch.einsum("rd,rfd->rf", rows, weight[ids])


def _given_ids(spelling: type[Experts]) -> Source:
    """The ids and weights of the choice are inputs, and so are others."""

    def forward(layer: Any, x: Tensor, ids: Tensor, weights: Tensor, others: Tensor) -> tuple[Tensor, ...]:
        assert len(x) == len(ids) == len(weights) == len(others)  # Dynamo notes it: one symbol stands for all
        run = layer.loop if isinstance(layer, ExpertLoop) else layer.experts
        return run(x, ids, weights), others.sum()

    def make() -> tuple[nn.Module, tuple[Tensor, ...]]:
        ids = torch.randint(4, (TRACED_TOKENS, 2))
        x, weights = torch.randn(TRACED_TOKENS, 8).double(), torch.rand(TRACED_TOKENS, 2).double()
        return changed(spelling, forward=forward)().double(), (x, ids, weights, ids.flip(0))

    return Source(make)


class _TwoLayers(nn.Module):
    """Their values have the same shapes, so that mutations exchange them."""

    def __init__(self, first: type[Experts], second: type[Experts]) -> None:
        super().__init__()
        self.first, self.second = first(), second()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(x + self.first(x))


def _two_layers(first: type[Experts], second: type[Experts]) -> Source:
    return Source(lambda: (_TwoLayers(first, second).double(), (torch.randn(TRACED_TOKENS, 8).double(),)))


def _hugging_face(model_type: str, implementation: str) -> Source:
    """The MoE block of a tiny model: router, experts and shared expert."""

    def make() -> tuple[nn.Module, tuple[Tensor, ...]]:
        model = tiny_causal_lm(model_type, implementation=implementation, dtype=torch.float64)
        block = find_moe_modules(model)[-1].owner
        assert block is not None, "experts of Hugging Face models lie in a block with their router"
        return block, (torch.randn(1, TRACED_TOKENS, model.config.hidden_size).double(),)

    return Source(make, token_axis=1)


_GROUPS = {"prepare": _correction, "route": grouped_sigmoid_router}
LOOPS: dict[str, Source] = {
    "loop": _layer(ExpertLoop),
    "loop, bias": _layer(ExpertLoop, sizes={"bias": True, "num_experts": 3}, hits=one_hot),
    "loop, +=": _layer(ExpertLoop, sizes={"num_experts": 3}, add=add_by_index),
    "loop, given ids": _given_ids(ExpertLoop),
    "loop, stacked": _layer(StackedLoop, sizes={"num_experts": 3}),
    "loop, any choice": _layer(
        ExpertLoop, sizes={"num_experts": 3}, hits=any_choice, weigh=sum_of_choices, add=add_by_index
    ),
    "loop, dense": _layer(DenseLoop, sizes={"num_experts": 3}),
    "loop, scattered": _layer(DenseLoop, sizes={"num_experts": 3}, loop=scattered),
    "loop, switch": _layer(SwitchLoop),
    "loop, flat": _layer(FlatLoop),
    "loop, choices": _layer(ChoiceLoop, sizes={"num_experts": 3}),
    "all at once": _layer(DenseStack),
    "all at once, bmm": _layer(BatchedStack, sizes={"bias": True, "expert_width": 8}),
    "loops, two": _two_layers(ExpertLoop, StackedLoop),
}
SPELLINGS: dict[str, Source] = {
    "grouped": _layer(GroupedMM),
    "grouped, bias": _layer(GroupedMM, sizes={"bias": True}, route=softmax_router),
    "grouped, in_out, square": _layer(GroupedMM, sizes={"layout": "in_out", "width": 8, "expert_width": 8}),
    "grouped, groups": _layer(GroupedMM, **_GROUPS),
    "grouped, clamped gate": _layer(GroupedMM, route=chosen_softmax_router, gate=_clamped_gate),
    "grouped, given ids": _given_ids(GroupedMM),
    "batched": _layer(BatchedMM),
    "batched, bias": _layer(BatchedMM, sizes={"bias": True}, gate=_gelu_gate),
    "batched, in_out, square": _layer(BatchedMM, sizes={"layout": "in_out", "width": 8, "expert_width": 8}),
    "batched, groups": _layer(BatchedMM, **_GROUPS),
    "batched, chosen softmax": _layer(BatchedMM, route=chosen_softmax_router),
    "batched, given ids": _given_ids(BatchedMM),
    "einsum": _layer(BatchedMM, linear=_einsum),
    "grouped, float32": _layer(GroupedMM, dtype=torch.float32),
    "batched, float32": _layer(BatchedMM, sizes={"bias": True}, dtype=torch.float32),
    "grouped, bfloat16": _layer(GroupedMM, sizes={"expert_width": 16}, dtype=torch.bfloat16),
    "all sizes equal": _layer(GroupedMM, sizes={"num_experts": 8, "top_k": 8, "expert_width": 8}),
    "two layers": _two_layers(GroupedMM, BatchedMM),
}
FAMILIES: dict[str, Source] = {
    f"{model_type}, {implementation}": _hugging_face(model_type, implementation)
    for model_type in MODEL_TYPES
    for implementation in ("grouped_mm", "batched_mm")
}
SOURCES = {**SPELLINGS, **LOOPS, **FAMILIES}


@functools.cache
def captured(name: str) -> GraphModule:
    """The ATen view of a source, as a graph that a backend could be given: nodes carry ``example_value``."""
    source, views = SOURCES[name], []

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        views.append(aten_view(gm))
        return gm.forward

    torch.manual_seed(0)
    module, args = source.make()
    for arg in args:
        torch._dynamo.mark_dynamic(arg, source.token_axis)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(CAPTURE_SETTINGS):
        torch.compile(module, backend=backend, fullgraph=True)(*args)
    (view,) = views
    assert not view.opaque, f"{name} has steps that cannot be run from its view: {view.opaque}"
    for node in view.graph.nodes:
        node.meta["example_value"] = node.meta.get("val")
        node.meta["source text"] = text(node)
    return GraphModule(view.graph.owning_module, view.graph)


def text(node: Node) -> str:
    """What ``node`` computes, to tell whether an edit changed it."""
    return f"{node.target} {node.args} {node.kwargs}"
