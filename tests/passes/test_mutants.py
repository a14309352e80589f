"""The fuzzer of the matcher: no mutant computes other numbers, and a matcher made wrong on purpose is found."""

from __future__ import annotations

import re

import fuzz
import pytest
import torch
from mutant_sources import LOOPS, SOURCES
from spellings import BatchedMM, changed
from torch import Tensor
from torch.fx import Node

import perseus_compile
from perseus_compile.passes import match_moe
from perseus_compile.passes.interpret import Reader, aten
from perseus_compile.passes.patterns import all_rules
from perseus_compile.passes.rule import Rule
from perseus_compile.passes.values import Value

NUM_MUTANTS = 500


@pytest.mark.slow
def test_mutants_compute_what_torch_computes() -> None:
    result = fuzz.fuzz(NUM_MUTANTS, seed=0)
    assert not result.failures, "\n\n".join(f"{mutant}\n{why}" for mutant, why in result.failures.items())
    # The fuzzer would find nothing if everything were refused.
    assert min(result.counts[outcome] for outcome in ("refused", "experts", "experts_list", "moe")) > NUM_MUTANTS // 20


STACKED_LOOPS = ("loop, stacked", "all at once", "all at once, bmm")
# Ids come from outside, or the block returns its router's weights.
EXPERTS_ALONE = ("given ids", "mixtral", "gpt_oss")


@pytest.mark.parametrize("source", SOURCES)
def test_sources_are_rewritten(source: str) -> None:
    """Mutants of a source that is refused as it is would show nothing."""
    outcome, why = fuzz.check(fuzz.Mutant(source, "unchanged", 0))
    wanted = "experts" if any(name in source for name in EXPERTS_ALONE) else "moe"
    if source in LOOPS and source not in STACKED_LOOPS:
        wanted = "experts_list"
    assert outcome == wanted, why


# Steps that a wrong rule, given to the matcher below, takes for steps without effect.
IGNORED = (aten.neg.default, aten.flip.default, aten.roll.default)


@pytest.fixture
def wrong_matcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def ignore(read: Reader, node: Node) -> Value | None:
        return read.value(node.args[0])

    rules = (*all_rules(), Rule("steps without effect", IGNORED, ignore))
    monkeypatch.setattr(match_moe, "all_rules", lambda: rules)


def test_a_wrong_matcher_is_found(wrong_matcher: None) -> None:
    result = fuzz.fuzz(150, seed=0, sources=("batched",), mutations=("inserted step",))
    found = [str(mutant) for mutant in result.failures]
    assert found
    assert all(re.search("neg|flip|roll", mutant) for mutant in found)


def test_a_wrong_matcher_is_caught_by_verify(wrong_matcher: None) -> None:
    def negated_up(layer: BatchedMM, hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * -up

    layer = changed(BatchedMM, gate=negated_up)()
    options = {"inner": "eager", "verify": True}
    compiled = torch.compile(layer, backend=perseus_compile.perseus, options=options)
    with pytest.raises(Exception, match="perseus::moe must give the numbers of the code that it replaces"):
        compiled(torch.randn(6, 8))
