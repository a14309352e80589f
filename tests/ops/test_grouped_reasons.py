"""For which tensors does the plain path not run, and what does it say? The numbers are in test_grouped.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from perseus_compile import grouped
from perseus_compile.facts import ExpertsSpec

GATE_UP = (5, 48, 16)  # E, 2F, D


def reason(
    gate_up: tuple[int, ...] | Tensor = GATE_UP,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    weight_layout: Any = "out_in",
    fake: bool = False,
) -> str | None:
    """Of a call with this gate_up, given as tensor or as [E, 2F, D] to be made contiguous in ``weight_layout``."""
    num_local, hidden, width = gate_up if isinstance(gate_up, tuple) else gate_up.shape
    down_shape = (num_local, width, hidden // 2)
    if weight_layout == "in_out":
        gate_up, down_shape = (num_local, width, hidden), (num_local, hidden // 2, width)
    if isinstance(gate_up, tuple):
        gate_up = torch.zeros(gate_up, device=device, dtype=dtype)
    tensors = [torch.zeros(3, width, device=device, dtype=dtype), gate_up]
    tensors.append(torch.zeros(down_shape, device=device, dtype=dtype))
    spec = ExpertsSpec(
        weight_layout=weight_layout, gate_layout="concatenated", activation="silu", num_experts=num_local
    )
    if not fake:
        return grouped.unsupported_reason(*tensors, spec)
    with FakeTensorMode() as mode:
        return grouped.unsupported_reason(*(mode.from_tensor(tensor) for tensor in tensors), spec)


@pytest.mark.parametrize("weight_layout", ("out_in", "in_out"))
def test_widths_and_dtypes(weight_layout: str) -> None:
    assert reason(weight_layout=weight_layout) is None
    assert reason((0, 8, 4), weight_layout=weight_layout) is None
    assert reason((5, 48, 18), weight_layout=weight_layout) == "D must be a positive multiple of 4 in float32, got D=18"
    assert reason((5, 40, 16), dtype=torch.bfloat16, weight_layout=weight_layout) == (
        "F must be a positive multiple of 8 in bfloat16, got F=20"
    )
    assert reason(dtype=torch.float64, weight_layout=weight_layout) == (
        "a grouped GEMM on 'cpu' without a host wait needs dtype float32, bfloat16, float16, got torch.float64"
    )


STRIDES = (
    ((768, 16, 1), None),
    ((768, 1, 48), None),
    ((0, 16, 1), None),
    ((1536, 32, 2), "gate_up must be dense along one of its two last axes, got strides (1536, 32, 2)"),
    ((816, 17, 1), "gate_up must have strides that are multiples of 4 elements, got (816, 17, 1)"),
    ((770, 16, 1), "gate_up must have strides that are multiples of 4 elements, got (770, 16, 1)"),
)


@pytest.mark.parametrize("fake", (False, True), ids=("real", "fake"))
@pytest.mark.parametrize("strides, expected", STRIDES)
def test_strides(strides: tuple[int, ...], expected: str | None, fake: bool) -> None:
    assert reason(torch.zeros(8000).as_strided(GATE_UP, strides), fake=fake) == expected


def test_torch_refuses_what_the_reason_names() -> None:
    """The rule is torch's: its own error for one of the cases above."""
    ends = torch.tensor([1, 1, 2, 2, 3], dtype=torch.int32)
    weight = torch.zeros(8000).as_strided(GATE_UP, (816, 17, 1))
    with pytest.raises(RuntimeError, match="strides should be multiple of 16 bytes"):
        torch.nn.functional.grouped_mm(torch.zeros(3, 16), weight.transpose(1, 2), offs=ends)


@pytest.mark.gpu
def test_cuda() -> None:
    on_cuda: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    assert reason(**on_cuda) is None
    assert reason(device="cuda") == (
        "a grouped GEMM on 'cuda' without a host wait needs dtype bfloat16, got torch.float32"
    )
    assert reason((1024, 48, 16), **on_cuda) == "a grouped GEMM takes at most 1023 local experts, got 1024"
    values = torch.zeros(5 * 48 * 16 + 4, **on_cuda)
    for fake in (False, True):
        assert reason(values[4:].view(GATE_UP), fake=fake, **on_cuda) == (
            "gate_up must start at a multiple of 16 bytes, got an address 8 bytes above one"
        )
