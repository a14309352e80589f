"""Which rows does each expert work on? The (token, choice) pairs of a call, sorted by expert.

Axes: T tokens, K choices per token, E local experts, R routed rows ordered by expert.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from perseus_compile import _C


@dataclasses.dataclass(frozen=True)
class Segments:
    """The routed rows of a call, ordered by expert and inside an expert by (token, choice).

    Four int64 arrays lie one after the other in ``table``, where ``_C`` finds them by address.
    """

    table: Tensor  # offsets [E + 1], tokens [T*K], choices [T*K], slots [T*K]
    num_local: int  # E
    ids_shape: torch.Size  # [T, K]
    hit: list[tuple[int, int, int]]  # (local expert, first row, end row) of every expert that has rows

    @property
    def num_rows(self) -> int:
        return self.hit[-1][2] if self.hit else 0

    @property
    def offsets(self) -> Tensor:
        """[E + 1], the first row of each expert; the last is the number of rows."""
        return self.table[: self.num_local + 1]

    @property
    def tokens_R(self) -> Tensor:
        """The token of each row."""
        return self._array(0)[: self.num_rows]

    @property
    def choices_R(self) -> Tensor:
        """token * K + choice of each row."""
        return self._array(1)[: self.num_rows]

    @property
    def slots_TK(self) -> Tensor:
        """The row of each choice; -1 for a skipped one."""
        return self._array(2).view(self.ids_shape)

    @property
    def experts_R(self) -> Tensor:
        """The local expert of each row."""
        return torch.repeat_interleave(self.offsets.diff(), output_size=self.num_rows)

    def _array(self, index: int) -> Tensor:
        size = self.ids_shape.numel()
        return self.table.narrow(0, self.num_local + 1 + index * size, size)


def sort_by_expert(ids_TK: Tensor, first_expert: int, num_local: int) -> Segments:
    """The segments of ids [T, K], int32 or int64; ids outside [first_expert, first_expert + num_local) are skipped."""
    ids_TK = ids_TK.contiguous()
    num_tokens, num_choices = ids_TK.shape
    table = torch.empty(num_local + 1 + 3 * num_tokens * num_choices, dtype=torch.int64)
    hit = _C.sort_by_expert(
        ids=ids_TK.data_ptr(),
        id_bytes=ids_TK.element_size(),
        num_tokens=num_tokens,
        num_choices=num_choices,
        first_expert=first_expert,
        num_local=num_local,
        table=table.data_ptr(),
    )
    return Segments(table, num_local, ids_TK.shape, hit)
