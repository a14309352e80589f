"""Does the routing kernel choose the experts, and weigh them, as the torch ops do?"""

from __future__ import annotations

import pytest
import torch

from perseus_compile import fused_router
from perseus_compile.facts import RoutingSpec
from perseus_compile.routing import route

pytestmark = pytest.mark.gpu


def _spec(**numbers: object) -> RoutingSpec:
    defaults = {"router_dtype": torch.float32, "score_dtype": torch.float32, "weights_dtype": torch.float32}
    return RoutingSpec(**{"routing": "softmax_topk", "top_k": 8, **defaults, **numbers})  # type: ignore[arg-type]


SPECS = {
    "qwen3": (128, _spec(renormalize=True)),
    "mixtral": (8, _spec(top_k=2, renormalize=True, weights_dtype=torch.bfloat16)),
    "olmoe": (64, _spec()),
    "gpt-oss": (128, _spec(routing="topk_softmax", top_k=4)),
    "deepseek-v3": (
        256,
        _spec(
            routing="sigmoid_topk",
            renormalize=True,
            renormalize_eps=1e-20,
            routing_scale=2.5,
            num_groups=8,
            topk_groups=4,
        ),
    ),
    "most": (1024, _spec(top_k=32, renormalize=True)),
    "odd": (60, _spec(top_k=4)),
    "one": (1, _spec(top_k=1, renormalize=True)),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 1000])
def test_matches_torch(name: str, num_tokens: int) -> None:
    num_experts, spec = SPECS[name]
    random = torch.Generator(device="cuda").manual_seed(num_tokens)
    logits = torch.randn(num_tokens, num_experts, device="cuda", generator=random)
    bias = torch.randn(num_experts, device="cuda", generator=random) if spec.routing == "sigmoid_topk" else None
    identity = torch.eye(num_experts, device="cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    weights, ids = route(logits, identity, None, bias, **spec.as_kwargs())
    routed = fused_router.route_logits(logits, bias, spec)
    assert routed is not None
    order, kernel_order = ids.argsort(-1), routed[1].argsort(-1)
    assert torch.equal(ids.gather(1, order), routed[1].gather(1, kernel_order).long())
    rounding = 1e-2 if spec.weights_dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(
        routed[0].gather(1, kernel_order), weights.gather(1, order).float(), rtol=rounding, atol=1e-7
    )


def test_equal_scores_take_the_lower_expert() -> None:
    routed = fused_router.route_logits(torch.zeros(3, 40, device="cuda", dtype=torch.bfloat16), None, _spec(top_k=5))
    assert routed is not None
    assert routed[1].tolist() == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize("routing", ["softmax_topk", "topk_softmax", "sigmoid_topk"])
def test_nan_gives_valid_distinct_ids_and_stays_in_its_token(routing: str) -> None:
    logits = torch.randn(4, 64, device="cuda")
    logits[1] = float("nan")
    logits[2, 7] = float("nan")
    routed = fused_router.route_logits(logits, None, _spec(routing=routing))
    assert routed is not None
    weights, ids = routed
    assert all(len(set(row)) == 8 and min(row) >= 0 and max(row) < 64 for row in ids.tolist())
    assert weights[[0, 3]].isfinite().all() and weights[1].isnan().all() and 7 in ids[2].tolist()


def test_what_is_not_covered_says_why() -> None:
    logits = torch.randn(2, 64, device="cuda")
    assert "at most 32 choices" in str(fused_router.why_not(logits, None, _spec(top_k=40)))
    assert "scores must be float32" in str(fused_router.why_not(logits, None, _spec(score_dtype=torch.bfloat16)))
    assert fused_router.route_logits(logits.double(), None, _spec()) is None
