"""What stands between the two expert linears: every activation of the op matches, and what is nearly one is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from near_miss import Case, check, layer_of
from spellings import BatchedMM, Experts, GroupedMM, changed
from torch import Tensor

from perseus_compile import observe
from perseus_compile.backend import perseus

KNOWN = (
    "the gate between the two expert linears must be one of silu, gelu, gelu_tanh, relu, relu2, clamped_swiglu, "
    "clamped_silu, softcapped_silu, got"
)


def gated(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Experts, Tensor], Tensor]:
    return lambda layer, hidden: function(*hidden.chunk(2, dim=-1))


def ungated(function: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Steps of a layer whose first linear has no up half."""

    def prepare(layer: Experts) -> None:
        layer.down = torch.nn.Parameter(layer._stack(layer.width, layer.gate_up.shape[1]))

    return {"gate": lambda layer, hidden: function(hidden), "prepare": prepare}


def softcap(value: Tensor, cap: float) -> Tensor:
    return torch.tanh(value / cap) * cap


def clamped_silu(gate: Tensor, up: Tensor, limit: float = 0.5) -> Tensor:
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def softcapped_silu(gate: Tensor, up: Tensor, *, gate_cap: float = 0.5, up_cap: float = 0.75) -> Tensor:
    return softcap(gate, gate_cap) * torch.sigmoid(gate) * softcap(up, up_cap)


# name: the step, the words of the op
MATCHES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "relu2 without a gate": (
        ungated(lambda h: F.relu(h).square()),
        ("activation: relu2", "gate_layout: none"),
    ),
    "relu2 as a power": (ungated(lambda h: F.relu(h) ** 2), ("activation: relu2", "gate_layout: none")),
    "relu without a gate": (ungated(F.relu), ("activation: relu}", "gate_layout: none")),
    "gelu without a gate": (ungated(F.gelu), ("activation: gelu}", "gate_layout: none")),
    "relu2 with a gate": (
        {"gate": gated(lambda g, u: F.relu(g).square() * u)},
        ("num_experts: 4,", "activation: relu2}"),
    ),
    "clamped silu": ({"gate": gated(clamped_silu)}, ("activation: clamped_silu", "activation_params: [0.5]")),
    "softcapped silu": (
        {"gate": gated(softcapped_silu)},
        ("activation: softcapped_silu", "activation_params: [0.5, 0.75]"),
    ),
}


@pytest.mark.parametrize("spelling", (GroupedMM, BatchedMM))
@pytest.mark.parametrize("name", MATCHES)
def test_it_matches(name: str, spelling: type[Experts]) -> None:
    steps, words = MATCHES[name]
    torch.manual_seed(0)
    layer = changed(spelling, **steps)()
    x = torch.randn(5, 8)
    compiled = torch.compile(layer, backend=perseus, options={"inner": "eager", "verify": True})
    with observe.collect() as reports, torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))
    (report,) = reports
    (found,) = report.layers
    text = " ".join(word for line in found.graph_diff.splitlines() for word in line[1:].split())
    assert found.op == "moe" and all(word in text for word in words), text


@pytest.mark.parametrize("name", MATCHES)
def test_gradients(name: str) -> None:
    check(Case(name, layer_of(GroupedMM, **MATCHES[name][0]), "moe"))


def test_a_gate_in_float32_between_bfloat16_linears() -> None:
    """Rounded once less than the op's own; the second linear takes bfloat16 rows again."""

    def gate(layer: Experts, hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return (F.silu(gate.float()) * up.float()).to(hidden.dtype)

    torch.manual_seed(0)
    layer = changed(BatchedMM, gate=gate)().to(torch.bfloat16)
    x = torch.randn(5, 8, dtype=torch.bfloat16)
    compiled = torch.compile(layer, backend=perseus, options={"inner": "eager", "verify": True})
    with observe.collect() as reports, torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x), rtol=2e-2, atol=2e-2)
    assert [found.op for report in reports for found in report.layers] == ["moe"]


NEAR_MISSES = (
    Case("tanh", layer_of(GroupedMM, **ungated(torch.tanh)), f"refused: {KNOWN} tanh(all)"),
    Case(
        "square of a leaky relu",
        layer_of(BatchedMM, **ungated(lambda h: F.relu(h + 0.1).square())),
        f"refused: {KNOWN} square(relu(add(all, 0.1)))",
    ),
    Case(
        "silu clamped on one side only",
        layer_of(GroupedMM, gate=gated(lambda g, u: F.silu(g.clamp(max=0.5)) * u.clamp(max=0.5))),
        f"refused: {KNOWN} mul(silu(clamp(first, None, 0.5)), clamp(second, None, 0.5))",
    ),
    Case(
        "silu with two limits",
        layer_of(GroupedMM, gate=gated(lambda g, u: F.silu(g.clamp(max=0.5)) * u.clamp(-0.25, 0.25))),
        f"refused: {KNOWN} mul(silu(clamp(first, None, 0.5)), clamp(second, -0.25, 0.25))",
    ),
    Case(
        "the sigmoid sees the capped gate",
        layer_of(
            BatchedMM, gate=gated(lambda g, u: softcap(g, 0.5) * torch.sigmoid(softcap(g, 0.5)) * softcap(u, 0.5))
        ),
        f"refused: {KNOWN} mul(mul(mul(tanh(div(first, 0.5)), 0.5), sigmoid(mul(tanh(div(first, 0.5)), 0.5))), "
        "mul(tanh(div(second, 0.5)), 0.5))",
    ),
    Case(
        "a cap of another number",
        layer_of(
            GroupedMM,
            gate=gated(lambda g, u: torch.tanh(g / 0.5) * 0.25 * torch.sigmoid(g) * softcap(u, 0.75)),
        ),
        f"refused: {KNOWN} mul(mul(mul(tanh(div(first, 0.5)), 0.25), sigmoid(first)), "
        "mul(tanh(div(second, 0.75)), 0.75))",
    ),
    Case(
        "a gate rounded to bfloat16",
        layer_of(GroupedMM, gate=gated(lambda g, u: F.silu(g.bfloat16()).float() * u)),
        "refused: aten.to.dtype changes the dtype inside an expert to torch.bfloat16",
    ),
)


@pytest.mark.parametrize("case", NEAR_MISSES, ids=lambda case: case.name)
def test_it_nearly_matches(case: Case) -> None:
    check(case)
