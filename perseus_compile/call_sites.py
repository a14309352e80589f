"""What has been found out about a call before? A bounded table from all that a plan may depend on to the plan.

Checks and choices are made once per call site; every later call costs one look into this table. Two calls that differ
in anything but the values of their tensors, and the place of the tensors that change from call to call, are two sites.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

from perseus_compile.grouped import ROW_BYTES

P = TypeVar("P")


class CallSites(Generic[P]):
    """Plans by call site; the oldest goes where there would be more than ``capacity``.

    Each token count is a site of its own for each layer: 48 layers fill the default capacity with 85 prompt lengths,
    and lengths beyond are planned again, which takes some 50 us.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self.capacity = capacity
        self._plans: dict[tuple[object, ...], P] = {}
        self._generation = 0  # of what plans are made from
        self._lock = threading.Lock()

    def find(self, site: tuple[object, ...]) -> P | None:
        return self._plans.get(site)

    def forget(self) -> None:
        """Every site is planned anew at its next call. Captured graphs stay as they are."""
        with self._lock:
            self._generation += 1
            self._plans.clear()

    def add(self, site: tuple[object, ...], make: Callable[[], P]) -> P:
        """Makes a plan and keeps it, unless ``forget`` was called meanwhile.

        Threads that plan the same site at the same time all may: the last one stays.
        """
        generation = self._generation
        plan = make()
        with self._lock:
            if generation == self._generation:
                if len(self._plans) >= self.capacity and site not in self._plans:
                    del self._plans[next(iter(self._plans))]
                self._plans[site] = plan
        return plan


def experts_site(
    numbers: tuple[object, ...],
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
) -> tuple[object, ...]:
    """Of a call of ``perseus::experts``; ``numbers`` are the op's other arguments, hashable, in its order.

    Of tensors that move from call to call, where they lie does not count, but for the alignment of x; of weights and
    biases the address does. It says the device as well: all devices share one address space with the host. Written out
    and not looped over, since it is part of every call and a third faster so.
    """
    return (
        *(x_TD.data_ptr() % ROW_BYTES, x_TD.shape, x_TD.stride(), x_TD.dtype, x_TD.device),
        *(ids_TK.shape, ids_TK.stride(), ids_TK.dtype, ids_TK.device),
        *(weights_TK.shape, weights_TK.stride(), weights_TK.dtype, weights_TK.device),
        *(gate_up.data_ptr(), gate_up.shape, gate_up.stride(), gate_up.dtype),
        None if gate_up_bias is None else _place(gate_up_bias),
        *(down.data_ptr(), down.shape, down.stride(), down.dtype),
        None if down_bias is None else _place(down_bias),
        numbers,
    )


def moe_site(
    numbers: tuple[object, ...],
    x_TD: Tensor,
    router_weight_ED: Tensor,
    router_bias_E: Tensor | None,
    correction_bias_E: Tensor | None,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
) -> tuple[object, ...]:
    """Of a call of ``perseus::moe``, as ``experts_site``."""
    return (
        *(x_TD.data_ptr() % ROW_BYTES, x_TD.shape, x_TD.stride(), x_TD.dtype, x_TD.device),
        *(router_weight_ED.data_ptr(), router_weight_ED.shape, router_weight_ED.stride(), router_weight_ED.dtype),
        None if router_bias_E is None else _place(router_bias_E),
        None if correction_bias_E is None else _place(correction_bias_E),
        *(gate_up.data_ptr(), gate_up.shape, gate_up.stride(), gate_up.dtype),
        None if gate_up_bias is None else _place(gate_up_bias),
        *(down.data_ptr(), down.shape, down.stride(), down.dtype),
        None if down_bias is None else _place(down_bias),
        numbers,
    )


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
