"""What does the matcher find in a layer? For tests that need no other rank, since matching moves nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from perseus_compile.backend import CAPTURE_SETTINGS
from perseus_compile.capture import aten_view
from perseus_compile.facts import MoEMatch, Refusal
from perseus_compile.passes.match_moe import find_moe_layers


class _Matched(BaseException):
    """Ends a compilation: nothing is to run on a group that moves nothing."""


def found_in(layer: nn.Module, x_TD: Tensor) -> list[MoEMatch | Refusal]:
    found: list[MoEMatch | Refusal] = []

    def only_match(gm: GraphModule, example_inputs: Any) -> Any:
        found.extend(find_moe_layers(aten_view(gm)))
        raise _Matched

    with torch._dynamo.config.patch(CAPTURE_SETTINGS), pytest.raises(_Matched):
        torch.compile(layer, backend=only_match, dynamic=True)(x_TD)
    return found


def reason_of(found: list[MoEMatch | Refusal]) -> str:
    """The sentence of the only refusal; names of nodes are left out, since they depend on the release of torch."""
    (refusal,) = found
    assert isinstance(refusal, Refusal)
    return re.sub(r" \(\w+\)", "", refusal.reason)
