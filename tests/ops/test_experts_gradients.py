"""Are the gradients of perseus::experts right, and only those computed that are asked for?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_cases import (
    DIFFERENTIABLE,
    FORMS,
    NAMES,
    Case,
    Watch,
    assert_near,
    assert_same_bits,
    form_name,
    ids_with_rows,
    make_case,
    one_thread,
)
from torch import Tensor

from perseus_compile import UnsupportedMoE

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BOTH_ROADS = (70, 3, 0, 9)  # rows of each expert: a GEMM, a few, none, a few


def gradients(case: Case, grad: Tensor, *, through: Any) -> list[Tensor]:
    return list(torch.autograd.grad(through(case), case.required(), grad))


def check(case: Case, grad: Tensor) -> None:
    """Against autograd through the reference in float64."""
    have = gradients(case.leaves(), grad, through=Case.run)
    want = gradients(case.exact().leaves(), grad.double(), through=Case.reference)
    for one, other, leaf in zip(have, want, case.leaves().required(), strict=True):
        assert one.dtype == leaf.dtype and one.shape == leaf.shape
        # A gradient is rounded to its own dtype, after it went through that of x.
        assert_near(one, other, case["x"].dtype)


@pytest.mark.parametrize("form", FORMS, ids=form_name)
def test_gradcheck(form: dict[str, Any]) -> None:
    ids = torch.tensor([[2, 3], [3, 3], [6, 0]])  # duplicated and foreign ones
    case = make_case(
        ids=ids, num_local=2, num_experts=7, expert_offset=2, width=2, inner=2, dtype=torch.float64, **form
    ).leaves()

    def call(*leaves: Tensor) -> Tensor:
        fresh = iter(leaves)
        tensors = (next(fresh) if one is not None and one.requires_grad else one for one in case.tensors)
        return Case(tuple(tensors), case.numbers).run()

    assert len(case.required()) == (6 if form["biases"] else 4)
    with one_thread():
        assert torch.autograd.gradcheck(call, case.required())


@pytest.mark.parametrize("form", FORMS[::3], ids=form_name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(form: dict[str, Any], dtype: torch.dtype) -> None:
    if form["activation"] in ("relu", "clamped_swiglu", "clamped_silu") and dtype != torch.float32:
        form = {**form, "activation": "silu"}  # a value rounded over a limit, or over 0, turns its gradient on or off
    case = make_case(num_choices=3, num_local=3, num_experts=5, expert_offset=1, dtype=dtype, **form)
    check(case, make_case(seed=1, dtype=dtype)["x"])


@pytest.mark.parametrize("form", FORMS[::5], ids=form_name)
def test_many_rows(form: dict[str, Any]) -> None:
    case = make_case(ids=ids_with_rows(*BOTH_ROADS), **form)
    check(case, make_case(ids=case["ids"], seed=1)["x"])


@pytest.mark.parametrize("weights_dtype", (torch.float32, torch.float64, torch.bfloat16), ids=str)
def test_gradient_of_the_weights_has_their_dtype(weights_dtype: torch.dtype) -> None:
    case = make_case(dtype=torch.bfloat16, weights_dtype=weights_dtype)
    check(case, make_case(seed=1, dtype=torch.bfloat16)["x"])


@pytest.mark.parametrize("num_tokens, num_local", ((0, 4), (5, 0)))
def test_nothing_to_compute(num_tokens: int, num_local: int) -> None:
    case = make_case(num_tokens=num_tokens, num_local=num_local, num_experts=4)
    grads = case.backward(torch.ones_like(case["x"]))
    assert [one.shape for one in grads] == [case[name].shape for name in DIFFERENTIABLE]
    assert not any(bool(one.any()) for one in grads)


def test_experts_that_were_not_hit_get_zeros() -> None:
    case = make_case(ids=ids_with_rows(70, 0, 3, 0))
    for one in case.backward(torch.ones_like(case["x"]))[2:]:
        assert not bool(one[[1, 3]].any())
        assert bool(one[0].any()) and bool(one[2].any())


@pytest.mark.parametrize("weight_on", ("output", "input"))
def test_poison_stays_in_the_gradients_of_its_token(weight_on: str) -> None:
    case = make_case(ids=ids_with_rows(*BOTH_ROADS), weight_on=weight_on)
    grad = torch.ones_like(case["x"])
    want = case.backward(grad)
    x = case["x"].clone()
    x[2] = torch.nan
    have = case.having(x=x).backward(grad)
    clean = [token for token in range(len(x)) if token != 2]
    assert_same_bits([one[clean] for one in have[:2]], [one[clean] for one in want[:2]])
    assert bool(have[0][2].isnan().all())
    others = [expert for expert in range(4) if expert != case["ids"][2, 0]]
    assert_same_bits([one[others] for one in have[2:]], [one[others] for one in want[2:]])


@pytest.mark.parametrize("weight_on", ("output", "input"))
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_one_gradient_alone(name: str, weight_on: str) -> None:
    """The op returns nothing else, with the bits that it has among all; autograd asks for exactly this one."""
    case = make_case(ids=ids_with_rows(*BOTH_ROADS), weight_on=weight_on)
    grad = make_case(ids=case["ids"], seed=1)["x"]
    index = DIFFERENTIABLE.index(name)
    want = case.backward(grad)[index]
    assert_same_bits(case.backward(grad, [index == other for other in range(6)]), [want])

    leaves = case.leaves([name])
    asked: list[list[bool]] = []

    class Asked(Watch):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.perseus.experts_backward.default:
                asked.append(args[1 + len(NAMES)])
            return super().__torch_dispatch__(func, types, args, kwargs)

    with Asked():
        leaves.run().backward(grad)
    assert asked == [[index == other for other in range(6)]]
    assert_same_bits(leaves[name].grad, want)
    assert all(leaves[other].grad is None for other in DIFFERENTIABLE if other != name)


@pytest.mark.parametrize("weight_layout", ("out_in", "in_out"))
def test_frozen_experts_cost_no_weight_gradient(weight_layout: str) -> None:
    """In float64 every product is a GEMM: per expert hit, the gradients of gate_up and down are one each."""
    case = make_case(ids=ids_with_rows(5, 3, 0, 4), dtype=torch.float64, weight_layout=weight_layout)
    grad = torch.ones_like(case["x"])
    shapes = {}
    for frozen in (False, True):
        with Watch() as watch:
            case.backward(grad, [True, True, *[not frozen] * 4])
        shapes[frozen] = watch.gemm_shapes
    weight_shapes = [tuple(case["gate_up"].shape[1:]), tuple(case["down"].shape[1:])]
    assert sorted(shapes[False]) == sorted(shapes[True] + 3 * weight_shapes)
    assert not set(weight_shapes) & set(shapes[True])


def test_frozen_everything_computes_nothing() -> None:
    case = make_case(dtype=torch.float64)
    assert case.backward(torch.ones_like(case["x"]), [False] * 6) == []
    assert not case.run().requires_grad


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_second_derivative(name: str) -> None:
    leaves = make_case().leaves([name])
    (grad,) = torch.autograd.grad(leaves.run().square().sum(), leaves.required(), create_graph=True)
    with pytest.raises(UnsupportedMoE) as caught:
        grad.sum().backward()
    assert str(caught.value) == (
        "perseus::experts can be differentiated once, got a request for a second derivative; "
        "do not use the perseus backend where gradients are differentiated again"
    )
