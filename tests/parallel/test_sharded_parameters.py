"""FSDP and DTensor parameters: rewritten where a layer sees local tensors, refused with a sentence elsewhere."""

from __future__ import annotations

import pytest
import sharding_checks
from eager_twin import Outcome
from rank_pool import RankPool

DISTRIBUTED = (
    "the experts are chosen on distributed tensors (DTensor) at topk: only local tensors are rewritten, such as those "
    "that FSDP gathers or .to_local() returns"
)


def _same_on_all_ranks(outcomes: list[Outcome]) -> Outcome:
    assert outcomes == [outcomes[0]] * len(outcomes)
    return outcomes[0]


@pytest.mark.parametrize("compile_each", (False, True), ids=("whole model", "each module"))
@pytest.mark.parametrize("spelling", sharding_checks.SPELLINGS)
def test_fully_sharded_block(two_ranks: RankPool, spelling: str, compile_each: bool) -> None:
    """The experts are rewritten on what the all-gather before the layer returns."""
    run = two_ranks.run(sharding_checks.fully_sharded_block, spelling, compile_each=compile_each)
    outcome = _same_on_all_ranks(run)
    assert (outcome.ops, outcome.refusals) == (["moe"], [])


@pytest.mark.slow
def test_fully_sharded_hugging_face_model(two_ranks: RankPool) -> None:
    outcome = _same_on_all_ranks(two_ranks.run(sharding_checks.fully_sharded_model, "qwen3_moe"))
    # The hooks of FSDP end a graph at each decoder layer, and the layers share one compiled frame.
    assert (set(outcome.ops), outcome.refusals) == ({"moe"}, [])


@pytest.mark.parametrize("placement", sharding_checks.PLACEMENTS)
def test_distributed_layer(two_ranks: RankPool, placement: str) -> None:
    outcome = _same_on_all_ranks(two_ranks.run(sharding_checks.distributed_layer, placement))
    assert (outcome.ops, outcome.refusals) == ([], [DISTRIBUTED])


def test_distributed_only_inside(two_ranks: RankPool) -> None:
    outcome = _same_on_all_ranks(two_ranks.run(sharding_checks.distributed_inside))
    assert (outcome.ops, outcome.refusals) == ([], [DISTRIBUTED])


def test_local_part_of_the_weights(two_ranks: RankPool) -> None:
    outcome = _same_on_all_ranks(two_ranks.run(sharding_checks.local_weights))
    assert (outcome.ops, outcome.refusals) == (["moe"], [])


def test_write_to_a_distributed_tensor(two_ranks: RankPool) -> None:
    outcome = _same_on_all_ranks(two_ranks.run(sharding_checks.written_while_distributed))
    assert outcome.ops == []
    assert outcome.refusals == ["mul_ writes in place to a distributed tensor, whose local part others may hold"]
