"""verify=True: a rewrite that changes numbers is an error at compile time."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from spellings import BatchedMM, Experts, GroupedMM

import perseus_compile
from perseus_compile import backend
from perseus_compile.facts import MoEMatch, Refusal


def compile_and_call(layer: Experts, **kwargs: object) -> None:
    x = torch.randn(6, 8)
    torch.compile(
        layer, backend=perseus_compile.perseus, options={"inner": "eager", "verify": True}, **kwargs
    )(x)  # fmt: skip


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("spelling", (GroupedMM, BatchedMM))
def test_right_rewrites_pass(spelling: type[Experts], dynamic: bool) -> None:
    compile_and_call(spelling(bias=True), dynamic=dynamic)


# What a wrong matcher could say of a right layer.
WRONG = {
    "activation": lambda match: {"spec": dataclasses.replace(match.spec, activation="gelu")},
    "gate layout": lambda match: {"spec": dataclasses.replace(match.spec, gate_layout="interleaved")},
    "dropped bias": lambda match: {"down_bias": None},
    "another dropped bias": lambda match: {"gate_up_bias": None},
    "renormalisation": lambda match: {
        "router": dataclasses.replace(match.router, spec=dataclasses.replace(match.router.spec, renormalize=False))
    },
    "top-k": lambda match: {
        "router": dataclasses.replace(match.router, spec=dataclasses.replace(match.router.spec, top_k=1))
    },
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_matcher_made_wrong_is_caught(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = backend.find_moe_layers

    def wrong_layers(view: object) -> list[MoEMatch | Refusal]:
        return [dataclasses.replace(match, **WRONG[wrong](match)) for match in found(view)]

    monkeypatch.setattr(backend, "find_moe_layers", wrong_layers)
    torch.manual_seed(0)
    with pytest.raises(Exception, match="perseus::moe must give the numbers of the code that it replaces"):
        compile_and_call(BatchedMM(bias=True))
