"""How a near-miss is checked: its numbers and gradients against eager, and what the matcher said about it."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
from spellings import Experts, changed
from torch import Tensor, nn

from perseus_compile import observe
from perseus_compile.backend import perseus


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer whose code is nearly a MoE.

    Attributes:
        name: what was changed.
        layer: makes the module; its parameters are random.
        outcome: golden text, one line per layer found: ``moe``, ``experts: why`` or ``refused: why``, without the names
            that Dynamo gives to nodes.
        num_tokens: T.
        gradients: False where the change writes in place, which autograd does not allow.
        dynamic: torch.compile's ``dynamic``.
    """

    name: str
    layer: Callable[[], nn.Module]
    outcome: str
    num_tokens: int = 5
    gradients: bool = True
    dynamic: bool | None = None


def check(case: Case) -> None:
    torch.manual_seed(0)
    layer = case.layer()
    x = torch.randn(case.num_tokens, 8)
    expected = run(copy.deepcopy(layer), x, case.gradients)
    with observe.collect() as reports:
        compiled = torch.compile(layer, backend=perseus, options={"inner": "eager"}, dynamic=case.dynamic)
        actual = run(compiled, x, case.gradients)
    found = outcome(reports)
    assert found == case.outcome, f"expected\n{case.outcome}\ngot\n{found}"
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, equal_nan=True)  # names what differs


def run(layer: Callable[..., object], x: Tensor, gradients: bool) -> dict[str, Tensor]:
    """Outputs, gradients of every input and parameter that has one, and what became of the input, by name."""
    leaf = x.clone().requires_grad_(gradients)
    given = leaf * 1
    with torch.set_grad_enabled(gradients):
        result = layer(given)
    outputs = [one for one in (result if isinstance(result, tuple) else (result,)) if isinstance(one, Tensor)]
    named = {f"output {i}": output.detach() for i, output in enumerate(outputs)} | {"x afterwards": given.detach()}
    differentiable = [output for output in outputs if output.requires_grad]
    if differentiable:
        # A cosine gives every element of the output its own weight.
        sum((output * torch.arange(output.numel()).cos().view_as(output)).sum() for output in differentiable).backward()
    parameters = dict(getattr(layer, "_orig_mod", layer).named_parameters())
    grads = {"x": leaf.grad} | {name: parameter.grad for name, parameter in parameters.items()}
    return named | {f"gradient of {name}": grad for name, grad in grads.items() if grad is not None}


def outcome(reports: list[observe.GraphReport]) -> str:
    lines = []
    for report in reports:
        lines += ["moe" if layer.op == "moe" else layer.why for layer in report.layers]
        lines += [f"refused: {refusal.reason}" for refusal in report.refusals]
    # Names of nodes, in parentheses, depend on the release of torch.
    return "\n".join(re.sub(r" \((?!the)\w+\)", "", line.replace("experts alone:", "experts:")) for line in lines)


def layer_of(
    spelling: type[Experts], *, options: dict[str, Any] | None = None, **steps: Any
) -> Callable[[], nn.Module]:
    """A maker of ``spelling`` with the methods in ``steps`` instead of its own."""
    return lambda: changed(spelling, **steps)(**(options or {}))
