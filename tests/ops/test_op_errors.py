"""What do the ops say of a call that is not legal? The whole text, on real tensors and under fake ones alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_cases import NAMES, Case, make_case
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from perseus_compile import UnsupportedMoE

# Of the legal call: T 7, K 2, E 4, D 10, F 6, all float32.
SHAPES = "the shapes are x [T, D], ids and weights [T, K], gate_up and down [E, ., .], biases [E, .]"
LAYOUT = "check weight_layout and the other shapes"
FLOATS = "float32, bfloat16, float16, float64"
CAST = "cast x to {0}, or the model to float32"

EXPERTS: dict[str, tuple[dict[str, Any], str]] = {
    "weight_layout": (
        {"weight_layout": "io"},
        "weight_layout must be one of out_in, in_out; got 'io'; pass one of these words",
    ),
    "gate_layout": (
        {"gate_layout": "split"},
        "gate_layout must be one of concatenated, interleaved, none; got 'split'; pass one of these words",
    ),
    "activation": (
        {"activation": "tanh"},
        "activation must be one of silu, gelu, gelu_tanh, relu, relu2, clamped_swiglu, clamped_silu, softcapped_silu; "
        "got 'tanh'; pass one of these words",
    ),
    "weight_on": (
        {"weight_on": "hidden"},
        "weight_on must be one of output, input; got 'hidden'; pass one of these words",
    ),
    "params of silu": (
        {"activation_params": [1.0]},
        "activation_params of silu must be [], got [1.0]; pass one number for each name",
    ),
    "params of clamped_swiglu": (
        {"activation": "clamped_swiglu", "activation_params": [1.5]},
        "activation_params of clamped_swiglu must be [alpha, limit], got [1.5]; pass one number for each name",
    ),
    "clamped_silu without a gate": (
        {"activation": "clamped_silu", "activation_params": [1.5], "gate_layout": "none"},
        "clamped_silu needs a gate and an up half, got gate_layout='none'; "
        "pass gate_layout='concatenated' or 'interleaved'",
    ),
    "x axes": ({"x": torch.zeros(7, 1, 10)}, f"x must have 2 axes, got 3; {SHAPES}"),
    "ids axes": ({"ids": torch.zeros(7, dtype=torch.int64)}, f"ids must have 2 axes, got 1; {SHAPES}"),
    "weights axes": ({"weights": torch.zeros(7)}, f"weights must have 2 axes, got 1; {SHAPES}"),
    "gate_up axes": ({"gate_up": torch.zeros(12, 10)}, f"gate_up must have 3 axes, got 2; {SHAPES}"),
    "gate_up_bias axes": ({"gate_up_bias": torch.zeros(12)}, f"gate_up_bias must have 2 axes, got 1; {SHAPES}"),
    "down axes": ({"down": torch.zeros(4, 10, 6, 1)}, f"down must have 3 axes, got 4; {SHAPES}"),
    "down_bias axes": ({"down_bias": torch.zeros(4, 10, 1)}, f"down_bias must have 2 axes, got 3; {SHAPES}"),
    "x dtype": (
        {"x": torch.zeros(7, 10, dtype=torch.float8_e4m3fn)},
        f"x must be one of {FLOATS}; got float8_e4m3fn; cast it with .to() first",
    ),
    "x is complex": (
        {"x": torch.zeros(7, 10, dtype=torch.complex64)},
        f"x must be one of {FLOATS}; got complex64; cast it with .to() first",
    ),
    "ids dtype": (
        {"ids": torch.zeros(7, 2, dtype=torch.int16)},
        "ids must be one of int64, int32; got int16; cast it with .to() first",
    ),
    "float ids": ({"ids": torch.zeros(7, 2)}, "ids must be one of int64, int32; got float32; cast it with .to() first"),
    "weights dtype": (
        {"weights": torch.zeros(7, 2, dtype=torch.int64)},
        f"weights must be one of {FLOATS}; got int64; cast it with .to() first",
    ),
    "gate_up dtype": (
        {"gate_up": torch.zeros(4, 12, 10, dtype=torch.bfloat16)},
        f"gate_up must have the dtype of x, float32, got bfloat16; {CAST.format('bfloat16')}",
    ),
    "gate_up_bias dtype": (
        {"gate_up_bias": torch.zeros(4, 12, dtype=torch.float64)},
        f"gate_up_bias must have the dtype of x, float32, got float64; {CAST.format('float64')}",
    ),
    "down dtype": (
        {"down": torch.zeros(4, 10, 6, dtype=torch.float16)},
        f"down must have the dtype of x, float32, got float16; {CAST.format('float16')}",
    ),
    "down_bias dtype": (
        {"down_bias": torch.zeros(4, 10, dtype=torch.int8)},
        f"down_bias must have the dtype of x, float32, got int8; {CAST.format('int8')}",
    ),
    "x shape": (
        {"x": torch.zeros(7, 11)},
        f"gate_up must be [E, 2F, D] (out_in) = [4, 12, 11], got [4, 12, 10]; {LAYOUT}",
    ),
    "gate_up shape": (
        {"gate_up": torch.zeros(4, 13, 10)},
        f"gate_up must be [E, 2F, D] (out_in) = [4, 12, 10], got [4, 13, 10]; {LAYOUT}",
    ),
    "gate_up in the other layout": (
        {"weight_layout": "in_out"},
        f"gate_up must be [E, D, 2F] (in_out) = [4, 10, 20], got [4, 12, 10]; {LAYOUT}",
    ),
    "down shape": (
        {"down": torch.zeros(3, 10, 6)},
        f"down must be [E, D, F] (out_in) = [4, 10, 6], got [3, 10, 6]; {LAYOUT}",
    ),
    "down shape in_out": (
        {"weight_layout": "in_out", "gate_up": torch.zeros(4, 10, 12), "down": torch.zeros(4, 6, 9)},
        f"down must be [E, F, D] (in_out) = [4, 6, 10], got [4, 6, 9]; {LAYOUT}",
    ),
    "gate_up_bias shape": (
        {"gate_up_bias": torch.zeros(4, 6)},
        f"gate_up_bias must be [E, 2F] = [4, 12], got [4, 6]; {LAYOUT}",
    ),
    "down_bias shape": (
        {"down_bias": torch.zeros(1, 10)},
        f"down_bias must be [E, D] = [4, 10], got [1, 10]; {LAYOUT}",
    ),
    "weights shape": (
        {"weights": torch.zeros(7, 3)},
        f"weights must be [T, K], as ids, = [2], got [3]; {LAYOUT}",
    ),
    "k > E": (
        {"ids": torch.zeros(7, 5, dtype=torch.int64), "weights": torch.zeros(7, 5)},
        "a token can choose at most num_experts=4 experts, got K=5 columns in ids; pass ids and weights as [T, K]",
    ),
    "offset too large": (
        {"expert_offset": 1},
        "the local experts must lie in 0..num_experts=4, got expert_offset=1 with 4 local experts; "
        "pass the id of the first local expert and the count over all ranks",
    ),
    "offset below zero": (
        {"expert_offset": -1},
        "the local experts must lie in 0..num_experts=4, got expert_offset=-1 with 4 local experts; "
        "pass the id of the first local expert and the count over all ranks",
    ),
    "tokens of ids": (
        {"ids": torch.zeros(6, 2, dtype=torch.int64)},
        "ids must have one row per token, T=7 as x has, got 6; pass x and ids of the same tokens",
    ),
    "tokens of weights": (
        {"weights": torch.zeros(1, 2)},
        "weights must have one row per token, T=7 as x has, got 1; pass x and weights of the same tokens",
    ),
}
ROUTER_NUMBERS = {
    "routing": "softmax_topk",
    "top_k": 2,
    "renormalize": True,
    "renormalize_eps": 0.0,
    "routing_scale": 1.0,
    "num_groups": 1,
    "topk_groups": 1,
    "router_dtype": torch.float32,
    "score_dtype": torch.float32,
    "weights_dtype": torch.float32,
}
GROUPS = {"routing": "sigmoid_topk", "num_groups": 2, "topk_groups": 1}
MOE: dict[str, tuple[dict[str, Any], str]] = {
    "routing": (
        {"routing": "hash"},
        "routing must be one of softmax_topk, topk_softmax, sigmoid_topk; got 'hash'; pass one of these words",
    ),
    "top_k > E": (
        {"top_k": 5},
        "top_k must lie in 1..num_experts=4, got top_k=5; choose at most as many experts as there are",
    ),
    "top_k 0": (
        {"top_k": 0},
        "top_k must lie in 1..num_experts=4, got top_k=0; choose at most as many experts as there are",
    ),
    "router_dtype": (
        {"router_dtype": torch.int32},
        f"router_dtype must be one of {FLOATS}; got int32; cast it with .to() first",
    ),
    "score_dtype": (
        {"score_dtype": torch.int64},
        f"score_dtype must be one of {FLOATS}; got int64; cast it with .to() first",
    ),
    "weights_dtype": (
        {"weights_dtype": torch.bool},
        f"weights_dtype must be one of {FLOATS}; got bool; cast it with .to() first",
    ),
    "router weight dtype": (
        {"router_weight": torch.zeros(4, 10, dtype=torch.int32)},
        f"router_weight must be one of {FLOATS}; got int32; cast it with .to() first",
    ),
    "router weight shape": (
        {"router_weight": torch.zeros(10, 4)},
        f"router_weight must be [num_experts, D] = [4, 10], got [10, 4]; {LAYOUT}",
    ),
    "router weight axes": ({"router_weight": torch.zeros(4)}, f"router_weight must have 2 axes, got 1; {SHAPES}"),
    "router bias shape": (
        {"router_bias": torch.zeros(3)},
        f"router_bias must be [num_experts] = [4], got [3]; {LAYOUT}",
    ),
    "correction bias shape": (
        {"routing": "sigmoid_topk", "correction_bias": torch.zeros(5)},
        f"correction_bias must be [num_experts] = [4], got [5]; {LAYOUT}",
    ),
    "correction bias of a softmax": (
        {"correction_bias": torch.zeros(4)},
        "a correction bias belongs to routing='sigmoid_topk', got routing='softmax_topk'; "
        "pass None for correction_bias",
    ),
    "groups of a softmax": (
        {"num_groups": 2},
        "expert groups belong to routing='sigmoid_topk', got num_groups=2 with routing='softmax_topk'; "
        "pass num_groups=1 and topk_groups=1",
    ),
    "groups that do not divide E": (
        {**GROUPS, "num_groups": 3},
        "num_groups must divide num_experts=4 into groups of at least 2 experts, got num_groups=3; "
        "pass num_groups=1 for a router without groups",
    ),
    "groups of one": (
        {**GROUPS, "num_groups": 4},
        "num_groups must divide num_experts=4 into groups of at least 2 experts, got num_groups=4; "
        "pass num_groups=1 for a router without groups",
    ),
    "too few groups chosen": (
        {**GROUPS, "top_k": 3},
        "topk_groups must lie in 1..num_groups=2 and leave at least top_k=3 experts in groups of 2, "
        "got topk_groups=1; choose from more groups",
    ),
    "experts of the node": (
        {"gate_up": torch.zeros(4, 13, 10)},
        f"gate_up must be [E, 2F, D] (out_in) = [4, 12, 10], got [4, 13, 10]; {LAYOUT}",
    ),
    "x axes": ({"x": torch.zeros(10)}, f"x must have 2 axes, got 1; {SHAPES}"),
}


def call_experts(case: Case, tensors: list[Tensor | None]) -> Tensor:
    return torch.ops.perseus.experts(*tensors, **case.numbers)


def call_backward(case: Case, tensors: list[Tensor | None]) -> list[Tensor]:
    grad = torch.zeros(7, 10)
    return torch.ops.perseus.experts_backward(grad, *tensors, **case.numbers, needs_grad=[True] * 6)


def message(call: Callable[..., Any], tensors: list[Tensor | None], *, fake: bool) -> str:
    with pytest.raises(UnsupportedMoE) as caught:
        if fake:
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                call([None if one is None else mode.from_tensor(one) for one in tensors])
        else:
            call(tensors)
    return str(caught.value)


@pytest.mark.parametrize("fake", (False, True), ids=("real", "fake"))
@pytest.mark.parametrize("call", (call_experts, call_backward))
@pytest.mark.parametrize("changes, expected", EXPERTS.values(), ids=EXPERTS)
def test_experts(changes: dict[str, Any], expected: str, call: Callable[..., Any], fake: bool) -> None:
    case = make_case().having(**changes)
    assert message(lambda tensors: call(case, tensors), list(case.tensors), fake=fake) == expected


@pytest.mark.parametrize("fake", (False, True), ids=("real", "fake"))
def test_gradient_of_other_tokens(fake: bool) -> None:
    case = make_case()
    have = message(
        lambda tensors: torch.ops.perseus.experts_backward(*tensors, **case.numbers, needs_grad=[True] * 6),
        [torch.zeros(6, 10), *case.tensors],
        fake=fake,
    )
    assert have == "grad must have one row per token, T=7 as x has, got 6; pass x and grad of the same tokens"


@pytest.mark.parametrize("fake", (False, True), ids=("real", "fake"))
@pytest.mark.parametrize("grads", (False, True), ids=("no grad", "grad"))
@pytest.mark.parametrize("changes, expected", MOE.values(), ids=MOE)
def test_moe(changes: dict[str, Any], expected: str, grads: bool, fake: bool) -> None:
    changes = dict(changes)
    router = [changes.pop("router_weight", torch.zeros(4, 10))]
    router += [changes.pop(name, None) for name in ("router_bias", "correction_bias")]
    case = make_case().having(**{name: changes.pop(name) for name in NAMES if name in changes})
    if grads:
        case["down"].requires_grad_(True)
    numbers = {**ROUTER_NUMBERS, **case.numbers, **changes}
    have = message(
        lambda tensors: torch.ops.perseus.moe(*tensors, **numbers),
        [case["x"], *router, *case.tensors[3:]],
        fake=fake,
    )
    assert have == expected


@pytest.mark.parametrize("name", [name for name in NAMES if name != "x"])
def test_mixed_devices(name: str) -> None:
    case = make_case()
    case = case.having(**{name: case[name].to("meta")})
    assert message(lambda _: case.run(), [], fake=False) == (
        f"all tensors must be on the device of x, cpu, got {name} on meta; move {name} with .to('cpu')"
    )


@pytest.mark.parametrize("op", ("experts", "moe"))
def test_meta_tensors(op: str) -> None:
    case = make_case()
    tensors = [None if one is None else one.to("meta") for one in case.tensors]
    numbers = case.numbers
    if op == "moe":
        tensors[1:3] = [torch.zeros(4, 10, device="meta"), None, None]
        numbers = {**ROUTER_NUMBERS, **numbers}
    assert message(lambda _: getattr(torch.ops.perseus, op)(*tensors, **numbers), [], fake=False) == (
        "perseus ops need tensors with values, got device 'meta'; "
        "materialise the model with .to_empty(device='cpu'), or trace under FakeTensorMode"
    )


@pytest.mark.parametrize("api", ("torch.func.jvp", "forward_ad"))
def test_forward_mode_is_refused(api: str) -> None:
    """It gave a tangent of zero without a word."""
    case = make_case()
    x, tangent = case["x"], torch.ones_like(case["x"])

    def call(x: Tensor) -> Tensor:
        return case.having(x=x).run()

    with pytest.raises(UnsupportedMoE, match="derivatives in reverse mode only, got a tensor with a tangent"):
        if api == "forward_ad":
            with torch.autograd.forward_ad.dual_level():
                call(torch.autograd.forward_ad.make_dual(x, tangent))
        else:
            torch.func.jvp(call, (x,), (tangent,))
