"""Is every mistake in an expert-parallel call an error on all ranks, with a way out, and never a hang?"""

from __future__ import annotations

from collections.abc import Callable

import mistake_checks
import pytest
from rank_pool import RankPool

MISTAKES: dict[Callable[[], str], str] = {
    mistake_checks.shapes_differ: "x torch.float32 [12]",
    mistake_checks.dtypes_differ: "x torch.float64 [10]",
    mistake_checks.gradients_differ: "backward [True, False, False, False, True, False]",
    mistake_checks.one_rank_unable: "weights must have one row per token, T=4 as x has, got 3",
    mistake_checks.foreign_experts: "from expert_offset=0 on rank 1",
    mistake_checks.too_many_tokens: "at most max_tokens_per_rank=3 tokens, got 4 on rank 1",
    mistake_checks.replicated_counts_differ: "must pass the same tokens, got [3, 4] tokens by rank",
    mistake_checks.unknown_tokens: "tokens must be 'split' or 'replicated', got 'shared'",
    mistake_checks.destroyed_group: "must exist when a layer that is shared by its ranks runs",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistake_is_an_error_on_every_rank(two_ranks: RankPool, mistake: Callable[[], str]) -> None:
    for message in two_ranks.run(mistake):
        assert MISTAKES[mistake] in message
    two_ranks.run(mistake_checks.still_works)
