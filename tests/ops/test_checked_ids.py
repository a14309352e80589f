"""perseus::checked_ids, and the option ``debug`` that uses it."""

from __future__ import annotations

import pytest
import torch
from spellings import BatchedMM, changed
from torch import Tensor

import perseus_compile
from perseus_compile import UnsupportedMoE

MESSAGE = (
    "expert ids must lie in [0, 4), got 1 of 6 outside, the first 7; look for what computes them, or leave option "
    "'debug' off to have them skipped"
)


def test_ids_in_range_come_back_as_a_copy() -> None:
    ids = torch.tensor([[0, 3], [2, 2]])
    checked = torch.ops.perseus.checked_ids(ids, 4)
    assert torch.equal(checked, ids) and checked.data_ptr() != ids.data_ptr()
    torch.library.opcheck(torch.ops.perseus.checked_ids.default, (ids, 4))
    assert torch.ops.perseus.checked_ids(ids[:0], 4).shape == (0, 2)


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_an_id_out_of_range_is_an_error(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedMoE) as error:
        torch.ops.perseus.checked_ids(torch.tensor([[0, 3], [2, 7], [1, 1]], dtype=dtype), 4)
    assert str(error.value) == MESSAGE
    with pytest.raises(UnsupportedMoE, match="the first -1"):
        torch.ops.perseus.checked_ids(torch.tensor([[0, -1]], dtype=dtype), 4)


def test_debug_checks_the_ids_of_experts_without_router() -> None:
    def forward(layer: BatchedMM, x: Tensor, ids: Tensor) -> Tensor:
        return layer.experts(x, ids, torch.ones(ids.shape))

    layer = changed(BatchedMM, forward=forward)()
    x, ids = torch.randn(3, 8), torch.tensor([[0, 3], [2, 1], [1, 1]])
    compiled = torch.compile(layer, backend=perseus_compile.perseus, options={"inner": "aot_eager", "debug": True})
    torch.testing.assert_close(compiled(x, ids), layer(x, ids))
    ids[1, 1] = 7
    with pytest.raises(UnsupportedMoE) as error:
        compiled(x, ids)
    assert str(error.value) == MESSAGE


@pytest.mark.parametrize("inner", ("eager", "aot_eager"))
def test_negative_ids_count_from_the_end_where_the_layer_indexes_with_them(inner: str) -> None:
    """``weight[ids]`` wraps negative ids, while the op skips them: one of both had to be told."""

    def forward(layer: BatchedMM, x: Tensor, ids: Tensor) -> Tensor:
        return layer.experts(x, ids, torch.ones(ids.shape))

    layer = changed(BatchedMM, forward=forward)(bias=True)
    x, ids = torch.randn(3, 8), torch.tensor([[0, -1], [2, 1], [-4, 1]])
    compiled = torch.compile(layer, backend=perseus_compile.perseus, options={"inner": inner})
    torch.testing.assert_close(compiled(x, ids), layer(x, ids))
    assert torch._dynamo.utils.counters["perseus"]["rewrites"] >= 1
