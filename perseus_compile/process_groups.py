"""Which process group has this name, and which place does this process have in it? Communicates nothing.

A leaf module, since the matcher asks as well as the ops.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def named_group(name: str | None) -> dist.ProcessGroup | None:
    """The group that is registered under ``name``; None where there is none (any more)."""
    c10d: Any = dist.distributed_c10d
    try:
        return c10d._resolve_process_group(name)
    except (LookupError, RuntimeError, TypeError):
        return None


def rank_in(name: str | None) -> int | None:
    """The rank of this process in the group of that name; None where there is no such group."""
    group = named_group(name)
    return None if group is None else group.rank()


def size_of(name: str | None) -> int | None:
    """The number of ranks of the group of that name; None where there is no such group."""
    group = named_group(name)
    return None if group is None else group.size()
