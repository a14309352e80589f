"""What does Inductor need to know about the perseus ops? When to take ``perseus::moe`` apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from perseus_compile.ops import route_and_experts

_DECOMPOSED_DEVICES = ("cpu",)


def register_decompositions() -> None:
    """Adds ours to Inductor's table. A table passed to ``compile_fx`` instead would switch its cache off."""
    from torch._inductor import decomposition, lowering

    moe = torch.ops.perseus.moe.default
    if moe not in decomposition.decompositions:
        decomposition.register_decomposition([moe])(_moe_on_cpu)
        decomposition.fast_random_decomps.cache_clear()  # a copy of the table that an earlier compilation made
        # Inductor makes no call by itself for an op that has a decomposition.
        lowering.make_fallback(moe, warn=False, override_decomp=True)


def _moe_on_cpu(x_TD: Tensor, *args: Any) -> Any:
    """The router as torch ops, which Inductor fuses, and the experts as one op; other devices keep the one node.

    At one token the router's six small torch calls inside the op take as long as a fifth of the experts' weights.
    """
    if x_TD.device.type not in _DECOMPOSED_DEVICES:
        return NotImplemented
    return route_and_experts(x_TD, *args)
