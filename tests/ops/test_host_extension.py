"""Do the host loops of _C give the same for every instruction set, width and row count? And do they refuse bad values?

Axes: T tokens, K choices per token, E experts, R routed rows, I and O input and output features, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import ACTIVATIONS, assert_near, assert_same_bits
from torch import Tensor

from perseus_compile import _C, reference
from perseus_compile.lower import FEW_ROWS_ACTIVATIONS
from perseus_compile.segments import sort_by_expert

SETS = _C.instruction_sets()
DTYPES = (torch.float32, torch.bfloat16)
# Rows of each expert: every row count of a tile (1 to 8), sums of tiles, and none.
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 0, 9, 17)
# Whole vectors of every instruction set, one less, one more, and fewer elements than one vector holds.
WIDTHS = (1, 3, 31, 32, 33, 128, 291)


def host_experts(dtype: torch.dtype, instruction_set: str, **changes: Any) -> _C.CpuExperts:
    settings = {
        "dtype": str(dtype).removeprefix("torch."),
        "activation": "silu",
        "interleaved": False,
        "alpha": 0.0,
        "limit": 0.0,
        "first_expert": 0,
        "num_local": len(ROWS),
        "max_rows": 100,
    }
    return _C.CpuExperts(**{**settings, **changes}, instruction_set=instruction_set)


def run_linear(experts: _C.CpuExperts, rows_RI: Tensor, weight_EOI: Tensor, num_threads: int = 1) -> Tensor:
    offsets = torch.tensor((0, *ROWS)).cumsum(0)
    out_RO = torch.full((int(offsets[-1]), weight_EOI.shape[1]), torch.nan, dtype=rows_RI.dtype)
    experts.linear(
        rows=rows_RI.data_ptr(),
        row_index=0,
        offsets=offsets.data_ptr(),
        weight=weight_EOI.data_ptr(),
        strides=weight_EOI.stride(),
        num_outs=weight_EOI.shape[1],
        depth=weight_EOI.shape[2],
        out=out_RO.data_ptr(),
        num_threads=num_threads,
    )
    return out_RO


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def test_the_best_set_comes_first_and_the_plainest_last() -> None:
    assert SETS[-1] == "baseline" and len(set(SETS)) == len(SETS)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("contiguous_along", ("inputs", "outputs"))
@pytest.mark.parametrize("depth", WIDTHS)
def test_linear(depth: int, contiguous_along: str, dtype: torch.dtype, instruction_set: str) -> None:
    num_outs = WIDTHS[-1 - WIDTHS.index(depth)]
    rows_RI = random(sum(ROWS), depth, dtype=dtype)
    weight_EOI = (random(len(ROWS), num_outs, depth, dtype=dtype).float() / depth**0.5).to(dtype)
    if contiguous_along == "outputs":
        weight_EOI = weight_EOI.transpose(1, 2).contiguous().transpose(1, 2)
    experts = host_experts(dtype, instruction_set)
    out_RO = run_linear(experts, rows_RI, weight_EOI)
    expert_R = torch.arange(len(ROWS)).repeat_interleave(torch.tensor(ROWS))
    assert_near(out_RO, torch.einsum("ri,roi->ro", rows_RI.double(), weight_EOI.double()[expert_R]))
    assert_same_bits(run_linear(experts, rows_RI, weight_EOI, num_threads=3), out_RO)


@pytest.mark.parametrize("instruction_set", SETS)
def test_linear_leaves_experts_with_more_rows_alone(instruction_set: str) -> None:
    out_RO = run_linear(
        host_experts(torch.float32, instruction_set, max_rows=8),
        random(sum(ROWS), 5, dtype=torch.float32),
        random(len(ROWS), 6, 5, dtype=torch.float32),
    )
    written_R = torch.tensor([rows <= 8 for rows in ROWS]).repeat_interleave(torch.tensor(ROWS))
    assert torch.equal(out_RO.isfinite().all(1), written_R)
    assert torch.equal(out_RO.isnan().all(1), ~written_R)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("activation", FEW_ROWS_ACTIVATIONS)
def test_activate(activation: str, interleaved: bool, dtype: torch.dtype, instruction_set: str) -> None:
    params = ACTIVATIONS[activation]
    alpha, limit = params or (0.0, 0.0)
    experts = host_experts(
        dtype, instruction_set, activation=activation, interleaved=interleaved, alpha=alpha, limit=limit
    )
    # The whole range of the exponential, and the infinities.
    gate_F = torch.cat([torch.linspace(-110, 110, 881), torch.linspace(-2, 2, 100)]).to(dtype)
    up_F = random(len(gate_F), dtype=dtype)
    hidden = torch.stack([gate_F, up_F], dim=-1).flatten() if interleaved else torch.cat([gate_F, up_F])
    active_F = torch.empty_like(gate_F)
    experts.activate(hidden=hidden.data_ptr(), active=active_F.data_ptr(), num_rows=1, width=len(gate_F), num_threads=1)
    exact_F = reference.activate(gate_F.double(), up_F.double(), activation, params)
    torch.testing.assert_close(active_F.double(), exact_F, rtol=4e-3 if dtype == torch.bfloat16 else 1e-5, atol=4e-7)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("activation", FEW_ROWS_ACTIVATIONS)
def test_activate_keeps_a_nan(activation: str, instruction_set: str) -> None:
    alpha, limit = ACTIVATIONS[activation] or (0.0, 0.0)
    experts = host_experts(torch.float32, instruction_set, activation=activation, alpha=alpha, limit=limit)
    hidden = torch.tensor([torch.nan, 1.0, 1.0, 1.0, torch.nan, 1.0])
    active = torch.empty(3)
    experts.activate(hidden=hidden.data_ptr(), active=active.data_ptr(), num_rows=1, width=3, num_threads=1)
    assert active.isnan().tolist() == [True, True, False]


def run_combine(experts: _C.CpuExperts, rows_RD: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> Tensor:
    out_TD = torch.empty(slots_TK.shape[0], rows_RD.shape[1], dtype=rows_RD.dtype)
    experts.combine(
        rows=rows_RD.data_ptr(),
        slots=slots_TK.data_ptr(),
        weights=weights_TK.data_ptr(),
        weights_are_float32=weights_TK.dtype == torch.float32,
        out=out_TD.data_ptr(),
        num_tokens=slots_TK.shape[0],
        num_choices=slots_TK.shape[1],
        width=rows_RD.shape[1],
        num_threads=2,
    )
    return out_TD


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype, weights_dtype", ((DTYPES[0],) * 2, (DTYPES[1],) * 2, DTYPES[::-1]), ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_combine(width: int, dtype: torch.dtype, weights_dtype: torch.dtype, instruction_set: str) -> None:
    rows_RD = random(50, width, dtype=dtype)
    rows_RD[7] = torch.nan
    slots_TK = torch.randint(8, 50, (40, 3), generator=torch.Generator().manual_seed(0))
    slots_TK[::3, 1] = -1
    slots_TK[4, 2] = 7
    weights_TK = random(40, 3, dtype=weights_dtype)
    weights_TK[slots_TK == -1] = torch.nan
    out_TD = run_combine(host_experts(dtype, instruction_set), rows_RD, slots_TK, weights_TK)
    terms_TKD = rows_RD.double()[slots_TK] * weights_TK.double()[..., None]
    assert_near(out_TD, torch.where(slots_TK[..., None] == -1, 0.0, terms_TKD).sum(1))


@pytest.mark.parametrize("instruction_set", SETS)
def test_bfloat16_is_rounded_as_torch_rounds_it(instruction_set: str) -> None:
    """Sums of two bfloat16 are exact in float32: ties, overflow to infinity and NaN included."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, (2, 70_000), generator=generator).to(torch.int16)
    rows_RD = bits.view(torch.bfloat16)
    out_TD = run_combine(
        host_experts(torch.bfloat16, instruction_set), rows_RD, torch.tensor([[0, 1]]), torch.ones(1, 2)
    )
    want_D = (rows_RD[0].float() + rows_RD[1].float()).bfloat16()
    assert torch.equal(out_TD[0].isnan(), want_D.isnan())
    number = ~want_D.isnan()
    assert_same_bits(out_TD[0][number], want_D[number])
    assert (want_D[number].float() != rows_RD[0][number].float() + rows_RD[1][number].float()).sum() > 1000


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_sort_by_expert(data: st.DataObject) -> None:
    num_tokens, num_choices = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 4))
    first_expert, num_local = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 4))
    dtype = data.draw(st.sampled_from((torch.int32, torch.int64)))
    size = num_tokens * num_choices
    extremes = st.sampled_from((torch.iinfo(dtype).min, torch.iinfo(dtype).max))
    values = data.draw(st.lists(st.integers(-2, 12) | extremes, min_size=size, max_size=size))
    ids_TK = torch.tensor(values, dtype=dtype).view(num_tokens, num_choices)

    segments = sort_by_expert(ids_TK, first_expert, num_local)
    choices = [
        [choice for choice, value in enumerate(values) if value == first_expert + expert] for expert in range(num_local)
    ]
    order = [choice for one in choices for choice in one]
    assert segments.choices_R.tolist() == order
    assert segments.tokens_R.tolist() == [choice // num_choices for choice in order]
    assert segments.offsets.diff().tolist() == [len(one) for one in choices]
    assert segments.slots_TK.flatten().tolist() == [order.index(c) if c in order else -1 for c in range(size)]
    assert [expert for expert, _, _ in segments.hit] == [expert for expert in range(num_local) if choices[expert]]
    assert [(first, end) for _, first, end in segments.hit] == [
        (int(segments.offsets[expert]), int(segments.offsets[expert + 1])) for expert, _, _ in segments.hit
    ]
    assert segments.experts_R.tolist() == [expert for expert in range(num_local) for _ in choices[expert]]


def _linear_with_strides() -> None:
    run_linear(host_experts(torch.float32, ""), torch.ones(sum(ROWS), 2), torch.ones(len(ROWS), 4, 4)[:, ::2, ::2])


def _sort_bytes() -> None:
    _C.sort_by_expert(ids=0, id_bytes=2, num_tokens=0, num_choices=0, first_expert=0, num_local=0, table=0)


@pytest.mark.parametrize(
    "call, expected",
    (
        (
            lambda: host_experts(torch.float16, ""),
            "dtype must be float32 or bfloat16, got float16; use a GEMM per expert for other dtypes",
        ),
        (
            lambda: host_experts(torch.float32, "", activation="relu"),
            "activation must be silu, gelu, gelu_tanh or clamped_swiglu, got relu; pass one of these words",
        ),
        (
            lambda: host_experts(torch.float32, "mmx"),
            f"instruction_set must be one that this CPU runs ({', '.join(SETS)}), got mmx; pass '' for the best one",
        ),
        (
            _linear_with_strides,
            "a weight must be contiguous along its input or output features, got strides 8 (output) and 2 (input); "
            "use a GEMM per expert",
        ),
        (_sort_bytes, "ids must be int32 or int64, got 2 bytes per id; cast them"),
    ),
    ids=("dtype", "activation", "instruction_set", "strides", "id_bytes"),
)
def test_bad_values(call: Callable[[], Any], expected: str) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == expected
