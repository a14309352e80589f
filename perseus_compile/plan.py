"""Is a matched layer rewritten, and into which op? Stage 3: decides, never edits the graph.

A plan may say no: the answer is then a ``Refusal`` with a sentence, and the layer keeps its own code.
"""

from __future__ import annotations

import torch

from .facts import MoEMatch, MoEPlan, Refusal
from .lower import SUPPORTED_DTYPES


def plan(match: MoEMatch) -> MoEPlan | Refusal:
    """Decides what becomes of ``match``.

    Where the layer holds numbers that Dynamo made inputs of the graph (under ``dynamic=True`` every Python float of a
    module is one), rewriting fixes them in the op, and this adds the guards that say so. Token counts are never fixed.
    """
    x = match.x_TD.meta["example_value"]
    if x.device.type != "cpu":
        return _refuse(match, f"perseus ops run on cpu in this version, the layer is on {x.device}")
    if x.dtype not in SUPPORTED_DTYPES:
        supported = ", ".join(str(dtype) for dtype in SUPPORTED_DTYPES)
        return _refuse(match, f"the layer's dtype must be one of {supported}, got {x.dtype}")
    for symbol in match.symbols:
        # Reading the value is what adds the guard.
        (float if isinstance(symbol, torch.SymFloat) else int)(symbol)
    if match.router is not None:
        return MoEPlan(op="moe", device=x.device.type, dtype=x.dtype, why="router and experts are one node")
    return MoEPlan(op="experts", device=x.device.type, dtype=x.dtype, why=f"experts alone: {match.router_reason}")


def _refuse(match: MoEMatch, reason: str) -> Refusal:
    return Refusal(layer=match.layer, stage="plan", reason=reason, node=match.output.name)
