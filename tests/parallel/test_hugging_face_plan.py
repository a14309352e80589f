"""Does transformers' own expert-parallel plan keep its meaning: tokens are replicated, and sums are reduced?

The plan gives other ranks' choices an id that is no expert. Never may it become an all-to-all: every rank would
do the work of all.
"""

from __future__ import annotations

import plan_checks
import pytest
from rank_pool import RankPool

pytest.importorskip("transformers.distributed.expert_parallel", reason="needs transformers >= 5.24")


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_tensorrt_llm_14222_inference(ranks: RankPool, implementation: str) -> None:
    """NVIDIA/TensorRT-LLM#14222: right numbers, but every rank did the work of all for replicated tokens."""
    node = f"experts_parallel: 8 experts over {ranks.size} ranks of group '0', replicated tokens"
    assert ranks.run(plan_checks.check_plan, implementation, train=False) == [[node]] * ranks.size


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_transformers_48687_training(two_ranks: RankPool, implementation: str) -> None:
    """huggingface/transformers#48687: the loss was right and the router's gradient was not.

    The plan's own autograd functions around the experts stay, this rank's experts become one node.
    """
    for found in two_ranks.run(plan_checks.check_plan, implementation, train=True):
        (node,) = found
        assert node.startswith("experts: experts alone")
