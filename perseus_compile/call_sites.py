"""What has been found out about a call before? A bounded table from all that a plan may depend on to the plan.

Checks and choices are made once per call site; every later call costs one look into this table. Two calls that differ
in anything but the values of their tensors, and the place of the tensors that change from call to call, are two sites.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Generic, TypeVar

from torch import Tensor

P = TypeVar("P")
_ALIGN_BYTES = 16  # what the kernels ask of addresses


class CallSites(Generic[P]):
    """Plans by call site; the oldest goes where there would be more than ``capacity``."""

    def __init__(self, capacity: int = 4096) -> None:
        self.capacity = capacity
        self._plans: dict[tuple[object, ...], P] = {}
        self._lock = threading.Lock()  # between finding the oldest plan and dropping it

    def find(self, site: tuple[object, ...]) -> P | None:
        return self._plans.get(site)

    def add(self, site: tuple[object, ...], plan: P) -> P:
        """Keeps a plan. Threads that plan the same site at the same time all may: the last one stays."""
        with self._lock:
            if len(self._plans) >= self.capacity and site not in self._plans:
                del self._plans[next(iter(self._plans))]
            self._plans[site] = plan
        return plan


def call_site(
    moving: Sequence[Tensor], fixed: Sequence[Tensor | None], numbers: Sequence[object]
) -> tuple[object, ...]:
    """Of ``moving`` tensors only the alignment of the address counts; of ``fixed`` ones (weights) the address itself.

    ``numbers`` are the other arguments of the op, hashable, in the order of its schema.
    """
    return (
        *[(one.data_ptr() % _ALIGN_BYTES, one.shape, one.stride(), one.dtype, one.device) for one in moving],
        *[None if one is None else (one.data_ptr(), one.shape, one.stride(), one.dtype, one.device) for one in fixed],
        *numbers,
    )
