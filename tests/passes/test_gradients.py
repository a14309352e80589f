"""Gradients through rewritten layers equal eager's, whatever runs without a gradient."""

from __future__ import annotations

import pytest
import torch
from spellings import BatchedMM, Experts, GroupedMM, changed
from torch import Tensor

import perseus_compile
from perseus_compile import observe


def no_grad_router(layer: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return Experts.route(layer, x)


def no_grad_choice(layer: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
    """Only the ids come from a no_grad region, which changes no gradient."""
    scores = torch.nn.functional.linear(x, layer.router).sigmoid()
    with torch.no_grad():
        ids = torch.topk(scores, layer.top_k, dim=-1)[1]
    return scores.gather(1, ids), ids


def detached_weights(layer: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = Experts.route(layer, x)
    return weights.detach(), ids


def detached_tokens(layer: Experts, x: Tensor) -> Tensor:
    return x.detach()


def gradients(call: object, layer: Experts, x: Tensor) -> dict[str, Tensor | None]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    call(x).square().sum().backward()
    return {"x": x.grad, **{name: parameter.grad for name, parameter in layer.named_parameters()}}


CASES = {
    "all": ({}, "moe"),
    "router without gradient": ({"route": no_grad_router}, "experts"),
    "choice without gradient": ({"route": no_grad_choice}, "moe"),
    "detached weights": ({"route": detached_weights}, "experts"),
    "detached tokens": ({"tokens": detached_tokens}, "experts"),
}


@pytest.mark.parametrize("spelling", (GroupedMM, BatchedMM))
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_every_input(case: str, spelling: type[Experts]) -> None:
    steps, op = CASES[case]
    torch.manual_seed(0)
    layer = changed(spelling, **steps)(bias=True)
    x = torch.randn(6, 8)
    with observe.collect() as reports:
        compiled = torch.compile(layer, backend=perseus_compile.perseus, options={"inner": "aot_eager"})
        actual = gradients(compiled, layer, x)
    expected = gradients(layer, layer, x)
    assert [layer.op for report in reports for layer in report.layers] == [op]
    for name, gradient in expected.items():
        assert (actual[name] is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(actual[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("frozen", (("gate_up", "down"), ("router",), ("gate_up",)))
def test_frozen_parameters_get_no_gradient(frozen: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    layer = BatchedMM()
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    x = torch.randn(6, 8)
    compiled = torch.compile(layer, backend=perseus_compile.perseus, options={"inner": "aot_eager"})
    actual = gradients(compiled, layer, x)
    expected = gradients(layer, layer, x)
    assert {name for name, gradient in actual.items() if gradient is None} == set(frozen)
    for name, gradient in expected.items():
        if gradient is not None:
            torch.testing.assert_close(actual[name], gradient)
