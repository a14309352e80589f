"""One graph serves every token count; zero and one token may cost a graph each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import perseus_compile
from perseus_compile import observe
from perseus_compile.testing.models import tiny_causal_lm


def moe_block(model_type: str, implementation: str) -> nn.Module:
    """The MoE block of one decoder layer: [batch, tokens, width] -> the same."""
    model = tiny_causal_lm(model_type, num_layers=2, implementation=implementation)
    return model.model.layers[1].mlp.eval()


def call(block: nn.Module, num_tokens: int) -> torch.Tensor:
    x_BTD = torch.randn(1, num_tokens, 64, generator=torch.Generator().manual_seed(num_tokens))
    output = block(x_BTD)
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("implementation", ("grouped_mm", "batched_mm"))
@pytest.mark.parametrize("model_type", ("qwen3_moe", "deepseek_v3", "gpt_oss"))
def test_no_recompilation_for_token_counts(model_type: str, implementation: str) -> None:
    block = moe_block(model_type, implementation)
    compiled = torch.compile(block, backend=perseus_compile.perseus, dynamic=True, options={"inner": "aot_eager"})
    with observe.collect() as reports, torch.no_grad():
        for num_tokens in (2, 3, 7, 64, 1000):
            torch.testing.assert_close(call(compiled, num_tokens), call(block, num_tokens))
        assert len(reports) == 1, "a token count was compiled into the graph"
        for graphs, num_tokens in ((2, 1), (3, 0)):
            torch.testing.assert_close(call(compiled, num_tokens), call(block, num_tokens))
            assert len(reports) <= graphs
    assert all(len(report.layers) == 1 for report in reports)


def test_default_dynamic_needs_no_more_graphs_than_torch_itself() -> None:
    """Without ``dynamic=``, torch makes one static and one dynamic graph; perseus adds none."""
    block = moe_block("qwen3_moe", "grouped_mm")
    compiled = torch.compile(block, backend=perseus_compile.perseus, options={"inner": "eager"})
    with observe.collect() as reports, torch.no_grad():
        for num_tokens in (5, 9, 3, 64):
            call(compiled, num_tokens)
    assert len(reports) == 2
    assert all(len(report.layers) == 1 for report in reports)


def test_a_constant_that_changes_later_is_seen() -> None:
    """Under dynamic=True a module's floats are inputs of the graph; the rewrite fixes them and must guard them."""
    block = moe_block("gpt_oss", "grouped_mm")
    compiled = torch.compile(block, backend=perseus_compile.perseus, dynamic=True, options={"inner": "eager"})
    with torch.no_grad(), observe.collect() as reports:
        before = call(compiled, 8)
        block.experts.alpha, block.experts.limit = 0.5, 0.25
        after = call(compiled, 8)
        torch.testing.assert_close(after, call(block, 8))
    assert not torch.allclose(before, after)
    assert [len(report.layers) for report in reports] == [1, 1]
