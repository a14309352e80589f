"""All experts on all tokens at once, with weights of 0 for those not chosen: it matches, and it nearly matches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import BatchedStack, DenseLoop, DenseStack, ExpertLoop
from near_miss import Case, check
from spellings import changed
from test_loops import matched
from torch import Tensor, nn

# ---- how products are written


def by_matmul(layer: Any, x: Tensor) -> Tensor:
    return x @ layer.gate_up.mT


def by_repeat(layer: Any, x: Tensor) -> Tensor:
    return torch.matmul(x.repeat(layer.num_experts, 1, 1), layer.gate_up.transpose(-1, -2))


def by_einsum_of_experts(layer: Any, x: Tensor) -> Tensor:
    return torch.einsum("eoi, ti -> eto", layer.gate_up, x)


def second_by_einsum_of_experts(layer: Any, hidden: Tensor) -> Tensor:
    return torch.einsum("etf,edf->etd", hidden, layer.down)


def token_bias(layer: Any, x: Tensor) -> Tensor:
    return DenseStack.first(layer, x) + layer.gate_up_bias


def bias_in_place(layer: Any, x: Tensor) -> Tensor:
    hidden = torch.bmm(x.unsqueeze(0).expand(layer.num_experts, -1, -1), layer.gate_up.transpose(1, 2))
    hidden += layer.gate_up_bias.unsqueeze(1)
    return hidden


def transposed(layer: Any) -> None:
    layer.gate_up = nn.Parameter(layer.gate_up.detach().transpose(1, 2).contiguous())
    layer.down = nn.Parameter(layer.down.detach().transpose(1, 2).contiguous())


IN_OUT: dict[str, Any] = {
    "prepare": transposed,
    "first": lambda m, x: torch.einsum("td,edf->tef", x, m.gate_up),
    "second": lambda m, h: torch.einsum("tef,efd->ted", h, m.down),
}
PRODUCTS: dict[str, tuple[type[DenseStack], dict[str, Any]]] = {
    "einsum": (DenseStack, {}),
    "einsum, in_out": (DenseStack, IN_OUT),
    "bmm": (BatchedStack, {}),
    "matmul": (BatchedStack, {"first": by_matmul}),
    "matmul of repeated tokens": (BatchedStack, {"first": by_repeat}),
    "einsum by expert": (BatchedStack, {"first": by_einsum_of_experts, "second": second_by_einsum_of_experts}),
}


@pytest.mark.parametrize(("spelling", "steps"), PRODUCTS.values(), ids=PRODUCTS)
def test_products(spelling: type[DenseStack], steps: dict[str, Any]) -> None:
    # Square matrices: only their axes say how they lie.
    assert matched(changed(spelling, **steps)(expert_width=8), tokens=(5, 3)) == ["moe"]


@pytest.mark.parametrize("spelling", (DenseStack, BatchedStack))
def test_token_counts(spelling: type[DenseStack]) -> None:
    """A graph for all token counts from 2 on, one for 1 and one for 0."""
    assert matched(spelling()) == ["moe"] * 3


def test_biases() -> None:
    assert matched(BatchedStack(bias=True), tokens=(5, 3)) == ["moe"]
    second = lambda m, hidden: DenseStack.second(m, hidden) + m.down_bias  # noqa: E731
    assert matched(changed(DenseStack, first=token_bias, second=second)(bias=True), tokens=(5, 3)) == ["moe"]
    assert matched(changed(BatchedStack, first=bias_in_place)(bias=True), tokens=(5, 3)) == ["moe"]


# ---- how weights and sums are written


def one_hot_sum(layer: Any, ids: Tensor, weights: Tensor) -> Tensor:
    return (F.one_hot(ids, layer.num_experts).to(weights.dtype) * weights.unsqueeze(-1)).sum(dim=1)


def multiplied(layer: Any, outputs: Tensor, dense: Tensor) -> Tensor:
    return (outputs * dense.unsqueeze(-1)).sum(dim=1)


@pytest.mark.parametrize("steps", ({"dense": one_hot_sum}, {"combine": multiplied}), ids=("one-hot", "product and sum"))
def test_weights_and_sums(steps: dict[str, Any]) -> None:
    assert matched(changed(DenseStack, **steps)(), tokens=(5, 3)) == ["moe"]


def apart(layer: Any) -> None:
    gate, up = layer.gate_up.detach().chunk(2, dim=1)
    layer.gate_weights, layer.up_weights = nn.Parameter(gate.clone()), nn.Parameter(up.clone())


def gates_and_ups(layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    gate, up = (torch.einsum("td,efd->tef", x, one) for one in (layer.gate_weights, layer.up_weights))
    return layer.combine(layer.second(F.silu(gate) * up), layer.dense(ids, weights))


def test_stacks_of_gates_and_of_up_halves() -> None:
    """The op takes the entries of both as lists, since it knows no second stack."""
    assert matched(changed(DenseStack, prepare=apart, loop=gates_and_ups)(), tokens=(5, 3)) == ["experts_list"]


def stacked_outputs(layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    outputs = torch.stack([layer.expert(expert, x) for expert in range(layer.num_experts)], dim=1)
    dense = weights.new_zeros(ids.shape[0], layer.num_experts).scatter(1, ids, weights)
    return (outputs * dense.unsqueeze(-1)).sum(dim=1)


def scattered_in_place(layer: Any, ids: Tensor, weights: Tensor) -> Tensor:
    return weights.new_zeros(ids.shape[0], layer.num_experts).scatter_(1, ids, weights)


def test_weights_that_are_scattered_in_place() -> None:
    assert matched(changed(DenseStack, dense=scattered_in_place)(), tokens=(5, 3)) == ["moe"]


def test_stacked_outputs_of_single_experts() -> None:
    assert matched(changed(DenseLoop, loop=stacked_outputs)(), tokens=(5, 3)) == ["experts_list"]


# ---- near misses


def case(name: str, outcome: str, spelling: type[ExpertLoop] = DenseStack, **steps: Any) -> Case:
    return Case(name, lambda: changed(spelling, **steps)(num_experts=5, expert_width=8), outcome, num_tokens=5)


def all_weights(layer: Any, ids: Tensor, weights: Tensor) -> Tensor:
    return layer.seen


def seen_scores(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    layer.seen = F.softmax(F.linear(x, layer.router), dim=-1)
    weights, ids = torch.topk(layer.seen, 2)
    return weights, ids


def repeated_ids(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = ExpertLoop.route(layer, x)
    return weights, ids // 2


def six_weights(layer: Any, ids: Tensor, weights: Tensor) -> Tensor:
    return weights.new_zeros(ids.shape[0], 6).scatter(1, ids, weights)[:, 1:]


def mixed_axes(layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """[T, E, F] and [E, T, F] can be multiplied where there are as many tokens as experts."""
    by_token, by_expert = DenseStack.first(layer, x), BatchedStack.first(layer, x)
    hidden = F.silu(by_token.chunk(2, dim=-1)[0]) * by_expert.chunk(2, dim=-1)[1]
    return layer.combine(layer.second(hidden), layer.dense(ids, weights))


def gates_of_other_tokens(layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    gate = torch.einsum("td,efd->tef", x * 2, layer.gate_weights)
    up = torch.einsum("td,efd->tef", x, layer.up_weights)
    return layer.combine(layer.second(F.silu(gate) * up), layer.dense(ids, weights))


def capacity(layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """As in GShard and Switch: an expert has three slots, and a token that finds none is dropped."""
    chosen = F.one_hot(ids[:, 0], layer.num_experts).to(x.dtype)
    place = (chosen.cumsum(dim=0) - 1) * chosen
    kept = chosen * (place < 3)
    dispatch = kept.unsqueeze(-1) * F.one_hot(place.long().clamp(max=2), 3)
    rows = torch.einsum("tec,td->ecd", dispatch, x)
    outputs = torch.bmm(layer.gate(torch.bmm(rows, layer.gate_up.mT)), layer.down.mT)
    return torch.einsum("tec,ecd->td", dispatch * weights[:, :1, None], outputs)


NEAR_MISSES = (
    case(
        "slots of limited capacity",
        "refused: its tokens go into a limited number of slots for each expert at aten.einsum.default, and "
        "those that find none are dropped; perseus ops drop no token",
        loop=capacity,
    ),
    case(
        "scores of all experts",
        "refused: aten.einsum.default has no meaning between the outputs of all experts and their sum",
        dense=all_weights,
        route=seen_scores,
    ),
    case(
        "ids that are not known to differ",
        "refused: aten.scatter.src keeps one weight where a token names an expert twice; use scatter_add",
        route=repeated_ids,
    ),
    case(
        "ids that are not known to differ, written in place",
        "refused: aten.scatter_.src keeps one weight where a token names an expert twice; use scatter_add",
        route=repeated_ids,
        dense=scattered_in_place,
    ),
    case(
        "weights of other experts",
        "refused: aten.einsum.default has no meaning between the outputs of all experts and their sum",
        dense=six_weights,
    ),
    case(
        "tokens and experts exchanged",
        "refused: aten.einsum.default must sum over the experts alone",
        combine=lambda m, y, w: torch.einsum("ted,et->td", y, w),
    ),
    case(
        "a sum over tokens",
        "refused: aten.einsum.default must sum over the experts alone",
        combine=lambda m, y, w: torch.einsum("ted,te->ed", y, w),
    ),
    case(
        "a product and a sum over tokens",
        "refused: aten.sum.dim_IntList must sum over the experts alone",
        combine=lambda m, y, w: (y * w.unsqueeze(-1)).sum(dim=0),
    ),
    case(
        "weights by expert beside outputs by token",
        "refused: aten.einsum.default has its axes in another order than the weights of the experts",
        combine=lambda m, y, w: (y * w.t().unsqueeze(-1)).sum(dim=1),
    ),
    case(
        "axes mixed inside",
        "refused: the linear maps of the experts at aten.einsum.default have their axes in different orders",
        loop=mixed_axes,
    ),
    case(
        "gates of other tokens",
        "refused: the linear maps of the experts at aten.einsum.default read different tokens",
        prepare=apart,
        loop=gates_of_other_tokens,
    ),
    case(
        "no gate",
        "refused: the gate between the two expert linears must be one of silu, gelu, gelu_tanh, relu, relu2, "
        "clamped_swiglu, clamped_silu, softcapped_silu, got first",
        gate=lambda m, h: h.chunk(2, dim=-1)[0],
    ),
    case(
        "a norm inside",
        "refused: aten.layer_norm.default has no meaning inside an expert",
        gate=lambda m, h: F.layer_norm(DenseStack.gate(m, h), (8,)),
    ),
    case(
        "a transposed second matrix",
        "refused: the linear maps of an expert are stored in different layouts, in_out and out_in",
        second=lambda m, h: torch.einsum("tef,efd->ted", h, m.down),
    ),
    case(
        "a mean",
        "refused: aten.mean.dim has no meaning between the outputs of all experts and their sum",
        combine=lambda m, y, w: (y * w.unsqueeze(-1)).mean(dim=1),
    ),
)


@pytest.mark.parametrize("case", NEAR_MISSES, ids=lambda case: case.name)
def test_it_nearly_matches(case: Case) -> None:
    torch._dynamo.reset()
    check(case)
