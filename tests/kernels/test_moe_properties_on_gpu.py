"""Property tests of ``perseus::experts`` on a GPU: any shape, skew, layout and poison, through the op a user calls."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_case import TOLERANCE, Case, make_case, reference, relative_error
from torch import Tensor

from perseus_compile import fused_experts

pytestmark = pytest.mark.gpu

_FORMS = (
    ("out_in", "concatenated", "silu"),
    ("out_in", "interleaved", "gelu_tanh"),
    ("in_out", "concatenated", "gelu"),
    ("in_out", "interleaved", "clamped_swiglu"),
)
# Poisons the allocator's free memory, so that a workspace starts as NaN.
_POISON_BYTES = 64 * 2**20


# The relative error of a handful of elements scatters around that of many.
_FEW_ELEMENTS = 1024


def tolerance(case: Case) -> float:
    return TOLERANCE if case.x.numel() >= _FEW_ELEMENTS else 2 * TOLERANCE


def call(case: Case) -> Tensor:
    spec = dataclasses.asdict(case.spec)
    return torch.ops.perseus.experts(*case.args, **spec)


def _skewed(ids: Tensor, skew: str, num_experts: int) -> Tensor:
    if skew == "one expert":
        return torch.zeros_like(ids)
    if skew == "few experts":
        return ids % max(1, num_experts // 7)
    if skew == "duplicates":
        return ids[:, :1].expand_as(ids).contiguous()
    if skew == "outside":  # before, inside and past the local experts; negative; the largest number
        outside = torch.tensor([-1, torch.iinfo(ids.dtype).min, torch.iinfo(ids.dtype).max], device=ids.device)
        return torch.where(ids % 3 == 0, outside[ids % outside.numel()].to(ids.dtype), ids)
    return ids


def _padded_rows(x: Tensor, padding: int) -> Tensor:
    return torch.cat([x, x.new_full((x.shape[0], padding), torch.nan)], dim=1)[:, : x.shape[1]]


@st.composite
def cases(draw: Any) -> Case:
    num_experts = draw(st.integers(1, 200) | st.sampled_from((256, 513, 1024)))
    top_k = draw(st.integers(1, min(num_experts, 32)))
    num_tokens = draw(st.integers(1, 40) | st.integers(41, 700) | st.sampled_from((1024, 1025)))
    weight_layout, gate_layout, activation = draw(st.sampled_from(_FORMS))
    local = draw(st.integers(1, num_experts))
    widest = 40 if num_experts > 200 else 150
    case = make_case(
        8 * draw(st.integers(1, widest)),
        8 * draw(st.integers(1, widest)),
        num_experts,
        top_k,
        num_tokens,
        seed=draw(st.integers(0, 1000)),
        bias=draw(st.booleans()),
        id_dtype=draw(st.sampled_from((torch.int32, torch.int64))),
        weight_dtype=draw(st.sampled_from((torch.float32, torch.bfloat16))),
        weight_layout=weight_layout,
        gate_layout=gate_layout,
        activation=activation,
        weight_on=draw(st.sampled_from(("output", "input"))),
        expert_offset=draw(st.integers(0, num_experts - local)),
        local_experts=local,
    )
    skew = draw(st.sampled_from(("even", "one expert", "few experts", "duplicates", "outside")))
    padding = draw(st.sampled_from((0, 0, 8, 64)))
    return dataclasses.replace(case, x=_padded_rows(case.x, padding), ids=_skewed(case.ids, skew, num_experts))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(case=cases())
def test_any_call_means_what_float32_says(case: Case) -> None:
    assert fused_experts.why_not(*case.args, case.spec) is None  # type: ignore[arg-type]
    expected = reference(case)
    torch.full((_POISON_BYTES,), 0xFF, dtype=torch.uint8, device="cuda")  # freed at once
    actual = call(case)
    assert actual.shape == case.x.shape and actual.is_contiguous()
    assert relative_error(actual, expected) < tolerance(case)
    assert torch.equal(actual, call(case)), "two runs of the same call differ"


@settings(max_examples=40, deadline=None, derandomize=True)
@given(case=cases(), value=st.sampled_from((torch.nan, torch.inf)), data=st.data())
def test_a_poisoned_token_stays_in_its_row(case: Case, value: float, data: st.DataObject) -> None:
    clean = call(case)
    poisoned = data.draw(st.integers(0, case.x.shape[0] - 1))
    x = case.x.clone()
    x[poisoned] = value
    actual = call(dataclasses.replace(case, x=x))
    others = torch.arange(x.shape[0], device="cuda") != poisoned
    assert torch.equal(actual[others], clean[others])
    if reference(case)[poisoned].any():  # some local expert was chosen
        assert not actual[poisoned].isfinite().all()


@pytest.mark.parametrize(("model_width", "top_k", "num_experts"), ((2880, 16, 128), (3584, 16, 896), (3072, 11, 60)))
def test_widths_and_choices_that_others_refuse(model_width: int, top_k: int, num_experts: int) -> None:
    """Neither is on a list: DeepEP's users asked for these."""
    case = make_case(model_width, 64, num_experts, top_k, 70)
    assert relative_error(call(case), reference(case)) < TOLERANCE
