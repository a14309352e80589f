"""Which ranks share the experts of a layer, and do they make the same call? A process group by its name.

An exchange into which one rank enters with other sizes, or not at all, hangs the others. So every call starts with one
small exchange of fixed size that cannot go wrong, and whatever is wrong on one rank becomes an error on all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib

import torch
import torch.distributed as dist

from perseus_compile.errors import GroupError, PerseusError
from perseus_compile.process_groups import named_group

_UNABLE = -1  # in the place of a digest: this rank cannot make the call at all


@dataclasses.dataclass(frozen=True)
class RankGroup:
    """A process group of this program, and this process in it."""

    name: str
    rank: int
    size: int


def find_group(name: str) -> RankGroup:
    """The group that is registered under ``name``.

    Raises:
        GroupError: there is none (any more).
    """
    group = _process_group(name)
    return RankGroup(name, group.rank(), group.size())


def require_same(group: RankGroup, value: str | PerseusError, what: str) -> None:
    """Makes sure that all ranks have the same text. Collective.

    Args:
        group: the ranks that call this together.
        value: this rank's text, or the error that keeps it from having one.
        what: what the text describes, as the subject of a sentence.

    Raises:
        PerseusError: ``value`` itself, on a rank that has an error.
        GroupError: on the other ranks, if one has an error; on all ranks, if two texts differ.
    """
    failed = isinstance(value, PerseusError)
    shared: list[tuple[bool, str]] = [(False, "")] * group.size
    dist.all_gather_object(shared, (failed, str(value)), group=_process_group(group.name))
    if isinstance(value, PerseusError):
        raise value
    for rank, (has_failed, text) in enumerate(shared):
        if has_failed:
            raise GroupError(f"{what} must be possible on every rank of group {group.name!r}, on rank {rank}: {text}")
    for rank, (_, text) in enumerate(shared):
        if text != shared[0][1]:
            raise GroupError(
                f"{what} must be the same on all ranks of group {group.name!r}, with tensors of the same shapes and "
                f"dtypes (token counts may differ), got on rank 0:\n  {shared[0][1]}\non rank {rank}:\n  {text}\n"
                "run the same code with the same configuration on every rank"
            )


def agree(group: RankGroup, device: torch.device, call: str | PerseusError, sizes: list[int]) -> list[list[int]]:
    """The sizes of every rank, by rank, once it is certain that all ranks make the same call. Collective.

    Args:
        group: the ranks that make the call together.
        device: where the exchange runs; the group must have a backend for it.
        call: whatever must be the same on all ranks, as text; or the error that keeps this rank from making the call.
        sizes: numbers that may differ between ranks, equally many on each; anything where ``call`` is an error.

    Raises:
        PerseusError: ``call`` itself, on a rank that has an error.
        GroupError: on all other ranks; on all ranks, if two make different calls.
    """
    digest = _UNABLE if isinstance(call, PerseusError) else _digest(call)
    mine = torch.tensor([digest, *sizes], dtype=torch.int64, device=device)
    collectives = torch.ops._c10d_functional
    table = collectives.wait_tensor(collectives.all_gather_into_tensor(mine, group.size, group.name))
    rows = table.view(group.size, -1).tolist()
    if any(row[0] != digest for row in rows) or digest == _UNABLE:
        require_same(group, call, "the call")
    return [row[1:] for row in rows]


def _process_group(name: str) -> dist.ProcessGroup:
    group = named_group(name)
    if group is None:
        raise GroupError(
            f"the process group {name!r} must exist when a layer that is shared by its ranks runs, got none of that "
            "name; call torch.distributed.init_process_group before, and destroy_process_group after all such calls"
        )
    return group


@functools.lru_cache(maxsize=4096)
def _digest(call: str) -> int:
    """The same number in every process, unlike ``hash``; never ``_UNABLE``."""
    return int.from_bytes(hashlib.sha256(call.encode()).digest()[:7], "big")
