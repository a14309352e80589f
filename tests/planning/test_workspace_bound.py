"""Does a call's one allocation stay under what is promised for it?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_rows import CASES, TOKENS, shape_of

from perseus_compile import fused_experts
from perseus_compile.jit import abi
from perseus_compile.jit.spec import TILE_CONFIGS

MAX_TOKENS_PER_TILE = sorted({config.max_tokens for config in TILE_CONFIGS.values()})


def _promise(num_tokens: int, top_k: int, model_width: int, expert_width: int) -> float:
    """2.5*T*K*D*2 + T*K*F*2 bytes + 32 MiB."""
    rows = num_tokens * top_k
    return 2.5 * rows * model_width * 2 + rows * expert_width * 2 + 32 * 2**20


@pytest.mark.parametrize("max_tokens_per_tile", MAX_TOKENS_PER_TILE)
@pytest.mark.parametrize("num_tokens", (*TOKENS, 131072))
@pytest.mark.parametrize("case", CASES)
def test_of_the_benchmark(case: str, num_tokens: int, max_tokens_per_tile: int) -> None:
    shape = shape_of(case, num_tokens)
    sizes = (num_tokens, shape.top_k, shape.model_width, shape.expert_width)
    layout = abi.workspace_layout(
        num_tokens=num_tokens,
        top_k=shape.top_k,
        num_local_experts=shape.num_local_experts,
        model_width=shape.model_width,
        expert_width=shape.expert_width,
        max_tokens_per_tile=max_tokens_per_tile,
    )
    assert layout.total_bytes <= _promise(*sizes)


@given(
    st.integers(1, fused_experts.MAX_TOKENS),
    st.integers(1, fused_experts.MAX_TOP_K),
    st.integers(1, fused_experts.MAX_EXPERTS),
    st.integers(1, 4096).map(lambda n: 8 * n),
    st.integers(1, 4096).map(lambda n: 8 * n),
    st.sampled_from(MAX_TOKENS_PER_TILE),
)
def test_of_whatever_the_kernel_covers(
    num_tokens: int, top_k: int, num_experts: int, model_width: int, expert_width: int, max_tokens_per_tile: int
) -> None:
    layout = abi.workspace_layout(
        num_tokens=num_tokens,
        top_k=top_k,
        num_local_experts=num_experts,
        model_width=model_width,
        expert_width=expert_width,
        max_tokens_per_tile=max_tokens_per_tile,
    )
    bound = abi.workspace_bound_bytes(
        num_tokens=num_tokens, top_k=top_k, model_width=model_width, expert_width=expert_width
    )
    assert layout.total_bytes <= bound == _promise(num_tokens, top_k, model_width, expert_width)
