"""Layers in which every rank runs its own experts on all tokens: what is matched, and what is refused?"""

from __future__ import annotations

import marked_layers as marked
import pytest
import spelling_checks
import torch
import torch.distributed as dist
from marked_layers import D, OwnExperts
from matching import found_in, reason_of
from rank_pool import RankPool

from perseus_compile.facts import MoEMatch, MoEPlan, ParallelSpec, Refusal
from perseus_compile.plan import plan

REPLICATED = ParallelSpec(group_name="0", tokens="replicated")
# What shares the experts where no gradient is recorded; None: they are a layer of this rank, the rest stays outside.
MATCHES: dict[type[OwnExperts], ParallelSpec | None] = {
    marked.OwnExperts: REPLICATED,
    marked.NotReduced: None,
    marked.Averaged: REPLICATED,  # the division stays outside
    marked.LargestOfRanks: None,
    marked.ReducedTwice: REPLICATED,  # the second time stays outside
}
UNWEIGHTED = "it marks the ids of other ranks' experts, but does not give these choices the weight 0"
NEAR_MISSES: dict[type[OwnExperts], str] = {
    marked.WeightsKept: UNWEIGHTED,
    marked.SmallWeights: UNWEIGHTED,
    marked.OwnWeighNothing: UNWEIGHTED,
    marked.MarkedAsAnExpert: "aten.clamp.default must leave expert ids as they are",
    marked.LocalByAnotherNumber: "aten.clamp.default must leave expert ids as they are",
    marked.ClampedTooFar: "aten.clamp.default must leave expert ids as they are",
    marked.MaskedByOne: "aten.masked_fill.Scalar must set the rows of other ranks' choices to 0",
    marked.ExpertsOfAnotherRank: "this process is rank 0 of 2 in its group '0', but it has the experts of rank 1 of 2",
    marked.StepBeforeWeights: "aten.add.Tensor has no meaning between the expert linears and the sum over choices",
}


@pytest.mark.parametrize("records_gradients", [False, True])
@pytest.mark.parametrize("kind", MATCHES, ids=lambda kind: kind.__name__)
def test_match(group: dist.ProcessGroup, kind: type[OwnExperts], records_gradients: bool) -> None:
    """Where gradients are recorded, the sum over ranks stays: code differs in what it takes for its gradient."""
    with torch.set_grad_enabled(records_gradients):
        (match,) = found_in(kind(group), torch.randn(6, D))
    assert isinstance(match, MoEMatch)
    assert match.parallel == (None if records_gradients else MATCHES[kind])
    assert (match.spec.num_experts, match.spec.expert_offset) == (6, 0)


@pytest.mark.parametrize("kind", NEAR_MISSES, ids=lambda kind: kind.__name__)
def test_near_miss(group: dist.ProcessGroup, kind: type[OwnExperts]) -> None:
    with torch.no_grad():
        assert NEAR_MISSES[kind] in reason_of(found_in(kind(group), torch.randn(6, D)))


def test_verify_needs_one_process(group: dist.ProcessGroup) -> None:
    with torch.no_grad():
        (match,) = found_in(marked.OwnExperts(group), torch.randn(6, D))
    assert isinstance(match, MoEMatch)
    assert isinstance(plan(match), MoEPlan)
    refusal = plan(match, verify=True)
    assert isinstance(refusal, Refusal)
    assert "option 'verify' runs a layer on one process" in refusal.reason
    assert refusal.checks[-1].name == "can be verified"


@pytest.mark.parametrize("kind", [marked.OwnExperts, marked.NotReduced, marked.Averaged, marked.ReducedTwice])
def test_numbers(two_ranks: RankPool, kind: type[OwnExperts]) -> None:
    two_ranks.run(spelling_checks.check_marked, kind)
