"""torch.autocast: a layer that runs under it keeps its code, with a sentence; one that does not is rewritten."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import pytest
import torch
from eager_twin import Outcome, train_beside_eager, weighted_sum
from spellings import BatchedMM, Experts, GroupedMM
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

REFUSED = "it runs under torch.autocast"
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
cast = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)


class Inside(nn.Module):
    """Experts called by ``call`` inside the context ``around``."""

    def __init__(
        self,
        around: Callable[[], contextlib.AbstractContextManager[object]],
        call: Callable[[nn.Module, Tensor], Tensor] = lambda experts, x: experts(x),
        spelling: type[Experts] = BatchedMM,
    ) -> None:
        super().__init__()
        self.experts, self.around, self.call = spelling(), around, call

    def forward(self, x: Tensor) -> Tensor:
        with self.around():
            return self.call(self.experts, x)


def _train(model: nn.Module) -> Outcome:
    # Uncompiled after the rewrite, since compilers of autocast regions round where eager does not.
    return train_beside_eager(model, lambda each: weighted_sum(each(X.clone().requires_grad_())), inner="eager")


def _checkpointed(experts: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(experts, x, use_reentrant=False)


def _switched_off_inside(experts: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return experts(x)


@pytest.mark.parametrize("spelling", (GroupedMM, BatchedMM))
def test_inside_the_model(spelling: type[Experts]) -> None:
    torch.manual_seed(0)
    outcome = _train(Inside(cast, spelling=spelling))
    assert (outcome.ops, outcome.refusals) == ([], [REFUSED])


def test_around_the_call_of_the_compiled_model() -> None:
    torch.manual_seed(0)
    with cast():
        outcome = _train(Inside(contextlib.nullcontext))
    assert (outcome.ops, outcome.refusals) == ([], [REFUSED])


def test_around_a_checkpoint() -> None:
    """The body of the checkpoint is a graph of its own, which does not show the region that it is called in."""
    torch.manual_seed(0)
    outcome = _train(Inside(cast, _checkpointed))
    assert (outcome.ops, outcome.refusals) == ([], [REFUSED])


@pytest.mark.parametrize(
    ("around", "call"),
    [
        (functools.partial(cast, enabled=False), lambda experts, x: experts(x)),
        (cast, _switched_off_inside),
        (functools.partial(torch.autocast, "cuda", dtype=torch.bfloat16), lambda experts, x: experts(x)),
    ],
    ids=("off", "off inside on", "for another device"),
)
@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda':UserWarning")
def test_regions_that_do_not_cast(
    around: Callable[[], contextlib.AbstractContextManager[object]], call: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    outcome = _train(Inside(around, call))
    assert (outcome.ops, outcome.refusals) == (["moe"], [])


def test_after_a_region() -> None:
    torch.manual_seed(0)

    def after(experts: nn.Module, x: Tensor) -> Tensor:
        with cast():
            x = x @ x.t() @ x
        return experts(x.float() + 1)

    outcome = _train(Inside(contextlib.nullcontext, after))
    assert (outcome.ops, outcome.refusals) == (["moe"], [])
