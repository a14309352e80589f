"""Public threads about CUDA graphs: a captured layer is replayed with other routing. Each is named by its thread."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from moe_case import TOLERANCE, make_case, reference, relative_error

from perseus_compile.backend import perseus
from perseus_compile.testing.models import tiny_causal_lm

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_tokens", (1, 64, 700))
def test_megatron_lm_1598_deepgemm_444_experts(num_tokens: int) -> None:
    """Nothing waits for the host while it is captured, and replays read the ids of their own time."""
    num_experts = 16
    case = make_case(512, 256, num_experts, 4, num_tokens)
    numbers = dataclasses.asdict(case.spec)
    torch.ops.perseus.experts(*case.args, **numbers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.ops.perseus.experts(*case.args, **numbers)
    for ids in ((case.ids + 5) % num_experts, torch.full_like(case.ids, num_experts - 1)):
        case.ids.copy_(ids)
        graph.replay()
        assert relative_error(out, reference(case)) <= TOLERANCE


def test_megatron_lm_1598_layer() -> None:
    """The same for a compiled block, whose router chooses other experts for the tokens of each replay."""
    block = tiny_causal_lm("qwen3_moe", dtype=torch.bfloat16).model.layers[0].mlp.cuda()
    compiled = torch.compile(block, backend=perseus, options={"inner": "eager"})
    x_BTD = torch.randn(1, 40, 64, device="cuda").bfloat16()
    with torch.no_grad():
        compiled(x_BTD)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out_BTD = compiled(x_BTD)
        for seed in range(2):
            tokens = torch.randn(x_BTD.shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
            x_BTD.copy_(tokens.bfloat16())
            graph.replay()
            assert torch.equal(out_BTD, compiled(x_BTD))
