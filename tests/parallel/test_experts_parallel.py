"""Does perseus::experts_parallel compute what one device computes on all ranks' tokens, gradients included?"""

from __future__ import annotations

from typing import Any

import op_checks
import pytest
import torch
from rank_pool import RankPool

FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float64": {"dtype": torch.float64, "activation": "relu2", "gate_layout": "none"},
    "bfloat16": {"dtype": torch.bfloat16, "weights_dtype": torch.float32, "weight_layout": "in_out"},
    "weight on the input": {"weight_on": "input", "gate_layout": "interleaved", "biases": False},
}
# How many tokens the ranks have: different numbers, none on some, none at all, all on one.
TOKEN_COUNTS: dict[str, dict[int, list[int]]] = {
    "different": {2: [5, 8], 4: [1, 4, 3, 6]},
    "none on one rank": {2: [0, 7], 4: [3, 0, 5, 0]},
    "none": {2: [0, 0], 4: [0, 0, 0, 0]},
    "all on one rank": {2: [9, 0], 4: [0, 0, 9, 0]},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_split_tokens(ranks: RankPool, form: dict[str, Any]) -> None:
    ranks.run(op_checks.check_split, TOKEN_COUNTS["different"][ranks.size], None, form)


@pytest.mark.parametrize("counts", TOKEN_COUNTS.values(), ids=TOKEN_COUNTS)
def test_token_counts(ranks: RankPool, counts: dict[int, list[int]]) -> None:
    ranks.run(op_checks.check_split, counts[ranks.size], None, {})


def test_all_tokens_to_one_rank(ranks: RankPool) -> None:
    for owner in range(ranks.size):
        ranks.run(op_checks.check_split, TOKEN_COUNTS["different"][ranks.size], owner, {})


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_replicated_tokens(ranks: RankPool, form: dict[str, Any]) -> None:
    ranks.run(op_checks.check_replicated, form)


def test_sums_are_in_the_promised_order(ranks: RankPool) -> None:
    ranks.run(op_checks.check_order_of_sums)
