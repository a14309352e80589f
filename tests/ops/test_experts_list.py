"""``perseus::experts_list``: what ``perseus::experts`` gives for the stacked weights, values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_cases import FORMS, TOLERANCE, Case, Watch, assert_near, form_name, make_case
from torch import Tensor

from perseus_compile import experts_list, listed
from perseus_compile.errors import UnsupportedMoE

OPS = torch.ops.perseus
ALL = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


Lists = list[list[Tensor]]


def lists_of(case: Case, *, apart: bool) -> Lists:
    """The weights of ``case``, one tensor per expert; ``apart``: gates and up halves are tensors of their own."""
    output_axis = 2 if case.numbers["weight_layout"] == "in_out" else 1

    def unstacked(stack: Tensor | None, axis: int | None) -> list[Tensor]:
        pieces = [] if stack is None else stack.chunk(2, dim=axis) if apart and axis is not None else [stack]
        return [one.detach().clone() for piece in pieces for one in piece]

    gate_up, gate_up_bias, down, down_bias = case.tensors[3:]
    return [
        unstacked(gate_up, output_axis),
        unstacked(gate_up_bias, 1),
        unstacked(down, None),
        unstacked(down_bias, None),
    ]


def call(case: Case, lists: Lists) -> Tensor:
    return OPS.experts_list(*case.tensors[:3], *lists, **case.numbers)


def grads_of(case: Case, lists: Lists, grad: Tensor) -> list[Tensor]:
    leaves = [case["x"], case["weights"], *(one for each in lists for one in each)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    return list(torch.autograd.grad(call(case, lists), leaves, grad))


def as_lists(grads: list[Tensor | None], case: Case, *, apart: bool) -> list[Tensor]:
    """Gradients of the tensors of ``perseus::experts`` as those of ``perseus::experts_list``."""
    stacks = Case((case["x"], case["ids"], case["weights"], *grads[2:]), case.numbers)
    x, weights = grads[:2]
    assert x is not None and weights is not None
    return [x, weights, *(one for each in lists_of(stacks, apart=apart) for one in each)]


APART_FORMS = [(form, False) for form in FORMS] + [
    (form, True) for form in FORMS if form["gate_layout"] == "concatenated"
]


@pytest.mark.parametrize(
    ("form", "apart"), APART_FORMS, ids=lambda value: form_name(value) if isinstance(value, dict) else str(value)
)
def test_it_means_what_experts_means(form: dict[str, Any], apart: bool) -> None:
    """Ids outside the local experts, and duplicated ids, are among the choices."""
    case = make_case(**form, dtype=torch.float64, num_experts=9, expert_offset=3, num_tokens=20)
    lists = lists_of(case, apart=apart)
    torch.testing.assert_close(call(case, lists), case.reference(), rtol=1e-12, atol=1e-12)
    leaves = case.leaves()
    grad = torch.randn(case["x"].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = iter(torch.autograd.grad(leaves.reference(), leaves.required(), grad))
    by_name = [next(expected) if tensor is not None else None for i, tensor in enumerate(leaves.tensors) if i != 1]
    for actual, wanted in zip(grads_of(case, lists, grad), as_lists(by_name, case, apart=apart), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_dtype(dtype: torch.dtype) -> None:
    case = make_case(dtype=dtype, weights_dtype=torch.float32, num_tokens=40)
    assert_near(call(case, lists_of(case, apart=True)), case.exact().reference(), dtype)


@pytest.mark.parametrize("num_tokens", (0, 1))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_few_tokens(num_tokens: int, dtype: torch.dtype) -> None:
    case = make_case(num_tokens=num_tokens, dtype=dtype)
    lists = lists_of(case, apart=False)
    assert_near(call(case, lists), case.exact().reference(), dtype)
    grads = grads_of(case, lists, torch.ones_like(case["x"]))
    assert [grad.dtype for grad in grads] == [dtype] * len(grads)


def test_experts_that_share_a_tensor_have_gradients_of_their_own() -> None:
    case = make_case(dtype=torch.float64)
    lists = lists_of(case, apart=False)
    lists[2][1] = lists[2][0]
    stacked = case.having(down=torch.stack(lists[2])).leaves()
    shared, *_ = torch.autograd.grad(
        call(case, [[one.requires_grad_() for one in each] for each in lists]).sum(), lists[2][:1]
    )
    (down,) = torch.autograd.grad(stacked.reference().sum(), [stacked["down"]])
    torch.testing.assert_close(shared, down[0] + down[1])


def test_what_is_frozen_has_no_gradient() -> None:
    case = make_case()
    lists = lists_of(case, apart=True)
    lists[2][1].requires_grad_()
    call(case, lists).sum().backward()
    assert lists[2][1].grad is not None
    assert [one.grad for each in lists for one in each if one is not lists[2][1]] == [None] * 23


@pytest.mark.parametrize("apart", (False, True))
def test_no_weight_is_copied(apart: bool) -> None:
    case = make_case(num_tokens=2, width=64, inner=32)
    lists = lists_of(case, apart=apart)
    with Watch(*(one for each in lists for one in each)) as watch, torch.no_grad():
        call(case, lists)
    assert watch.largest_result <= 4 * 64  # routed rows times the widest of them


@pytest.mark.parametrize("apart", (False, True))
@pytest.mark.parametrize("layout", ("out_in", "in_out"))
def test_stacks_for_a_captured_graph(layout: str, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a CUDA graph capture the op stacks its lists; here the capture is pretended."""
    case = make_case(weight_layout=layout, width=16, inner=8)
    grad = torch.randn_like(case["x"])
    wanted = [call(case, lists_of(case, apart=apart)), *grads_of(case, lists_of(case, apart=apart), grad)]
    monkeypatch.setattr(experts_list, "_is_captured", lambda tensor: True)
    monkeypatch.delattr(listed, "sort_rows")
    case = case.leaves(())
    actual = [call(case, lists_of(case, apart=apart)), *grads_of(case, lists_of(case, apart=apart), grad)]
    for one, other in zip(actual, wanted, strict=True):
        assert one.is_contiguous()
        assert_near(one, other)


def test_what_no_graph_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(width=10)
    monkeypatch.setattr(experts_list, "_is_captured", lambda tensor: True)
    with pytest.raises(UnsupportedMoE, match=r"captured in a CUDA graph only as grouped GEMMs: D must be .* got D=10"):
        call(case, lists_of(case, apart=False))


@pytest.mark.parametrize("grads", (False, True), ids=("no grad", "grad"))
@pytest.mark.parametrize("apart", (False, True))
def test_opcheck(apart: bool, grads: bool) -> None:
    case = make_case(num_experts=9, expert_offset=3, weight_layout="in_out")
    lists = [[one.requires_grad_(grads) for one in each] for each in lists_of(case, apart=apart)]
    case = case.leaves() if grads else case
    outcome = torch.library.opcheck(OPS.experts_list.default, (*case.tensors[:3], *lists), case.numbers, test_utils=ALL)
    assert outcome == dict.fromkeys(ALL, "SUCCESS")


def test_opcheck_of_the_derivative() -> None:
    case = make_case()
    lists = lists_of(case, apart=True)
    needs_grad = [True, False] + [index % 2 == 0 for index in range(24)]
    args = (torch.randn_like(case["x"]), *case.tensors[:3], *lists, needs_grad)
    outcome = torch.library.opcheck(OPS.experts_list_backward.default, args, case.numbers, test_utils=ALL)
    assert outcome == dict.fromkeys(ALL, "SUCCESS")


def test_it_can_be_differentiated_once() -> None:
    case = make_case().leaves()
    (grad,) = torch.autograd.grad(call(case, lists_of(case, apart=True)).sum(), [case["x"]], create_graph=True)
    with pytest.raises(UnsupportedMoE, match="perseus::experts_list can be differentiated once"):
        grad.sum().backward()


def first_of(lists: Lists, index: int) -> Lists:
    return [each[:1] if i == index else each for i, each in enumerate(lists)]


ERRORS = {
    "no experts": (lambda lists: [[], [], [], []], {}, "gate_up must hold one tensor per expert"),
    "lengths": (lambda lists: first_of(lists, 0), {}, "gate_up must hold one tensor per expert.* got 1 for 4 experts"),
    "biases": (lambda lists: first_of(lists, 3), {}, "down_bias must hold one tensor per expert"),
    "shapes": (
        lambda lists: [lists[0], lists[1], [*lists[2][:3], lists[2][3][:, :2]], lists[3]],
        {},
        r"all tensors of down must be alike, got \[10, 6\] float32 on cpu at 0 and \[10, 2\] float32 on cpu at 3",
    ),
    "dtypes": (
        lambda lists: [[lists[0][0].double(), *lists[0][1:]], *lists[1:]], {}, "all tensors of gate_up must be alike"
    ),
    "axes": (
        lambda lists: [lists[0], lists[1], [one[0] for one in lists[2]], lists[3]],
        {"weight_layout": "in_out"},
        "down must hold matrices, got tensors of 1 axes",
    ),
    "halves": (lambda lists: lists, {"gate_layout": "interleaved"}, "belong to gate_layout='concatenated'"),
    "width": (lambda lists: lists, {"weight_layout": "in_out"}, "must be .E, D, 2F. .in_out."),
}  # fmt: skip


@pytest.mark.parametrize(("change", "numbers", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(change: Any, numbers: dict[str, Any], message: str) -> None:
    case = make_case().having(**numbers)
    lists = lists_of(make_case(), apart=True)
    with pytest.raises(UnsupportedMoE, match=message):
        call(case, change(lists))


def test_the_number_of_rows() -> None:
    case = make_case()
    with pytest.raises(UnsupportedMoE, match="ids must have one row per token, T=7 as x has, got 6"):
        call(case.having(ids=case["ids"][1:]), lists_of(case, apart=False))
