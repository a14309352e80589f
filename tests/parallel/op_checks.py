"""What every rank checks of ``perseus::experts_parallel``: the numbers of all ranks' tokens on one device.

Every rank makes the same whole case from a seed and takes its part. Axes: T tokens, K choices, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from op_cases import DIFFERENTIABLE, NAMES, Case, assert_near, make_case
from torch import Tensor

NUM_LOCAL = 3
EXPERTS = ("gate_up", "gate_up_bias", "down", "down_bias")


def whole_case(ids: Tensor, **form: Any) -> Case:
    """All ranks' tokens and all experts. Ids may be those of no expert."""
    return make_case(ids=ids, num_local=NUM_LOCAL * dist.get_world_size(), num_choices=ids.shape[1], **form)


def my_rows(num_tokens: list[int]) -> slice:
    start = sum(num_tokens[: dist.get_rank()])
    return slice(start, start + num_tokens[dist.get_rank()])


def part_of(case: Case, num_tokens: list[int] | None) -> Case:
    """This rank's tokens, all of them where ``num_tokens`` is None, and this rank's experts."""
    rows = my_rows(num_tokens) if num_tokens is not None else slice(None)
    first = NUM_LOCAL * dist.get_rank()
    tensors = {name: case[name][rows] for name in ("x", "ids", "weights")}
    present = (name for name in EXPERTS if case.tensors[NAMES.index(name)] is not None)
    tensors |= {name: case[name][first : first + NUM_LOCAL] for name in present}
    return case.having(**tensors, expert_offset=first)


def run(case: Case, *, tokens: str = "split", max_tokens_per_rank: int = 0) -> Tensor:
    sharing = {"group_name": dist.group.WORLD.group_name, "tokens": tokens, "max_tokens_per_rank": max_tokens_per_rank}
    return torch.ops.perseus.experts_parallel(*case.tensors, **case.numbers, **sharing)


def random_ids(num_tokens: list[int], num_choices: int = 3) -> Tensor:
    """With repetition, and some that name no expert."""
    generator = torch.Generator().manual_seed(len(num_tokens))
    num_experts = NUM_LOCAL * dist.get_world_size()
    return torch.randint(-1, num_experts + 1, (sum(num_tokens), num_choices), generator=generator)


def ids_of_one_owner(num_tokens: list[int], owner: int) -> Tensor:
    generator = torch.Generator().manual_seed(owner)
    first = NUM_LOCAL * owner
    return torch.randint(first, first + NUM_LOCAL, (sum(num_tokens), 2), generator=generator)


def check_split(num_tokens: list[int], owner: int | None, form: dict[str, Any], device: str = "cpu") -> None:
    """Output and all gradients, for tokens of its own on each rank; with ``owner``, all of them go to that rank.

    The ranks compute on ``device``; what they are compared with is computed on the CPU.
    """
    ids = random_ids(num_tokens) if owner is None else ids_of_one_owner(num_tokens, owner)
    whole = whole_case(ids, **form)
    exact = whole.exact().leaves()
    expected = exact.run()
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(whole["x"].dtype)
    expected.backward(grad.double())

    mine = _on(device, part_of(whole, num_tokens)).leaves()
    actual = run(mine)
    rows = my_rows(num_tokens)
    assert_near(actual.cpu(), expected[rows])
    actual.backward(grad[rows].to(device))
    _check_gradients(mine, part_of(_gradients(exact), num_tokens), whole["x"].dtype)


def check_replicated(form: dict[str, Any], device: str = "cpu") -> None:
    """Output and all gradients, for the same tokens on all ranks; ``device`` as in ``check_split``."""
    whole = whole_case(random_ids([9]), **form)
    exact = whole.exact().leaves()
    expected = exact.run()
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(whole["x"].dtype)
    expected.backward(grad.double())
    mine = _on(device, part_of(whole, None)).leaves()
    actual = run(mine, tokens="replicated")
    assert_near(actual.cpu(), expected)
    actual.backward(grad.to(device))
    _check_gradients(mine, part_of(_gradients(exact), None), whole["x"].dtype)


def _on(device: str, case: Case) -> Case:
    """The call on another device; on "cuda", on the GPU that has the number of this rank."""
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank())
    return case.to(device)


def _gradients(case: Case) -> Case:
    present = {name: case[name].grad for name in DIFFERENTIABLE if case.tensors[NAMES.index(name)] is not None}
    return case.having(**present)


def _check_gradients(mine: Case, expected: Case, dtype: torch.dtype) -> None:
    for name in DIFFERENTIABLE:
        if mine.tensors[NAMES.index(name)] is not None:
            assert mine[name].grad is not None, name
            assert_near(mine[name].grad.cpu(), expected[name], dtype)


def check_order_of_sums() -> None:
    """Bit for bit: the choices of one rank first, then the ranks, in float32.

    Small whole numbers make every product exact, so that only the sums over choices round.
    """
    size = dist.get_world_size()
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(NUM_LOCAL * size, generator=generator)[:5] for _ in range(16)])
    whole = whole_case(ids, biases=False, gate_layout="none", activation="relu2")
    whole = whole.having(**{name: (whole[name] * 2).round() for name in ("x", "gate_up", "down")})
    weights = torch.rand(ids.shape, generator=generator) * 10.0 ** torch.randint(-3, 4, ids.shape, generator=generator)
    whole = whole.having(weights=weights)
    ones = torch.ones(len(ids), 1)
    rows = [whole.having(ids=ids[:, k : k + 1].contiguous(), weights=ones).run() for k in range(5)]
    expected = torch.zeros_like(rows[0])
    for rank in range(size):
        partial = torch.zeros_like(expected)
        for k in range(5):
            mine = (ids[:, k] // NUM_LOCAL == rank).unsqueeze(1)
            partial = torch.where(mine, partial + rows[k] * weights[:, k : k + 1], partial)
        expected = expected + partial
    assert not torch.equal(expected, whole.run()), "choice order alone must round differently, or nothing is tested"
    num_tokens = [16 - 2 * (size - 1), *([2] * (size - 1))]
    assert torch.equal(run(part_of(whole, num_tokens)), expected[my_rows(num_tokens)])
    assert torch.equal(run(part_of(whole, None), tokens="replicated"), expected)
