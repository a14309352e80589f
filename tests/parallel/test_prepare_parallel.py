"""Is a Hugging Face model whose experts ranks share the same model, eager and compiled, forward and backward?"""

from __future__ import annotations

from collections.abc import Callable

import prepare_checks
import pytest
from rank_pool import RankPool

from perseus_compile.testing.models import MODEL_TYPES

MISTAKES: dict[Callable[[], str], tuple[str, ...]] = {
    prepare_checks.not_divisible: ("the number of experts must be divisible by the 2 ranks",) * 2,
    prepare_checks.models_differ: ("gate_up_proj torch.float32 [8, 64, 64]",) * 2,
    prepare_checks.no_experts_on_one_rank: ("got Linear without such experts", "on rank 0: prepare() can share"),
    prepare_checks.step_between: ("something follows the weighted sum",) * 2,
    prepare_checks.ids_written_through_a_view: ("it writes in place to what its experts see",) * 2,
    prepare_checks.shared_twice: ("these are shared already",) * 2,
}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_eager(two_ranks: RankPool, model_type: str) -> None:
    two_ranks.run(prepare_checks.check_model, model_type, None)


def test_captured_in_one_graph(ranks: RankPool) -> None:
    ranks.run(prepare_checks.check_model, "gpt_oss", "eager")


def test_compiled_by_inductor(two_ranks: RankPool) -> None:
    two_ranks.run(prepare_checks.check_model, "qwen3_moe", "inductor", num_layers=1)


def test_memory_and_state_dict(ranks: RankPool) -> None:
    ranks.run(prepare_checks.check_memory_and_state_dict)


def test_explain_lists_the_layers_with_their_group(two_ranks: RankPool) -> None:
    sharing = "experts_parallel: 8 experts over 2 ranks of group '0', split tokens"
    expected = [(f"model.layers.{layer}.mlp.experts", "rewritten", sharing) for layer in (0, 1)]
    assert two_ranks.run(prepare_checks.check_explained) == [expected] * 2


def test_frozen_experts(two_ranks: RankPool) -> None:
    two_ranks.run(prepare_checks.check_frozen_experts)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistake_is_an_error_on_every_rank(two_ranks: RankPool, mistake: Callable[[], str]) -> None:
    for message, expected in zip(two_ranks.run(mistake), MISTAKES[mistake], strict=True):
        assert expected in message
