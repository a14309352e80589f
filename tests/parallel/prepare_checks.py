"""What every rank checks of ``prepare(model, ep_group=...)``: the numbers and gradients of the whole model.

Every rank builds the whole model from a seed, runs it on all ranks' sequences, and then shares it and runs its own.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import perseus_compile
from perseus_compile import GroupError, UnsupportedMoE
from perseus_compile.sharded_experts import ShardedExperts
from perseus_compile.testing.models import random_tokens, tiny_causal_lm

LENGTH = 5


def my_slice(whole: Tensor) -> Tensor:
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def is_shared(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name.rpartition(".")[0]), ShardedExperts)


def check_model(model_type: str, inner: str | None, num_layers: int = 2) -> None:
    """Logits and gradients; ``inner`` compiles with perseus, None runs eagerly."""
    whole = tiny_causal_lm(model_type, num_layers=num_layers)
    mine = perseus_compile.prepare(copy.deepcopy(whole), ep_group=dist.group.WORLD)
    if inner is not None:
        mine.compile(backend="perseus", fullgraph=True, options={"inner": inner})
    tokens = random_tokens(whole, (2 * dist.get_world_size(), LENGTH))
    expected = whole(tokens).logits
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    expected.backward(grad)
    actual = mine(my_slice(tokens)).logits
    torch.testing.assert_close(actual, my_slice(expected), rtol=1e-4, atol=1e-4)
    actual.backward(my_slice(grad))
    check_gradients(mine, dict(whole.named_parameters()))


def check_gradients(mine: nn.Module, expected: dict[str, nn.Parameter]) -> None:
    """Those of shared experts are of all ranks' losses; all others are of this rank's, so the ranks' are summed."""
    names = [name for name, _ in mine.named_parameters() if expected[name].grad is not None]
    assert any(is_shared(mine, name) for name in names)
    for name in names:
        have, want = mine.get_parameter(name).grad, expected[name].grad
        assert have is not None and want is not None, name
        if is_shared(mine, name):
            want = my_slice(want)
        else:
            dist.all_reduce(have)
        torch.testing.assert_close(have, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()), msg=name)


def check_memory_and_state_dict() -> None:
    whole = tiny_causal_lm("gpt_oss")
    mine = perseus_compile.prepare(copy.deepcopy(whole), ep_group=dist.group.WORLD)
    assert perseus_compile.prepare(mine) is mine
    for name, parameter in mine.named_parameters():
        of_whole = whole.get_parameter(name)
        part = my_slice(of_whole) if is_shared(mine, name) else of_whole
        assert torch.equal(parameter, part) and parameter.requires_grad == of_whole.requires_grad
        assert parameter.untyped_storage().nbytes() == part.numel() * part.element_size(), "the rest is freed"
    gathered = mine.state_dict()
    assert gathered.keys() == whole.state_dict().keys()
    for name, value in whole.state_dict().items():
        assert torch.equal(gathered[name], value), name
    other = tiny_causal_lm("gpt_oss", seed=1)
    mine.load_state_dict(other.state_dict())
    for name, parameter in mine.named_parameters():
        part = other.get_parameter(name)
        assert torch.equal(parameter, my_slice(part) if is_shared(mine, name) else part), name
    tokens = random_tokens(whole, (2, LENGTH))
    torch.testing.assert_close(mine(tokens).logits, other(tokens).logits, rtol=1e-4, atol=1e-4)


def check_explained() -> list[tuple[str, str, str]]:
    model = perseus_compile.prepare(tiny_causal_lm("qwen3_moe"), ep_group=dist.group.WORLD)
    report = perseus_compile.explain(model, random_tokens(model, (2, LENGTH)))
    return [(row.layer, row.status, f"{row.op}: {row.reason}") for row in report.layers]


def check_frozen_experts() -> None:
    model = tiny_causal_lm("qwen3_moe")
    for parameter in model.model.layers[0].mlp.experts.parameters():
        parameter.requires_grad_(False)
    mine = perseus_compile.prepare(model, ep_group=dist.group.WORLD)
    mine(random_tokens(mine, (2, LENGTH))).logits.sum().backward()
    frozen, trained = (layer.mlp for layer in mine.model.layers)
    assert all(p.grad is None for p in frozen.experts.parameters())
    assert all(p.grad is not None for p in (*trained.experts.parameters(), *frozen.gate.parameters()))


def message_of(model: nn.Module, error: type[Exception], **arguments: Any) -> str:
    try:
        perseus_compile.prepare(model, **{"ep_group": dist.group.WORLD, **arguments})
    except error as raised:
        return str(raised)
    raise AssertionError("prepare() raised nothing")


def not_divisible() -> str:
    return message_of(tiny_causal_lm("qwen3_moe", num_experts=5, num_local_experts=5), UnsupportedMoE)


def models_differ() -> str:
    wider = {"moe_intermediate_size": 48} if dist.get_rank() else {}
    return message_of(tiny_causal_lm("qwen3_moe", **wider), GroupError)


def no_experts_on_one_rank() -> str:
    model = tiny_causal_lm("qwen3_moe") if dist.get_rank() else nn.Linear(2, 2)
    return message_of(model, GroupError if dist.get_rank() else UnsupportedMoE)


def step_between() -> str:
    model = tiny_causal_lm("qwen3_moe")
    experts = model.model.layers[1].mlp.experts
    run = experts.forward
    experts.forward = lambda *args: torch.relu(run(*args))
    return message_of(model, UnsupportedMoE)


def ids_written_through_a_view() -> str:
    """The ids that the experts see are still those of the top-k."""
    model = tiny_causal_lm("qwen3_moe")
    experts = model.model.layers[1].mlp.experts
    run = experts.forward

    def forward(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        ids_TK[:, 1] = ids_TK[:, 0]
        return run(x_TD, ids_TK, weights_TK)

    experts.forward = forward
    return message_of(model, UnsupportedMoE)


def shared_twice() -> str:
    model = perseus_compile.prepare(tiny_causal_lm("qwen3_moe"), ep_group=dist.group.WORLD)
    return message_of(model, UnsupportedMoE)
