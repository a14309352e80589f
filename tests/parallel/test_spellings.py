"""Do hand-written expert-parallel layers become one node with the numbers and gradients of their own code?"""

from __future__ import annotations

import pytest
import spelling_checks
from rank_pool import RankPool
from spelled_layers import SPELLINGS, Grouped, SplitExperts

SHARED = "experts_parallel: {experts} experts over {ranks} ranks of group '0', split tokens"


def shared_by(ranks: RankPool) -> str:
    return SHARED.format(experts=3 * ranks.size, ranks=ranks.size)


@pytest.mark.parametrize("kind", [*SPELLINGS, Grouped])
def test_one_node(two_ranks: RankPool, kind: type[SplitExperts]) -> None:
    found = two_ranks.run(spelling_checks.check_spelling, kind, [[5, 8], [7, 2]])
    assert found == [[shared_by(two_ranks)]] * 2


def test_token_counts(ranks: RankPool) -> None:
    counts = [[4 + rank for rank in range(ranks.size)], [0, *([6] * (ranks.size - 1))], [1] * ranks.size]
    for found in ranks.run(spelling_checks.check_spelling, SplitExperts, counts):
        assert set(found) == {shared_by(ranks)}


def test_compiled_by_inductor(two_ranks: RankPool) -> None:
    found = two_ranks.run(spelling_checks.check_spelling, SplitExperts, [[5, 8], [7, 2]], inner="inductor")
    assert found == [[shared_by(two_ranks)]] * 2
