"""What does Inductor need to know about the perseus ops? How to take ``perseus::moe`` apart on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perseus_compile.ops import route_and_experts


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's own table and ours, for the argument ``decompositions`` of ``compile_fx``."""
    from torch._inductor.decomposition import select_decomp_table

    return {**select_decomp_table(), torch.ops.perseus.moe.default: _moe_on_cpu}


def _moe_on_cpu(x_TD: Tensor, *tensors: Any, **numbers: Any) -> Any:
    """The router as torch ops, which Inductor fuses, and the experts as one op; other devices keep the one node.

    At one token the router's six small torch calls inside the op take as long as a fifth of the experts' weights.
    """
    if x_TD.device.type != "cpu":
        return NotImplemented
    return route_and_experts(x_TD, *tensors, **numbers)
