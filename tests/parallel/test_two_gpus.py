"""Does perseus::experts_parallel mean the same on two GPUs, where rows travel by NCCL?"""

from __future__ import annotations

from typing import Any

import op_checks
import pytest
import torch
from rank_pool import RankPool

pytestmark = pytest.mark.gpu2
# Widths that the fused kernel covers, and forms of both its weight layouts.
WIDTHS = {"dtype": torch.bfloat16, "width": 64, "inner": 32}
FORMS: dict[str, dict[str, Any]] = {
    "as nn.Linear": {**WIDTHS, "weights_dtype": torch.float32},
    "transposed": {**WIDTHS, "weight_layout": "in_out", "gate_layout": "interleaved", "activation": "gelu_tanh"},
}
TOKEN_COUNTS = {"few": [5, 8], "none on one rank": [0, 7], "many": [300, 517]}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("num_tokens", TOKEN_COUNTS.values(), ids=TOKEN_COUNTS)
def test_split_tokens(two_ranks: RankPool, num_tokens: list[int], form: dict[str, Any]) -> None:
    two_ranks.run(op_checks.check_split, num_tokens, None, form, "cuda")


def test_all_tokens_to_one_rank(two_ranks: RankPool) -> None:
    two_ranks.run(op_checks.check_split, TOKEN_COUNTS["few"], 1, FORMS["as nn.Linear"], "cuda")


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_replicated_tokens(two_ranks: RankPool, form: dict[str, Any]) -> None:
    two_ranks.run(op_checks.check_replicated, form, "cuda")
