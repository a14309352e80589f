"""Activation checkpointing: layers inside are rewritten, and the second forward gives the gradients of the first."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from eager_twin import train_beside_eager, weighted_sum
from spellings import BatchedMM, Experts, GroupedMM
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from perseus_compile.testing.models import tiny_causal_lm

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A residual block around experts, as a decoder layer has it; D = 8."""

    def __init__(self, spelling: type[Experts], dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.experts, self.dropout = nn.LayerNorm(8), spelling(), dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.experts(self.norm(x)), self.dropout)


class Checkpointed(nn.Module):
    def __init__(self, *blocks: nn.Module, around: Callable[..., Tensor]) -> None:
        super().__init__()
        self.blocks, self.around = nn.ModuleList(blocks), around

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.around(block, x)
        return x


def _loss(model: nn.Module) -> Tensor:
    torch.manual_seed(3)  # of dropout
    return weighted_sum(model(X.clone().requires_grad_()))


@pytest.mark.parametrize("use_reentrant", (False, True), ids=("not reentrant", "reentrant"))
@pytest.mark.parametrize("spelling", (GroupedMM, BatchedMM))
def test_blocks(spelling: type[Experts], use_reentrant: bool) -> None:
    torch.manual_seed(0)
    around = functools.partial(checkpoint, use_reentrant=use_reentrant)
    outcome = train_beside_eager(Checkpointed(Block(spelling), Block(spelling), around=around), _loss)
    assert (outcome.ops, outcome.refusals) == (["moe", "moe"], [])


def test_dropout_inside_is_replayed() -> None:
    torch.manual_seed(0)
    model = Checkpointed(Block(BatchedMM, dropout=0.5), around=functools.partial(checkpoint, use_reentrant=False))
    assert train_beside_eager(model, _loss).ops == ["moe"]


def _save_products(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    saved = op in (torch.ops.aten.mm.default, torch.ops.perseus.moe.default, torch.ops.perseus.experts.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def test_selective_checkpointing_can_save_the_op() -> None:
    torch.manual_seed(0)
    contexts = functools.partial(create_selective_checkpoint_contexts, _save_products)
    around = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)
    assert train_beside_eager(Checkpointed(Block(BatchedMM), around=around), _loss).ops == ["moe"]


@pytest.mark.parametrize("use_reentrant", (False, True), ids=("not reentrant", "reentrant"))
@pytest.mark.parametrize("model_type", ("qwen3_moe", "deepseek_v3"))
def test_hugging_face_switch(model_type: str, use_reentrant: bool) -> None:
    model = tiny_causal_lm(model_type, num_layers=2).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    ids = torch.arange(12).view(2, 6)
    outcome = train_beside_eager(model, lambda each: each(ids, labels=ids, use_cache=False).loss)
    assert (outcome.ops, outcome.refusals) == (["moe"] * (1 if model_type == "deepseek_v3" else 2), [])


@pytest.mark.slow
def test_under_inductor() -> None:
    torch.manual_seed(0)
    model = Checkpointed(Block(GroupedMM), around=functools.partial(checkpoint, use_reentrant=False))
    assert train_beside_eager(model, _loss, inner="inductor").ops == ["moe"]
