"""Does perseus::experts compute what its reference says, for every form, shape and road, and nothing else?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from op_cases import (
    FORMS,
    TOLERANCE,
    Case,
    Watch,
    assert_near,
    assert_same_bits,
    few_rows,
    form_name,
    has_few_rows,
    ids_with_rows,
    make_case,
)
from torch import Tensor

DTYPES = tuple(TOLERANCE)
ROADS = {"few rows": (9, 3, 0, 2), "GEMM": (70, 80, 0, 70), "both": (70, 3, 0, 9)}  # rows of each expert


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def check(case: Case) -> Tensor:
    """The op against the reference in float64; returns the op's result."""
    have = case.run()
    x = case["x"]
    assert have.dtype == x.dtype and have.shape == x.shape and have.is_contiguous()
    assert have.numel() == 0 or have.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert_near(have, case.exact().reference())
    return have


@pytest.mark.parametrize("form", FORMS, ids=form_name)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_every_form(form: dict[str, Any], dtype: torch.dtype) -> None:
    check(make_case(dtype=dtype, num_local=3, num_experts=6, expert_offset=2, **form))


@pytest.mark.parametrize("form", [form for form in FORMS if has_few_rows(form)][::5], ids=form_name)
@pytest.mark.parametrize("rows", ROADS.values(), ids=ROADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_both_roads(form: dict[str, Any], rows: tuple[int, ...], dtype: torch.dtype) -> None:
    case = make_case(ids=ids_with_rows(*rows), dtype=dtype, **form)
    with Watch() as watch:
        case.run()
    assert len(watch.gemm_shapes) == 2 * sum(count > few_rows(dtype) for count in rows)
    check(case)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=dtype_name)
@pytest.mark.parametrize("above", (0, 1))
def test_at_the_threshold(dtype: torch.dtype, above: int) -> None:
    case = make_case(ids=ids_with_rows(few_rows(dtype) + above, 1), num_local=2, dtype=dtype)
    with Watch() as watch:
        case.run()
    assert len(watch.gemm_shapes) == 2 * above
    check(case)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=dtype_name)
@pytest.mark.parametrize("weight_layout", ("out_in", "in_out"))
@pytest.mark.parametrize("width, inner", ((1, 1), (17, 33), (96, 70), (300, 131), (5, 0), (0, 5)))
def test_widths_off_the_tile_sizes(width: int, inner: int, weight_layout: str, dtype: torch.dtype) -> None:
    check(make_case(num_tokens=5, width=width, inner=inner, weight_layout=weight_layout, dtype=dtype))


# Beside ids of and around the experts, the values at which arithmetic with ids of each dtype may overflow.
EXTREMES = {dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max) for dtype in (torch.int64, torch.int32)}


@st.composite
def calls(draw: st.DrawFn) -> Case:
    num_local, expert_offset, above = draw(st.integers(0, 5)), draw(st.integers(0, 2)), draw(st.integers(0, 2))
    num_experts = expert_offset + num_local + above
    num_tokens, num_choices = draw(st.integers(0, 8)), draw(st.integers(0, min(4, num_experts)))
    ids_dtype = draw(st.sampled_from(tuple(EXTREMES)))
    one_id = st.one_of(st.integers(-1, num_experts), st.sampled_from(EXTREMES[ids_dtype]))
    ids = draw(st.lists(one_id, min_size=num_tokens * num_choices, max_size=num_tokens * num_choices))
    dtype = draw(st.sampled_from(DTYPES))
    return make_case(
        ids=torch.tensor(ids, dtype=ids_dtype).view(num_tokens, num_choices),
        num_local=num_local,
        num_experts=num_experts,
        expert_offset=expert_offset,
        width=draw(st.integers(1, 20)),
        inner=draw(st.integers(1, 20)),
        dtype=dtype,
        weights_dtype=draw(st.sampled_from((dtype, torch.float32, torch.float64, torch.bfloat16))),
        seed=draw(st.integers(0, 1000)),
        **draw(st.sampled_from(FORMS)),
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=calls())
@example(case=make_case(num_tokens=0))
@example(case=make_case(num_local=0, num_experts=3))
@example(case=make_case(num_tokens=3, num_choices=0))
def test_any_call(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("weight_on", ("output", "input"))
def test_duplicated_ids_add(dtype: torch.dtype, weight_on: str) -> None:
    ids = torch.tensor([[1, 1, 1], [0, 2, 0]])
    have = check(make_case(ids=ids, num_local=3, dtype=dtype, weight_on=weight_on))
    assert bool((have != 0).all())


def test_foreign_ids_are_skipped() -> None:
    """Whatever their weights: the token gets exactly the rest."""
    ids = torch.tensor([[2, 9, -1], [0, 1, 5]])
    case = make_case(ids=ids, num_local=2, num_experts=9, expert_offset=2)
    case["weights"][0, 1:] = torch.nan
    case["weights"][1] = torch.inf
    have = case.run()
    alone = case.having(ids=ids[:1, :1], weights=case["weights"][:1, :1], x=case["x"][:1])
    assert_same_bits(have[:1], alone.run())
    assert_same_bits(have[1], torch.zeros_like(have[1]))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=dtype_name)
def test_sum_is_in_float32_and_in_choice_order(dtype: torch.dtype) -> None:
    """An expert returns its bias here: (2**24 + 1) - 2**24 is 0 in float32, and (2**24 - 2**24) + 1 is 1."""
    case = make_case(ids=torch.tensor([[0, 1, 2], [0, 2, 1]]), num_local=3, dtype=dtype, weights_dtype=torch.float32)
    case["down"].zero_()
    case["down_bias"].fill_(1.0)
    weights = torch.tensor([[2.0**24, 1.0, -(2.0**24)], [2.0**24, -(2.0**24), 1.0]])
    assert case.having(weights=weights).run()[:, 0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("form", FORMS[::3], ids=form_name)
@pytest.mark.parametrize("rows", ROADS.values(), ids=ROADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_poison_stays_in_its_token(dtype: torch.dtype, rows: tuple[int, ...], form: dict[str, Any]) -> None:
    ids = ids_with_rows(*rows)
    case = make_case(ids=ids, dtype=dtype, **form)
    want = case.run()
    x, weights = case["x"].clone(), case["weights"].clone()
    x[2, 1] = torch.nan
    x[4] = torch.inf
    x[5, 0] = torch.inf
    weights[6] = torch.nan
    weights[8] = -torch.inf
    poisoned = case.having(x=x, weights=weights)
    have = poisoned.run()
    clean = [token for token in range(len(ids)) if token not in (2, 4, 5, 6, 8)]
    assert_same_bits(have[clean], want[clean])
    assert bool(have[[2, 4, 6]].isnan().all())
    # Infinities go where they go in the reference: a clamp, for one, takes them away. One that an infinite weight makes
    # of an output has its sign, which rounding may change where the output is nearly 0.
    want = poisoned.exact().on([5, 8]).reference()
    outputs = case.having(weights=torch.ones_like(weights)).exact().on([8]).reference()
    is_certain = torch.ones_like(want, dtype=torch.bool)
    is_certain[1] = (outputs[0].abs() > TOLERANCE[dtype]) | (case.numbers["weight_on"] == "input")
    assert is_certain[1].any()
    assert_near(have[[5, 8]][is_certain], want[is_certain])


def test_poison_of_an_expert_without_tokens_is_never_read() -> None:
    case = make_case(ids=ids_with_rows(3, 0, 70, 0))
    want = case.run()
    for name in ("gate_up", "gate_up_bias", "down", "down_bias"):
        case[name][[1, 3]] = torch.nan
    assert_same_bits(case.run(), want)


@pytest.mark.parametrize("rows", ROADS.values(), ids=ROADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_same_bits_from_run_to_run(dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    case = make_case(ids=ids_with_rows(*rows), width=64, inner=48, dtype=dtype)
    grad = torch.ones_like(case["x"])
    want = [case.run(), *case.backward(grad)]
    for _ in range(3):
        noise = torch.full((1000,), torch.nan)  # what fresh memory may hold next time
        del noise
        assert_same_bits([case.run(), *case.backward(grad)], want)


@pytest.mark.parametrize("weight_layout", ("out_in", "in_out"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=dtype_name)
def test_few_rows_do_not_depend_on_the_number_of_threads(dtype: torch.dtype, weight_layout: str) -> None:
    # Wide enough for more tasks than one, of which a thread takes at least 64 outputs.
    case = make_case(num_tokens=9, width=300, inner=300, dtype=dtype, weight_layout=weight_layout)
    num_threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(case.run())
    finally:
        torch.set_num_threads(num_threads)
    assert_same_bits(results[1:], [results[0]] * 2)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(-2, -1).contiguous().transpose(-2, -1)


def _strided(tensor: Tensor) -> Tensor:
    """Every other element of a storage whose rest must not be read."""
    rest = torch.nan if tensor.is_floating_point() else 10**6
    return torch.stack([tensor, torch.full_like(tensor, rest)], dim=-1).flatten(-2)[..., ::2]


def _some_experts(tensor: Tensor) -> Tensor:
    """Every other expert of a larger weight."""
    return torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=1).flatten(0, 1)[::2]


@pytest.mark.parametrize("weight_on", ("output", "input"))
@pytest.mark.parametrize("spread", (_transposed, _strided))
@pytest.mark.parametrize("rows", ROADS.values(), ids=ROADS)
def test_strides_of_the_token_tensors(rows: tuple[int, ...], spread: Any, weight_on: str) -> None:
    ids = torch.cat([ids_with_rows(*rows), ids_with_rows(*rows)], dim=1)
    case = make_case(ids=ids, weight_on=weight_on)
    odd = case.having(**{name: spread(case[name]) for name in ("x", "ids", "weights")})
    assert not any(odd[name].is_contiguous() for name in ("x", "ids", "weights"))
    grad = case.run()
    assert_same_bits(odd.run(), case.run())
    assert_same_bits(odd.backward(spread(grad)), case.backward(grad))


def test_one_row_for_every_token() -> None:
    """x is expanded: its token axis has stride 0."""
    case = make_case()
    row = case["x"][:1]
    assert_same_bits(case.having(x=row.expand(7, 10)).run(), case.having(x=row.repeat(7, 1)).run())


@pytest.mark.parametrize("spread", (_transposed, _strided, _some_experts))
@pytest.mark.parametrize("weight_layout", ("out_in", "in_out"))
@pytest.mark.parametrize("rows", (ROADS["few rows"], ROADS["both"]), ids=("few rows", "both"))
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_strides_of_the_weights(dtype: torch.dtype, rows: tuple[int, ...], weight_layout: str, spread: Any) -> None:
    case = make_case(ids=ids_with_rows(*rows), dtype=dtype, weight_layout=weight_layout)
    odd = case.having(**{name: spread(case[name]) for name in ("gate_up", "gate_up_bias", "down", "down_bias")})
    assert not odd["gate_up"].is_contiguous()
    check(odd)
    for have, want in zip(odd.backward(odd.run()), case.backward(case.run()), strict=True):
        assert have.is_contiguous()
        assert_near(have, want)


@pytest.mark.parametrize("weight_on", ("output", "input"))
@pytest.mark.parametrize("weight_layout", ("out_in", "in_out"))
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_no_weight_is_copied(dtype: torch.dtype, weight_layout: str, weight_on: str) -> None:
    rows = (70, 3, *[0] * 14)
    case = make_case(
        ids=ids_with_rows(*rows),
        num_local=16,
        width=32,
        inner=16,
        dtype=dtype,
        weight_layout=weight_layout,
        weight_on=weight_on,
    )
    with Watch(case["gate_up"], case["down"]) as watch:
        out = case.run()
        case.backward(out, [True, True, False, True, False, True])
    assert "mm" in watch.readers  # the watch sees the inside of the ops
    assert watch.readers <= {"transpose", "select", "t", "mm"}
    assert 0 < watch.largest_result < case["down"].numel()


@pytest.mark.parametrize("requires_grad", (False, True))
def test_inputs_are_left_alone(requires_grad: bool) -> None:
    case = make_case(ids=ids_with_rows(*ROADS["both"]), activation="clamped_swiglu", weight_on="input")
    before = [tensor.clone() for tensor in case.tensors if tensor is not None]
    called = case.leaves() if requires_grad else case
    out = called.run()
    assert out.requires_grad is requires_grad
    if requires_grad:
        out.sum().backward()
    assert_same_bits([tensor.detach() for tensor in called.tensors if tensor is not None], before)
