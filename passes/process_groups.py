"""Which place does this process have in a process group? Reads torch.distributed; communicates nothing."""

from __future__ import annotations

from typing import Any

import torch.distributed


def rank_in(group_name: str | None) -> int | None:
    """The rank of this process in the group of that name; None where there is no such group."""
    group = _group(group_name)
    return None if group is None else group.rank()


def size_of(group_name: str | None) -> int | None:
    """The number of ranks of the group of that name; None where there is no such group."""
    group = _group(group_name)
    return None if group is None else group.size()


def _group(name: str | None) -> Any:
    c10d: Any = torch.distributed.distributed_c10d
    try:
        return c10d._resolve_process_group(name)
    except (LookupError, RuntimeError, TypeError):
        return None
