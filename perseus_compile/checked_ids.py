"""Are the expert ids of a call in range? The op that the option ``debug`` puts before ``perseus::experts``.

``perseus::experts`` skips ids that are out of range, and finding one costs a host synchronisation on a GPU, so the
check is an op of its own that only debugging pays for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import UnsupportedMoE

_LIBRARY = torch.library.Library("perseus", "FRAGMENT")
_LIBRARY.define("checked_ids(Tensor ids_TK, int num_experts) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _checked_ids(ids_TK: Tensor, num_experts: int) -> Tensor:
    """A copy of ``ids_TK``.

    Raises:
        UnsupportedMoE: an id outside [0, num_experts).
    """
    wrong = ids_TK[(ids_TK < 0) | (ids_TK >= num_experts)]
    if wrong.numel():
        raise UnsupportedMoE(
            f"expert ids must lie in [0, {num_experts}), got {wrong.numel()} of {ids_TK.numel()} outside, the first "
            f"{int(wrong[0])}; look for what computes them, or leave option 'debug' off to have them skipped"
        )
    return ids_TK.clone()


_LIBRARY.impl("checked_ids", _checked_ids, "CompositeExplicitAutograd")
torch.library.register_fake("perseus::checked_ids", lambda ids_TK, num_experts: torch.empty_like(ids_TK), lib=_LIBRARY)
