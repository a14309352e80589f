"""Experts that are nearly MoE experts: refused with a sentence, or rewritten and right. Row order, weights and
sums: test_near_miss_rows. Routers: test_near_miss_router. In-place writes:
test_near_miss_writes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from near_miss import Case, check, layer_of
from spellings import BatchedMM, Experts, GroupedMM
from torch import Tensor, nn

from perseus_compile.backend import perseus

CLAMPED = {"limit": 0.7, "other_limit": 0.7, "alpha": 1.7, "one": 1.0}


def halves(hidden: Tensor) -> tuple[Tensor, Tensor]:
    return hidden.chunk(2, dim=-1)


def clamped_gate(layer: Any, hidden: Tensor) -> Tensor:
    gate, up = hidden[..., ::2], hidden[..., 1::2]
    gate = gate.clamp(min=None, max=layer.limit)
    up = up.clamp(min=-layer.other_limit, max=layer.other_limit)
    return (up + layer.one) * (gate * torch.sigmoid(gate * layer.alpha))


def clamped_numbers(layer: Any) -> None:
    for name, value in CLAMPED.items():
        setattr(layer, name, value)


def inplace_on_slice(layer: Experts, hidden: Tensor) -> Tensor:
    return F.silu(hidden[:, :12], inplace=True) * hidden[:, 12:]


def same_rows_two_experts(layer: Any, x: Tensor) -> Tensor:
    """Gate of one expert linear, up of another."""
    weights, ids = layer.route(x)
    flat, rows = ids.reshape(-1), layer.repeat(x)
    gate, _ = halves(layer.linear(rows, layer.gate_up, flat, flat))
    _, up = halves(layer.linear(rows, layer.gate_up * 2, flat, flat))
    out = layer.linear(F.silu(gate) * up, layer.down, flat, flat)
    return layer.combine(layer.weigh(out, weights.reshape(-1)), x)


def other_ids_for_down(layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    flat, other = ids.reshape(-1), ids.flip(1).reshape(-1)
    out = layer.second(layer.gate(layer.first(layer.repeat(x), flat, flat)), other, other)
    return layer.combine(layer.weigh(out, weights.reshape(-1)), x)


def weighted_halves(layer: Any, x: Tensor, *, gate: bool) -> Tensor:
    """The routing weight on one half of the hidden rows, and nowhere else."""
    weights, ids = layer.route(x)
    flat, column = ids.reshape(-1), weights.reshape(-1, 1)
    first, second = halves(layer.first(layer.repeat(x), flat, flat))
    gated = F.silu(first * column) * second if gate else F.silu(first) * (second * column)
    return layer.combine(layer.second(gated, flat, flat), x)


def no_grad_step(name: str, spelling: type[Experts]) -> Any:
    def step(layer: Experts, *args: Any) -> Any:
        with torch.no_grad():
            return getattr(spelling, name)(layer, *args)

    return step


def autocast_step(name: str, spelling: type[Experts]) -> Any:
    def step(layer: Experts, *args: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return getattr(spelling, name)(layer, *args).float()

    return step


def inner_value_is_read(layer: Any, x: Tensor) -> Tensor:
    return BatchedMM.forward(layer, x) + layer.seen.mean()


def remember_hidden(layer: Any, hidden: Tensor) -> Tensor:
    layer.seen = hidden
    return BatchedMM.gate(layer, hidden)


class SharedWeights(nn.Module):
    """Two layers with the same expert tensors and their own routers, the second on the first's output alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GroupedMM(), BatchedMM()
        self.second.gate_up, self.second.down = self.first.gate_up, self.first.down

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


GATES = (
    "the gate between the two expert linears must be one of silu, gelu, gelu_tanh, relu, relu2, clamped_swiglu, "
    "clamped_silu, softcapped_silu, got"
)
LOST = "has no meaning between the expert linears and the sum over choices"
SQUARE = {"width": 8, "expert_width": 8}
MIXED = "refused: aten.mul.Tensor mixes values of two expert linears"
BIASED = {"bias": True}

CASES = (
    # the gate
    Case(
        "tanh before the gate",
        layer_of(GroupedMM, gate=lambda m, h: GroupedMM.gate(m, h.tanh())),
        f"refused: aten.chunk.default {LOST}",
    ),
    Case(
        "gate and up swapped",
        layer_of(GroupedMM, gate=lambda m, h: F.silu(halves(h)[1]) * halves(h)[0]),
        f"refused: {GATES} mul(silu(second), first)",
    ),
    Case(
        "odd and even swapped",
        layer_of(BatchedMM, gate=lambda m, h: F.silu(h[:, 1::2]) * h[:, ::2]),
        f"refused: {GATES} mul(silu(odd), even)",
    ),
    Case(
        "even gate, second half",
        layer_of(BatchedMM, gate=lambda m, h: F.silu(h[:, ::2]) * h[:, 12:]),
        f"refused: {GATES} mul(silu(even), second)",
    ),
    Case(
        "halves that overlap",
        layer_of(GroupedMM, gate=lambda m, h: F.silu(h[:, 1:13]) * h[:, 12:]),
        f"refused: aten.slice.Tensor {LOST}",
    ),
    Case(
        "gate times gate",
        layer_of(GroupedMM, gate=lambda m, h: F.silu(halves(h)[0]) * halves(h)[0]),
        f"refused: {GATES} mul(silu(first), first)",
    ),
    Case(
        "silu twice",
        layer_of(BatchedMM, gate=lambda m, h: F.silu(F.silu(halves(h)[0])) * halves(h)[1]),
        f"refused: {GATES} mul(silu(silu(first)), second)",
    ),
    Case(
        "other alpha",
        layer_of(BatchedMM, gate=lambda m, h: halves(h)[0] * torch.sigmoid(1.702 * halves(h)[0]) * halves(h)[1]),
        f"refused: {GATES} mul(mul(first, sigmoid(mul(first, 1.702))), second)",
    ),
    Case(
        "a parameter in the gate",
        layer_of(BatchedMM, gate=lambda m, h: BatchedMM.gate(m, h) * m.router[0, 0]),
        f"refused: aten.mul.Tensor {LOST}",
    ),
    Case(
        "dropout in the gate",
        layer_of(BatchedMM, gate=lambda m, h: F.dropout(BatchedMM.gate(m, h), 1.0)),
        f"refused: aten.dropout.default {LOST}",
    ),
    Case(
        "in-place silu on a part",
        layer_of(BatchedMM, gate=inplace_on_slice),
        "refused: aten.silu_.default writes to a value that other nodes read",
        gradients=False,
    ),
    Case("in-place product", layer_of(BatchedMM, gate=lambda m, h: F.silu(halves(h)[0]).mul_(halves(h)[1])), "moe"),
    Case(
        "gate and up of two linears",
        layer_of(BatchedMM, forward=same_rows_two_experts),
        f"{MIXED}\n{MIXED}",
    ),
    Case(
        "hidden rows read outside",
        layer_of(BatchedMM, forward=inner_value_is_read, gate=remember_hidden),
        "refused: aten.squeeze.dim inside it is also read by aten.mean.default",
    ),
    Case("clamped gate", layer_of(BatchedMM, prepare=clamped_numbers, gate=clamped_gate), "moe"),
    Case(
        "weight on gate alone",
        layer_of(BatchedMM, forward=lambda m, x: weighted_halves(m, x, gate=True)),
        f"refused: aten.mul.Tensor {LOST}",
    ),
    Case(
        "weight on up alone",
        layer_of(BatchedMM, forward=lambda m, x: weighted_halves(m, x, gate=False)),
        f"refused: aten.mul.Tensor {LOST}",
    ),
    Case(
        "norm of the gated rows",
        layer_of(GroupedMM, gate=lambda m, h: F.rms_norm(GroupedMM.gate(m, h), (12,))),
        f"refused: aten.rms_norm.default {LOST}",
    ),
    Case(
        "norm of the hidden rows",
        layer_of(BatchedMM, gate=lambda m, h: BatchedMM.gate(m, F.layer_norm(h, (24,)))),
        f"refused: aten.layer_norm.default {LOST}",
    ),
    Case(
        "relu after the gate",
        layer_of(BatchedMM, gate=lambda m, h: F.relu(BatchedMM.gate(m, h))),
        f"refused: {GATES} relu(mul(silu(first), second))",
    ),
    # the linears
    Case(
        "norm between down and weight",
        layer_of(GroupedMM, weigh=lambda m, r, w: GroupedMM.weigh(m, F.layer_norm(r, (8,)), w)),
        "experts: aten.layer_norm.default comes between the experts and their routing weights",
    ),
    Case(
        "square weight transposed, grouped",
        layer_of(GroupedMM, options=SQUARE, second=lambda m, r, i, e: m.linear(r, m.down.transpose(1, 2), i, e)),
        "refused: the two expert weights are stored in different layouts, out_in and in_out",
    ),
    Case(
        "square weight transposed, batched",
        layer_of(BatchedMM, options=SQUARE, second=lambda m, r, i, e: m.linear(r, m.down.transpose(1, 2), i, e)),
        "moe",
    ),
    Case(
        "weight swapped by permute",
        layer_of(
            GroupedMM, linear=lambda m, r, w, i, e: torch.ops.transformers.grouped_mm_fallback(r, w.permute(0, 2, 1), e)
        ),
        "moe",
    ),
    Case(
        "weight made in the graph",
        layer_of(BatchedMM, first=lambda m, r, i, e: m.linear(r, m.gate_up * 2, i, e)),
        "moe",
    ),
    Case(
        "one expert expanded to all",
        layer_of(GroupedMM, first=lambda m, r, i, e: m.linear(r, m.gate_up[:1].expand(4, -1, -1), i, e)),
        "moe",
    ),
    Case(
        "experts that mix weights",
        layer_of(GroupedMM, first=lambda m, r, i, e: m.linear(r, (m.gate_up + m.gate_up.flip(0)) / 2, i, e)),
        "moe",
    ),
    Case(
        "experts that share weights",
        layer_of(BatchedMM, first=lambda m, r, i, e: m.linear(r, m.gate_up[:2].repeat(2, 1, 1), i, e)),
        "moe",
    ),
    Case(
        "weights of the next expert",
        layer_of(BatchedMM, second=lambda m, r, i, e: m.linear(r, m.down, (i + 1) % 4, e)),
        f"refused: aten.bmm.default {LOST}",
    ),
    Case("detached weight", layer_of(GroupedMM, second=lambda m, r, i, e: m.linear(r, m.down.detach(), i, e)), "moe"),
    Case(
        "other ids for down",
        layer_of(BatchedMM, experts=other_ids_for_down),
        "refused: aten.bmm.default uses other expert ids than the first expert linear",
    ),
    Case(
        "bias of other experts",
        layer_of(BatchedMM, options=BIASED, add_bias=lambda m, r, b, i: r + b[i.flip(0)]),
        f"refused: aten.add.Tensor {LOST}",
    ),
    Case(
        "a second bias",
        layer_of(GroupedMM, options=BIASED, second=lambda m, r, i, e: GroupedMM.second(m, r, i, e) + m.down_bias[i]),
        "refused: aten.add.Tensor adds a second bias",
    ),
    Case(
        "a scaled bias",
        layer_of(GroupedMM, options=BIASED, add_bias=lambda m, r, b, i: torch.add(r, b[i], alpha=2)),
        "refused: aten.add.Tensor scales the bias by 2",
    ),
    Case(
        "one bias value per expert",
        layer_of(BatchedMM, options=BIASED, add_bias=lambda m, r, b, i: r + b[:, :1][i]),
        "refused: gate_up_bias must be [E, 2F] = [4, 24], got [4, 1]; check weight_layout and the other shapes",
    ),
    Case("in-place bias", layer_of(GroupedMM, options=BIASED, add_bias=lambda m, r, b, i: r.add_(b[i])), "moe"),
    # modes and coincidences
    Case(
        "first linear without gradient",
        layer_of(BatchedMM, first=no_grad_step("first", BatchedMM)),
        "refused: its nodes run under different gradient or autocast modes",
    ),
    Case(
        "second linear under autocast",
        layer_of(BatchedMM, second=autocast_step("second", BatchedMM)),
        "refused: its nodes run under different gradient or autocast modes",
    ),
    Case(
        "T == K == E == D == F",
        layer_of(GroupedMM, options={"num_experts": 8, "top_k": 8, "expert_width": 8}),
        "moe",
        num_tokens=8,
    ),
    Case(
        "one token, one choice, one expert",
        layer_of(BatchedMM, options={"num_experts": 1, "top_k": 1}),
        "moe",
        num_tokens=1,
    ),
    Case("layers that share weights", SharedWeights, "moe\nmoe"),
    Case(
        "a layer inside func.grad",
        layer_of(BatchedMM, forward=lambda m, x: torch.func.grad(lambda y: BatchedMM.forward(m, y).sum())(x)),
        "refused: it runs under a transform of torch.func",
        gradients=False,
    ),
    Case(
        "a layer inside vmap",
        layer_of(BatchedMM, forward=lambda m, x: torch.func.vmap(lambda y: BatchedMM.forward(m, y))(x[None])[0]),
        "refused: it runs under a transform of torch.func",
        gradients=False,
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_near_miss(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("name", CLAMPED)
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_number_that_changes_later(name: str, dynamic: bool | None) -> None:
    """The rewrite fixes numbers of the gate; each that Dynamo made an input of the graph must be guarded."""
    torch.manual_seed(0)
    layer = layer_of(BatchedMM, prepare=clamped_numbers, gate=clamped_gate)()
    compiled = torch.compile(layer, backend=perseus, options={"inner": "eager"}, dynamic=dynamic)
    x = torch.randn(5, 8)
    for value in (CLAMPED[name], 0.3, 1.3, 1.0, CLAMPED[name]):
        setattr(layer, name, value)
        torch.testing.assert_close(compiled(x), BatchedMM.forward(layer, x), rtol=1e-4, atol=1e-5)
