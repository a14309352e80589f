"""Routers that are nearly known ones: one node with the experts only where that is right, else the experts alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from near_miss import Case, check, layer_of
from spellings import BatchedMM, Experts, GroupedMM, grouped_sigmoid_router, softmax_router
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def logits_of(layer: Experts, x: Tensor) -> Tensor:
    return F.linear(x, layer.router)


def chosen(layer: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.topk(F.softmax(logits_of(layer, x), dim=-1), layer.top_k, dim=-1)


def router(change: Any) -> Any:
    """Softmax, top-k, and a change to weights and ids."""
    return layer_of(BatchedMM, route=lambda layer, x: change(*chosen(layer, x)))


def scored(score: Any) -> Any:
    """Top-k of other scores."""
    return layer_of(BatchedMM, prepare=correction, route=lambda layer, x: torch.topk(score(layer, x), 2, dim=-1))


def correction(layer: Any) -> None:
    layer.correction = nn.Parameter(torch.randn(layer.num_experts))


def biased_choice(gathered: Any) -> Any:
    """Sigmoid scores, a choice on scores + correction, weights gathered from what ``gathered`` makes of both."""

    def route(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits_of(layer, x).sigmoid()
        choice = scores + layer.correction
        ids = torch.topk(choice, layer.top_k, dim=-1)[1]
        return gathered(scores, choice).gather(1, ids), ids

    return layer_of(BatchedMM, prepare=correction, route=route)


def grouped(**options: Any) -> Any:
    num_experts = options.pop("num_experts", 4)
    top_k = options.pop("top_k", 2)
    return layer_of(
        GroupedMM,
        options={"num_experts": num_experts, "top_k": top_k},
        prepare=correction,
        route=lambda layer, x: grouped_sigmoid_router(layer, x, **options),
    )


def two_choices(layer: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = F.softmax(logits_of(layer, x), dim=-1)
    return torch.topk(scores, 2, dim=-1)[0], torch.topk(scores, 2, dim=-1)[1]


def without_gradient(layer: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return BatchedMM.route(layer, x)


def under_autocast(layer: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return BatchedMM.route(layer, x)


def input_reshaped_without_gradient(layer: Experts, x: Tensor) -> Tensor:
    """Only the reshape is under no_grad: it cuts the router's gradient off."""
    batched = x.view(1, *x.shape)
    with torch.no_grad():
        seen = batched.view(-1, x.shape[1])
    weights, ids = layer.route(seen)
    return layer.experts(batched.view(-1, x.shape[1]), ids, weights)


def with_load_balance_loss(layer: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = layer.route(x)
    return layer.experts(x, ids, weights), weights.square().mean()


def with_ids(layer: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = layer.route(x)
    return layer.experts(x, ids, weights), ids


def twice(layer: Experts, x: Tensor) -> Tensor:
    weights, ids = layer.route(x)
    return layer.experts(x, ids, weights) + layer.experts(2 * x, ids, weights)


def checkpointed_shared_expert(layer: Experts, x: Tensor) -> Tensor:
    weights, ids = layer.route(x)
    shared = checkpoint(lambda y: torch.tanh(y @ layer.down[0]) @ layer.down[0].t(), x, use_reentrant=False)
    return layer.experts(x, ids, weights) + shared


STEP = "is not a known step of a router"
OWN_SUM = "experts: aten.div.Tensor must divide the chosen scores by their own sum"
SCALE = "experts: aten.mul.Tensor must scale the routing weights once, by a constant"
GROUPS = "experts: aten.masked_fill.Scalar must"
OTHER_X = "experts: the router reads another tensor than the experts"
ROUTER_WRITE = "may write in place to what the router reads before the experts have run"

CASES = (
    # scores
    Case(
        "softmax over tokens",
        scored(lambda m, x: F.softmax(logits_of(m, x), dim=0)),
        f"experts: aten.softmax.int {STEP}",
    ),
    Case(
        "temperature", scored(lambda m, x: F.softmax(logits_of(m, x) / 2, dim=-1)), f"experts: aten.div.Tensor {STEP}"
    ),
    Case(
        "softmax, then sigmoid",
        scored(lambda m, x: F.softmax(logits_of(m, x), dim=-1).sigmoid()),
        f"experts: aten.sigmoid.default {STEP}",
    ),
    Case(
        "raw logits",
        scored(logits_of),
        "experts: the routing weights are raw logits: neither softmax nor sigmoid is applied",
    ),
    Case(
        "logits rounded",
        scored(lambda m, x: F.softmax(logits_of(m, x).bfloat16().float(), dim=-1)),
        "experts: aten.to.dtype rounds the router logits to torch.bfloat16",
    ),
    Case("input rounded", scored(lambda m, x: F.softmax(logits_of(m, x.bfloat16().float()), dim=-1)), OTHER_X),
    Case("softmax in float32, then a cast", layer_of(BatchedMM, route=lambda m, x: softmax_router(m, x)), "moe"),
    Case(
        "logits by matmul",
        scored(lambda m, x: F.softmax(x @ m.router.t(), dim=-1)),
        f"experts: aten.matmul.default {STEP}",
    ),
    Case(
        "noise on logits",
        scored(lambda m, x: F.softmax(logits_of(m, x) + m.correction, dim=-1)),
        f"experts: aten.add.Tensor {STEP}",
    ),
    Case("router bias", scored(lambda m, x: F.softmax(F.linear(x, m.router, m.correction), dim=-1)), "moe"),
    Case(
        "fewer scores than experts",
        scored(lambda m, x: F.softmax(F.linear(x, m.router[:3]), dim=-1)),
        "experts: router_weight must be [num_experts, D] = [4, 8], got [3, 8]; "
        "check weight_layout and the other shapes",
    ),
    # the choice
    Case(
        "smallest scores",
        layer_of(
            BatchedMM, route=lambda m, x: torch.topk(F.softmax(logits_of(m, x), dim=-1), 2, dim=-1, largest=False)
        ),
        "experts: aten.topk.default must choose a constant number of the largest scores",
    ),
    Case(
        "choice along tokens, T == E",
        layer_of(
            BatchedMM,
            options={"top_k": 4},
            route=lambda m, x: tuple(part.t() for part in torch.topk(F.softmax(logits_of(m, x), dim=-1), 4, dim=0)),
        ),
        "experts: aten.topk.default must choose along the experts (the last axis), got axis 0",
        num_tokens=4,
    ),
    Case(
        "two choices",
        layer_of(BatchedMM, route=two_choices),
        "experts: the routing weights and the expert ids come from two different choices",
    ),
    Case(
        "first two of the best three",
        layer_of(
            BatchedMM,
            route=lambda m, x: tuple(part[:, :2] for part in torch.topk(F.softmax(logits_of(m, x), dim=-1), 3, dim=-1)),
        ),
        f"experts: aten.slice.Tensor {STEP}",
    ),
    Case("ids shifted", router(lambda w, i: (w, (i + 1) % 4)), f"experts: aten.add.Tensor {STEP}"),
    Case("ids clamped", router(lambda w, i: (w, i.clamp(0, 2))), f"experts: aten.clamp.default {STEP}"),
    Case("int32 ids", router(lambda w, i: (w, i.int())), f"experts: aten.to.dtype {STEP}"),
    Case("negative scale", router(lambda w, i: (w * -2.0, i)), "moe"),
    # the weights
    Case("weights flipped", router(lambda w, i: (w.flip(1), i)), f"experts: aten.flip.default {STEP}"),
    Case("weights detached", router(lambda w, i: (w.detach(), i)), f"experts: aten.detach.default {STEP}"),
    Case(
        "weights rounded",
        router(lambda w, i: (w.bfloat16().float(), i)),
        "experts: aten.to.dtype must cast the routing weights once, before they are scaled",
    ),
    Case(
        "softmax of the chosen over tokens",
        layer_of(
            BatchedMM,
            route=lambda m, x: (lambda w, i: (F.softmax(w, dim=0), i))(*torch.topk(logits_of(m, x), 2, dim=-1)),
        ),
        "experts: aten.softmax.int must normalise over the choices of a token",
    ),
    Case("divided by the largest", router(lambda w, i: (w / w.amax(-1, keepdim=True), i)), OWN_SUM),
    Case("divided by the sum over tokens", router(lambda w, i: (w / w.sum(0, keepdim=True), i)), OWN_SUM),
    Case("divided by the sum of all", router(lambda w, i: (w / w.sum(None, keepdim=True), i)), OWN_SUM),
    Case("divided by sums as a row, T == K", router(lambda w, i: (w / w.sum(-1), i)), OWN_SUM, num_tokens=2),
    Case("divided twice", router(lambda w, i: (w / w.sum(-1, keepdim=True) / w.sum(-1, keepdim=True), i)), OWN_SUM),
    Case("divided by a rounded sum", router(lambda w, i: (w / w.bfloat16().sum(-1, keepdim=True), i)), OWN_SUM),
    Case("two epsilons", router(lambda w, i: (w / (w.sum(-1, keepdim=True) + 0.1 + 0.1), i)), OWN_SUM),
    Case("a sum of at least 0.9", router(lambda w, i: (w / w.sum(-1, keepdim=True).clamp(min=0.9), i)), OWN_SUM),
    Case("a large epsilon", router(lambda w, i: (w / (w.sum(-1, keepdim=True) + 0.3), i)), "moe"),
    Case("scaled twice", router(lambda w, i: (w * 2.0 * 3.0, i)), SCALE),
    Case("scaled by a tensor", router(lambda w, i: (w * torch.tensor(2.5), i)), SCALE),
    Case(
        "scaled, then renormalised",
        router(lambda w, i: (w * 2.0 / (w * 2.0).sum(-1, keepdim=True), i)),
        "experts: aten.div.Tensor must renormalise before any other step",
    ),
    # correction bias and groups
    Case("correction for the choice", biased_choice(lambda scores, choice: scores), "moe"),
    Case(
        "correction for the weights too",
        biased_choice(lambda scores, choice: choice),
        f"experts: aten.gather.default {STEP}",
    ),
    Case(
        "weights of other scores",
        biased_choice(lambda scores, choice: F.softmax(choice, dim=-1)),
        f"experts: aten.softmax.int {STEP}",
    ),
    Case("best groups", grouped(), "moe"),
    Case(
        "other groups filled with 0",
        grouped(fill=0.0),
        f"{GROUPS} fill with -inf, so that no expert outside the groups is chosen",
    ),
    Case(
        "groups by a rounded sum",
        grouped(dtype=torch.int64),
        "experts: aten.sum.dim_IntList must sum the scores of a group in their own dtype, got torch.int64",
        gradients=False,
    ),
    Case(
        "more choices than the best groups hold",
        grouped(num_experts=6, top_k=4, num_groups=3),
        "experts: topk_groups must lie in 1..num_groups=3 and leave at least top_k=4 experts in groups of 2, "
        "got topk_groups=1; choose from more groups",
    ),
    # readers and modes
    Case("router of another tensor", layer_of(BatchedMM, route=lambda m, x: BatchedMM.route(m, 2 * x)), OTHER_X),
    Case("experts of a detached input", layer_of(BatchedMM, tokens=lambda m, x: x.detach()), OTHER_X),
    Case(
        "router without gradient",
        layer_of(BatchedMM, route=without_gradient),
        "experts: the router runs under another gradient mode or autocast than the experts",
    ),
    Case(
        "router under autocast",
        layer_of(BatchedMM, route=under_autocast),
        "experts: the router runs under another gradient mode or autocast than the experts",
    ),
    Case(
        "router input reshaped without gradient",
        layer_of(BatchedMM, forward=input_reshaped_without_gradient),
        "experts: the router's input was reshaped under another gradient mode than the experts' input",
    ),
    Case(
        "weights read outside",
        layer_of(GroupedMM, forward=with_load_balance_loss),
        "experts: aten.div.Tensor of the router is also read by aten.square.default",
    ),
    Case(
        "ids read outside",
        layer_of(GroupedMM, forward=with_ids),
        "experts: getitem of the router is also read by output",
    ),
    Case(
        "checkpointed shared expert",
        layer_of(BatchedMM, forward=checkpointed_shared_expert),
        f"experts: tag_activation_checkpoint {ROUTER_WRITE}",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_near_miss(case: Case) -> None:
    check(case)


def test_experts_called_twice() -> None:
    """One choice, two calls: the router stays, and each call is a node of its own."""
    check(
        Case(
            "twice",
            layer_of(GroupedMM, forward=twice),
            "experts: getitem of the router is also read by aten.reshape.default\n"
            "experts: the router reads another tensor than the experts",
        )
    )
