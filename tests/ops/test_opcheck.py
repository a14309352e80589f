"""Do the ops keep torch's contract for custom ops: schema, autograd, fake tensors, tracing, symbolic tokens?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_cases import Case, make_case
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

OPS = torch.ops.perseus
ALL = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")

CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {
        "dtype": torch.bfloat16,
        "weights_dtype": torch.float32,
        "activation": "clamped_swiglu",
        "weight_layout": "in_out",
        "gate_layout": "interleaved",
    },
    "local experts": {"num_experts": 9, "expert_offset": 3, "weight_on": "input", "biases": False},
}
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax_topk": {"renormalize": True},
    "topk_softmax": {},
    "sigmoid_topk": {
        "renormalize": True,
        "renormalize_eps": 1e-20,
        "routing_scale": 2.5,
        "num_groups": 2,
        "topk_groups": 1,
        "router_dtype": torch.float64,
    },
}


def moe_call(routing: str, case: Case) -> tuple[list[Tensor | None], dict[str, Any]]:
    generator = torch.Generator().manual_seed(4)
    num_experts = case.numbers["num_experts"]
    router = [torch.randn(num_experts, case["x"].shape[1], generator=generator).to(case["x"].dtype), None, None]
    if routing == "topk_softmax":
        router[1] = torch.randn(num_experts, generator=generator).to(case["x"].dtype)
    if routing == "sigmoid_topk":
        router[2] = torch.randn(num_experts, generator=generator)
    numbers = {
        "routing": routing,
        "top_k": 2,
        "renormalize": False,
        "renormalize_eps": 0.0,
        "routing_scale": 1.0,
        "num_groups": 1,
        "topk_groups": 1,
        "router_dtype": case["x"].dtype,
        "score_dtype": torch.float32,
        "weights_dtype": case["x"].dtype,
        **ROUTERS[routing],
    }
    return [case["x"], *router, *case.tensors[3:]], {**numbers, **case.numbers}


def check(op: Any, tensors: list[Tensor | None], numbers: dict[str, Any], tests: tuple[str, ...] = ALL) -> None:
    outcome = torch.library.opcheck(op, tuple(tensors), numbers, test_utils=tests)
    assert outcome == dict.fromkeys(tests, "SUCCESS")


@pytest.mark.parametrize("grads", (False, True), ids=("no grad", "grad"))
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_experts(changes: dict[str, Any], grads: bool) -> None:
    case = make_case(**changes)
    case = case.leaves() if grads else case
    check(OPS.experts.default, list(case.tensors), case.numbers)


@pytest.mark.parametrize("asked", ("all", "x and weights"))
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_experts_backward(changes: dict[str, Any], asked: str) -> None:
    case = make_case(**changes)
    present = [tensor is not None for tensor in (case.tensors[0], *case.tensors[2:])]
    needs_grad = present if asked == "all" else [True, True, False, False, False, False]
    numbers = {**case.numbers, "needs_grad": needs_grad}
    check(OPS.experts_backward.default, [torch.ones_like(case["x"]), *case.tensors], numbers)


def test_experts_backward_of_leaves() -> None:
    """All but tracing a second derivative, which raises."""
    case = make_case().leaves()
    numbers = {**case.numbers, "needs_grad": [True] * 6}
    check(OPS.experts_backward.default, [torch.ones_like(case["x"]), *case.tensors], numbers, ALL[:3])


@pytest.mark.parametrize("grads", (False, True), ids=("no grad", "grad"))
@pytest.mark.parametrize("routing", ROUTERS)
def test_moe(routing: str, grads: bool) -> None:
    tensors, numbers = moe_call(routing, make_case())
    if grads:
        for tensor in (tensors[0], tensors[1], *tensors[4:]):
            assert tensor is not None
            tensor.requires_grad_(True)
    check(OPS.moe.default, tensors, numbers)


def test_moe_in_bfloat16() -> None:
    check(OPS.moe.default, *moe_call("softmax_topk", make_case(**CASES["bfloat16"])))


@pytest.mark.gpu
@pytest.mark.parametrize("grads", (False, True), ids=("no grad", "grad"))
@pytest.mark.parametrize("name", ("experts", "moe"))
def test_on_cuda(name: str, grads: bool) -> None:
    case = make_case(dtype=torch.bfloat16, weights_dtype=torch.float32, width=24, inner=16)
    tensors, numbers = moe_call("softmax_topk", case) if name == "moe" else (list(case.tensors), case.numbers)
    on_gpu = [None if tensor is None else tensor.cuda() for tensor in tensors]
    for tensor in on_gpu:
        if tensor is not None and tensor.is_floating_point():
            tensor.requires_grad_(grads)
    check(getattr(OPS, name).default, on_gpu, numbers)


def calls(num_tokens: int) -> dict[str, tuple[Any, list[Tensor | None], dict[str, Any]]]:
    case = make_case(num_tokens=num_tokens)
    backward = {**case.numbers, "needs_grad": [True] * 6}
    return {
        "experts": (OPS.experts, list(case.tensors), case.numbers),
        "experts_backward": (OPS.experts_backward, [torch.ones_like(case["x"]), *case.tensors], backward),
        "moe": (OPS.moe, *moe_call("sigmoid_topk", case)),
    }


TOKEN_TENSORS = {"experts": 3, "experts_backward": 4, "moe": 1}  # so many arguments, from the first, have an axis T


@pytest.mark.parametrize("name", TOKEN_TENSORS)
def test_one_graph_serves_every_token_count(name: str) -> None:
    op, tensors, numbers = calls(7)[name]
    gm = make_fx(lambda *tensors: op(*tensors, **numbers), tracing_mode="symbolic")(*tensors)
    for num_tokens in (1, 2, 50):
        _, others, _ = calls(num_tokens)[name]
        others[-4:] = tensors[-4:]
        have, want = gm(*others), op(*others, **numbers)
        torch.testing.assert_close(have, want, rtol=0, atol=0)


@pytest.mark.parametrize("name", TOKEN_TENSORS)
def test_a_token_count_that_nobody_knows(name: str) -> None:
    """An unbacked T has no value to guard on: a fake implementation that looks at it raises."""
    op, tensors, numbers = calls(7)[name]
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env) as mode:
        num_tokens = shape_env.create_unbacked_symint()
        fakes: list[Tensor | None] = []
        for index, tensor in enumerate(tensors):
            if tensor is None:
                fakes.append(None)
            elif index < TOKEN_TENSORS[name]:
                fakes.append(torch.empty(num_tokens, tensor.shape[1], dtype=tensor.dtype))
            else:
                fakes.append(mode.from_tensor(tensor, static_shapes=True))
        out = op(*fakes, **numbers)
    first = out[0] if isinstance(out, list) else out
    assert isinstance(first.shape[0], torch.SymInt)
    assert first.shape[0].node.expr == num_tokens.node.expr
    assert not shape_env.guards
