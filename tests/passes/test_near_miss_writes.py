"""In-place writes around and inside a layer: what it reads or computes must be what the rewritten op would read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import ExpertLoop, add_by_index
from near_miss import Case, check, layer_of
from spellings import BatchedMM, Experts, GroupedMM, changed, grouped_sigmoid_router
from torch import Tensor, nn

from perseus_compile import perseus
from perseus_compile.backend import CAPTURE_SETTINGS


def correction(layer: Any) -> None:
    layer.correction = nn.Parameter(torch.randn(layer.num_experts))


def after_routing(write: Any, spelling: type[Experts] = BatchedMM) -> Any:
    """A write between the router and the experts; without gradients."""

    def forward(layer: Any, x: Tensor) -> Tensor:
        weights, ids = layer.route(x)
        write(layer, x, ids, weights)
        return layer.experts(x, ids, weights)

    return layer_of(spelling, forward=forward)


def after_routing_case(name: str, write: Any, outcome: str) -> Case:
    return Case(name, after_routing(write), outcome, gradients=False)


def masked_tokens(layer: Any, x: Tensor) -> Tensor:
    x = x.clone()
    x[x[:, 0] > 0] = 0
    return GroupedMM.forward(layer, x)


def inside(step: str, write: Any, outcome: str, name: str, spelling: type[Experts] = GroupedMM) -> Case:
    """A write to the result of a step, after an alias of it was taken that the layer goes on with."""

    def changed_step(layer: Any, *args: Any) -> Tensor:
        result = getattr(spelling, step)(layer, *args)
        alias = result.view(result.shape)
        write(layer, result)
        return alias

    return Case(name, layer_of(spelling, **{step: changed_step}), outcome, gradients=False)


def halves_written_through_base(layer: Experts, hidden: Tensor) -> Tensor:
    """The halves are views of what is written through another one, which autograd does not see."""
    gate, up = hidden[:, :12], hidden[:, 12:]
    hidden.detach().mul_(2)
    return F.silu(gate) * up


def alias_of_down(layer: Any) -> None:
    layer.register_buffer("alias", layer.down.detach(), persistent=False)


def write_through_alias(layer: Any, hidden: Tensor) -> Tensor:
    layer.alias.mul_(2)
    out = BatchedMM.gate(layer, hidden)
    layer.alias.mul_(0.5)
    return out


def write_to_correction(layer: Any, x: Tensor) -> Tensor:
    weights, ids = layer.route(x)
    layer.correction.data.mul_(-1)
    out = layer.experts(x, ids, weights)
    layer.correction.data.mul_(-1)
    return out


def inverse_is_read(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return GroupedMM.forward(layer, x), layer.inverse


def invert_by_operator(layer: Any, permutation: Tensor) -> Tensor:
    """The write has no reader in Dynamo's graph; only its operator says that it is one."""
    layer.inverse = torch.zeros_like(permutation)
    torch.ops.aten.index_put_.default(layer.inverse, [permutation], torch.arange(permutation.size(0)))
    return layer.inverse


def invert_into_one_element(layer: Any, permutation: Tensor) -> Tensor:
    inverse = torch.zeros_like(permutation[:1]).expand_as(permutation)
    return inverse.index_put_((permutation,), torch.arange(permutation.size(0)))


def inverse_over_ids(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """After the sort nobody needs the ids, so their memory holds the inverse permutation."""
    weights, ids = layer.route(x)
    flat = ids.view(-1)
    sorted_ids, permutation = layer.sort(flat)
    ends = layer.ends(sorted_ids)
    out = layer.second(layer.gate(layer.first(x[permutation // 2], sorted_ids, ends)), sorted_ids, ends)
    out = layer.weigh(out, weights.reshape(-1)[permutation])
    flat[permutation] = torch.arange(permutation.size(0))
    return layer.combine(out[flat], x), weights


def tokens_written_afterwards(layer: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
    """The router keeps another tensor for its gradients, and the experts keep the gathered rows."""
    weights, ids = layer.route(x.sigmoid())
    out = layer.experts(x, ids, weights)
    x[:, 1:].mul_(2)
    return out, x


def ids_written_afterwards(layer: Experts, x: Tensor) -> Tensor:
    weights, ids = layer.route(x)
    out = layer.experts(x, ids, weights)
    ids.clamp_(0, 1)
    return out + ids.sum()


def input_and_output_written_afterwards(layer: Experts, x: Tensor) -> Tensor:
    out = BatchedMM.forward(layer, x)
    seen = out.view(-1)
    x.mul_(2)
    out.add_(1)
    return seen


def normalized_tokens_written(layer: Experts, x: Tensor) -> Tensor:
    """The write is to a view of what a Python function of several ATen calls returned."""
    x = F.normalize(x)
    weights, ids = layer.route(x)
    x.view(-1).mul_(2)
    return layer.experts(x, ids, weights)


def output_data_written(layer: Experts, x: Tensor) -> Tensor:
    """The result is a view of the sums, which are written to behind autograd's back."""
    out = BatchedMM.forward(layer, x)
    seen = out.view(out.shape)
    out.data.mul_(2)
    return seen


STEP = "is not a known step of a router"
OTHER_X = "experts: the router reads another tensor than the experts"
ROUTER_WRITE = "may write in place to what the router reads before the experts have run"
LAYER_WRITE = "may write in place to what the layer reads or computes before it is summed"

CASES = (
    Case(
        "tokens written at an index, before the layer",
        layer_of(GroupedMM, forward=masked_tokens),
        "refused: aten.index_put_.default exists only inside one of Dynamo's nodes",
    ),
    # writes between the router and the experts
    after_routing_case("ids written", lambda m, x, i, w: i.clamp_(0, 1), f"experts: aten.clamp_.default {STEP}"),
    after_routing_case(
        "ids written through a view",
        lambda m, x, i, w: i[:, :1].clamp_(0, 1),
        "experts: getitem of the router is also read by aten.slice.Tensor",
    ),
    after_routing_case(
        "weights written through a view",
        lambda m, x, i, w: w[:, 0].mul_(2),
        "experts: aten.div.Tensor of the router is also read by aten.select.int",
    ),
    after_routing_case("input written", lambda m, x, i, w: x.mul_(2), OTHER_X),
    after_routing_case(
        "input written through a view",
        lambda m, x, i, w: x.view(-1)[:4].mul_(2),
        f"experts: aten.mul_.Tensor {ROUTER_WRITE}",
    ),
    Case(
        "normalized input written through a view",
        layer_of(BatchedMM, forward=normalized_tokens_written),
        f"experts: aten.mul_.Tensor {ROUTER_WRITE}",
        gradients=False,
    ),
    after_routing_case(
        "input written by a list operator",
        lambda m, x, i, w: torch._foreach_mul_([x], 2.0),
        f"experts: aten._foreach_mul_.Scalar {ROUTER_WRITE}",
    ),
    after_routing_case(
        "router weight written", lambda m, x, i, w: m.router.data.neg_(), f"experts: aten.neg_.default {ROUTER_WRITE}"
    ),
    Case(
        "correction written",
        layer_of(BatchedMM, prepare=correction, route=grouped_sigmoid_router, forward=write_to_correction),
        f"experts: aten.mul_.Tensor {ROUTER_WRITE}",
        gradients=False,
    ),
    # writes inside the experts
    inside("ends", lambda m, ends: ends[0].zero_(), f"refused: aten.zero_.default {LAYER_WRITE}", "group ends written"),
    inside(
        "row_tokens",
        lambda m, tokens: tokens[:3].zero_(),
        f"refused: aten.zero_.default {LAYER_WRITE}",
        "row tokens written",
    ),
    inside(
        "invert",
        lambda m, inverse: inverse[:3].copy_(inverse[:3].flip(0)),
        f"refused: aten.copy_.default {LAYER_WRITE}",
        "inverse written",
    ),
    inside(
        "repeat",
        lambda m, rows: rows.mul_(2),
        f"refused: aten.mul_.Tensor {LAYER_WRITE}",
        "token rows written",
        BatchedMM,
    ),
    inside(
        "second",
        lambda m, rows: rows.mul_(2),
        "refused: transformers.grouped_mm_fallback.default inside it is also read by aten.mul_.Tensor",
        "expert outputs written",
    ),
    inside(
        "gate",
        lambda m, rows: m.down.data.chunk(2)[0].mul_(2),
        f"refused: aten.mul_.Tensor {LAYER_WRITE}",
        "down written",
        BatchedMM,
    ),
    Case(
        "down written through another tensor",
        layer_of(BatchedMM, prepare=alias_of_down, gate=write_through_alias),
        f"refused: aten.mul_.Tensor {LAYER_WRITE}",
        gradients=False,
    ),
    Case(
        "halves written through their base",
        layer_of(BatchedMM, gate=halves_written_through_base),
        "refused: aten.squeeze.dim inside it is also read by aten.detach.default",
    ),
    Case(
        "inverse written by an operator and read outside",
        layer_of(GroupedMM, forward=inverse_is_read, invert=invert_by_operator),
        "moe",
        gradients=False,
    ),
    Case(
        "inverse written into one element",
        layer_of(GroupedMM, invert=invert_into_one_element),
        "refused: aten.index_put_.default writes to a value that was expanded: several of its elements are one number",
        gradients=False,
    ),
    Case(
        "inverse written over the ids",
        layer_of(GroupedMM, forward=inverse_over_ids),
        "refused: aten.index_put_.default inside it writes in place to what it reads, "
        "and the op would read it afterwards",
        gradients=False,
    ),
    # writes afterwards
    Case(
        "tokens written afterwards",
        layer_of(GroupedMM, forward=tokens_written_afterwards),
        "refused: aten.mul_.Tensor writes in place to what the layer has read, and gradients need it as it was",
    ),
    Case(
        "tokens written afterwards, no gradients",
        layer_of(GroupedMM, forward=tokens_written_afterwards),
        OTHER_X,
        gradients=False,
    ),
    Case(
        "ids written afterwards",
        layer_of(BatchedMM, forward=ids_written_afterwards),
        "experts: getitem of the router is also read by aten.clamp_.default",
        gradients=False,
    ),
    Case(
        "input and output written afterwards",
        layer_of(BatchedMM, forward=input_and_output_written_afterwards),
        "moe",
        gradients=False,
    ),
    Case("output written through its data", layer_of(BatchedMM, forward=output_data_written), "moe", gradients=False),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_near_miss(case: Case) -> None:
    check(case)


def written_through_a_view(layer: ExpertLoop, x: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = ExpertLoop.route(layer, x)
    ids[:, 1] = ids[:, 0]
    return weights, ids


def test_ids_of_a_topk_are_not_distinct_after_a_write() -> None:
    """Their node was still the top-k; the op added an expert's output twice where the loop adds it once."""
    layer = changed(ExpertLoop, route=written_through_a_view, add=add_by_index)
    reason = "aten.index_put_.default adds once where a token chooses an expert twice; index_add adds all"
    with torch._dynamo.config.patch(CAPTURE_SETTINGS):
        check(Case("written through a view", layer, f"refused: {reason}", gradients=False))


def shift_ids_op() -> Callable[[Tensor, Tensor], None]:
    """An operator that writes to an argument which is not its first.

    Made where it is used: test_refusal_sentences imports this file once more, and an operator that is defined a second
    time takes the first one with it.
    """

    @torch.library.custom_op("perseus_tests::shift_ids", mutates_args={"ids"})
    def shift_ids(num_experts: Tensor, ids: Tensor) -> None:
        ids.sub_(num_experts)

    return shift_ids


@pytest.mark.parametrize("form", ("a list", "the second argument", "a method"))
def test_ids_that_something_makes_negative_wrap(form: str) -> None:
    """Positions found by topk are no longer such after a write, in whatever argument; the op skipped negative ids."""
    shift_ids = shift_ids_op()

    def route(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = Experts.route(layer, x)
        if form == "a list":
            torch._foreach_sub_([ids], layer.num_experts)
        elif form == "a method":
            ids.sub_(layer.num_experts)
        else:
            shift_ids(torch.tensor(layer.num_experts), ids)
        return weights, ids

    layer = layer_of(BatchedMM, route=route)()
    x = torch.randn(5, 8)
    with torch.no_grad():
        compiled = torch.compile(layer, backend=perseus, options={"inner": "eager"})
        torch.testing.assert_close(compiled(x), layer(x))
