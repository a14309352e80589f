"""What every rank checks of wrong calls: each is an error on all ranks at once, and the group is usable afterwards."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from op_checks import NUM_LOCAL, part_of, random_ids, run, whole_case

from perseus_compile import GroupError, PerseusError, UnsupportedMoE

NUM_TOKENS = 4


def message_of(call: Callable[[], object], own_fault_on: int | None = None) -> str:
    """The text of the error that ``call`` raises here: the rank with the mistake knows it as its own."""
    expected: type[PerseusError] = UnsupportedMoE if dist.get_rank() == own_fault_on else GroupError
    try:
        call()
    except expected as error:
        return str(error)
    raise AssertionError(f"rank {dist.get_rank()} raised nothing")


def shapes_differ() -> str:
    is_last = dist.get_rank() == dist.get_world_size() - 1
    case = part_of(whole_case(random_ids([NUM_TOKENS]), width=12 if is_last else 10), None)
    return message_of(lambda: run(case))


def dtypes_differ() -> str:
    is_last = dist.get_rank() == dist.get_world_size() - 1
    case = part_of(whole_case(random_ids([NUM_TOKENS]), dtype=torch.float64 if is_last else torch.float32), None)
    return message_of(lambda: run(case))


def gradients_differ() -> str:
    case = part_of(whole_case(random_ids([NUM_TOKENS])), None).leaves(("x",) if dist.get_rank() else ("x", "down"))
    out = run(case)
    return message_of(lambda: out.sum().backward())


def one_rank_unable() -> str:
    case = part_of(whole_case(random_ids([NUM_TOKENS])), None)
    if dist.get_rank() == 1:
        case = case.having(weights=case["weights"][:-1])
    return message_of(lambda: run(case), own_fault_on=1)


def foreign_experts() -> str:
    case = part_of(whole_case(random_ids([NUM_TOKENS])), None)
    if dist.get_rank() == 1:
        case = case.having(expert_offset=0)
    return message_of(lambda: run(case), own_fault_on=1)


def too_many_tokens() -> str:
    case = part_of(whole_case(random_ids([NUM_TOKENS])), None)
    if dist.get_rank() == 0:
        case = case.on(range(NUM_TOKENS - 1))
    return message_of(lambda: run(case, max_tokens_per_rank=NUM_TOKENS - 1))


def replicated_counts_differ() -> str:
    case = part_of(whole_case(random_ids([NUM_TOKENS])), None)
    if dist.get_rank() == 0:
        case = case.on(range(NUM_TOKENS - 1))
    return message_of(lambda: run(case, tokens="replicated"))


def unknown_tokens() -> str:
    case = part_of(whole_case(random_ids([NUM_TOKENS])), None)
    try:
        run(case, tokens="shared")
    except UnsupportedMoE as error:
        return str(error)
    raise AssertionError("an unknown word was taken")


def destroyed_group() -> str:
    group = dist.new_group(list(range(dist.get_world_size())))
    case = part_of(whole_case(random_ids([NUM_TOKENS])), None)
    numbers = {**case.numbers, "group_name": group.group_name}
    torch.ops.perseus.experts_parallel(*case.tensors, **numbers)
    dist.destroy_process_group(group)
    return message_of(lambda: torch.ops.perseus.experts_parallel(*case.tensors, **numbers))


def still_works() -> None:
    case = part_of(whole_case(random_ids([NUM_TOKENS])), None)
    assert run(case).shape == (NUM_TOKENS, case["x"].shape[1])
    assert case["gate_up"].shape[0] == NUM_LOCAL
