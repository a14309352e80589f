"""Does perseus::experts_parallel keep torch's contract for custom ops, and does one graph serve all token counts?"""

from __future__ import annotations

import contract_checks
import pytest
from rank_pool import RankPool


@pytest.mark.parametrize("tokens", ["split", "replicated"])
def test_contract(two_ranks: RankPool, tokens: str) -> None:
    two_ranks.run(contract_checks.check_contract, tokens)


def test_one_graph_for_all_token_counts(two_ranks: RankPool) -> None:
    two_ranks.run(contract_checks.check_one_graph_for_all_token_counts)
