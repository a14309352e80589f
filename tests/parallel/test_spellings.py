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


def test_prime_rl_996_counts_on_the_host(ranks: RankPool) -> None:
    """PrimeIntellect-ai/prime-rl#996: the graph broke where the counts are read by ``tolist()``."""
    counts = [[4 + rank for rank in range(ranks.size)], [0, *([6] * (ranks.size - 1))], [1] * ranks.size]
    for found in ranks.run(spelling_checks.check_spelling, SplitExperts, counts):
        assert set(found) == {shared_by(ranks)}


def test_torchtitan_2696_2703_compiled_by_inductor(two_ranks: RankPool) -> None:
    """pytorch/torchtitan#2696, #2703: Inductor could not compile the split sizes that an all-to-all reads."""
    found = two_ranks.run(spelling_checks.check_spelling, SplitExperts, [[5, 8], [7, 2]], inner="inductor")
    assert found == [[shared_by(two_ranks)]] * 2
