"""Public threads about wrong numbers and empty ranks. Each test is named by its thread; the inputs are our own.

Axes: T tokens, K choices per token, E experts, D model width, F expert width.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eager_twin import outcome_of
from op_cases import Watch
from spellings import BatchedMM, GroupedMM, changed, chosen_softmax_router, softmax_router
from torch import Tensor

from perseus_compile import lower, observe, reference
from perseus_compile.backend import perseus
from perseus_compile.facts import ExpertsSpec
from perseus_compile.testing.models import tiny_causal_lm

E, D, K = 4, 16, 2
SPEC = ExpertsSpec(weight_layout="out_in", gate_layout="concatenated", activation="silu", num_experts=E)


def _expert_weights(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """gate_up [E, 2F, D] and down [E, D, F] with F = 32."""
    generator = torch.Generator().manual_seed(0)
    gate_up, down = (torch.randn(shape, generator=generator) * 0.2 for shape in ((E, 64, D), (E, D, 32)))
    return gate_up.to(dtype).requires_grad_(), down.to(dtype).requires_grad_()


def _routed(num_tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, D], ids and weights [T, K]."""
    generator = torch.Generator().manual_seed(1)
    x_TD = torch.randn(num_tokens, D, generator=generator).to(dtype).requires_grad_()
    ids_TK = torch.rand(num_tokens, E, generator=generator).argsort(dim=-1)[:, :K]
    return x_TD, ids_TK, torch.rand(num_tokens, K, generator=generator).to(dtype).requires_grad_()


def _experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, **numbers: Any) -> Tensor:
    return torch.ops.perseus.experts(x, ids, weights, gate_up, None, down, None, **{"num_experts": E, **numbers})


@contextlib.contextmanager
def _unwritten_memory_is_nan() -> Iterator[None]:
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills what torch.empty returns
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(was)


@pytest.mark.parametrize("num_tokens", (0, 224))
def test_pytorch_192497(num_tokens: int) -> None:
    """A rank none of whose experts has a token trains under compile: zeros, and gradients of zero."""
    x, ids, weights = _routed(num_tokens, torch.bfloat16)
    gate_up, down = _expert_weights(torch.bfloat16)
    compiled = torch.compile(_experts, backend="inductor", dynamic=True)
    output = compiled(x, ids, weights, gate_up, down, num_experts=2 * E, expert_offset=E)
    output.float().sum().backward()
    assert output.shape == (num_tokens, D)
    assert not output.any()
    for tensor in (x, weights, gate_up, down):
        assert tensor.grad is not None and not tensor.grad.any()


@pytest.mark.parametrize("dropped", (0.3, 1.0))
def test_torchtitan_1237_pytorch_154557(dropped: float) -> None:
    """Rows of no expert never reach the sum: nothing that was not written is read, forward or backward."""
    x, ids, weights = _routed(40)
    gate_up, down = _expert_weights()
    is_dropped = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < dropped
    ids = ids.masked_fill(is_dropped, E)
    with _unwritten_memory_is_nan():
        output = _experts(x, ids, weights, gate_up, down, num_experts=E + 1)
        output.square().sum().backward()
    kept = weights.masked_fill(is_dropped, 0)
    expected = reference.experts(x, ids.clamp(max=E - 1), kept, gate_up, None, down, None, **SPEC.as_kwargs())
    torch.testing.assert_close(output, expected)
    assert all(tensor.grad.isfinite().all() for tensor in (x, weights, gate_up, down))


def test_transformers_46743() -> None:
    """Aligned bfloat16 experts run on any CPU: the grouped GEMM, which some builds lack there, is not called."""
    block = tiny_causal_lm("qwen3_moe", dtype=torch.bfloat16).model.layers[0].mlp
    x_BTD = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    compiled = torch.compile(block, backend=perseus, options={"inner": "eager"})
    with torch.no_grad(), observe.collect() as graphs:
        torch.testing.assert_close(compiled(x_BTD), block(x_BTD), rtol=0.02, atol=0.02)
    (layer,) = graphs[0].layers
    grouped = [line[0] for line in layer.graph_diff.splitlines() if "grouped_mm" in line]
    assert grouped == ["-", "-"]
    with torch.no_grad(), Watch() as watch:
        _experts(*_routed(40, torch.bfloat16), *_expert_weights(torch.bfloat16))
    assert watch.names and not any("grouped_mm" in name for name in watch.names)


@pytest.mark.parametrize("is_compiled", (False, True))
def test_sglang_25397_uccl_882(is_compiled: bool) -> None:
    """A rank without tokens, ids [0, K]: an empty result, and zero gradients of the weights."""
    x, ids, weights = _routed(0)
    gate_up, down = _expert_weights()
    call = torch.compile(_experts, backend="aot_eager", dynamic=True) if is_compiled else _experts
    output = call(x, ids, weights, gate_up, down)
    output.sum().backward()
    assert output.shape == (0, D)
    assert not gate_up.grad.any() and not down.grad.any()


@pytest.mark.parametrize("stale_id", (-1, E, 2**40, -(2**62)))
def test_deepep_739(stale_id: int) -> None:
    """Rows past the valid count of a buffer hold anything: valid tokens and all gradients are as without them."""
    x, ids, weights = _routed(12)
    gate_up, down = _expert_weights()
    _experts(x, ids, weights, gate_up, down).square().sum().backward()
    wanted = [tensor.grad for tensor in (gate_up, down)]
    expected = _experts(x, ids, weights, gate_up, down).detach()

    buffer_x = torch.cat([x.detach(), torch.full((20, D), torch.nan)]).requires_grad_()
    buffer_ids = torch.cat([ids, torch.full((20, K), stale_id)])
    buffer_weights = torch.cat([weights.detach(), torch.full((20, K), torch.nan)]).requires_grad_()
    gate_up.grad = down.grad = None
    output = _experts(buffer_x, buffer_ids, buffer_weights, gate_up, down)
    output[:12].square().sum().backward()
    torch.testing.assert_close(output[:12], expected)
    torch.testing.assert_close([gate_up.grad, down.grad], wanted)
    torch.testing.assert_close(buffer_x.grad, torch.cat([x.grad, torch.zeros(20, D)]))


def test_vllm_39593() -> None:
    """NaN in padding rows: whatever experts they choose, the other rows are as without them."""
    torch.manual_seed(0)
    layer = GroupedMM()
    x = torch.randn(8, 8)
    poisoned = x.clone()
    poisoned[5:] = torch.nan
    compiled = torch.compile(layer, backend=perseus, options={"inner": "eager"})
    with torch.no_grad(), observe.collect() as graphs:
        torch.testing.assert_close(compiled(poisoned)[:5], layer(x)[:5])
        assert compiled(poisoned)[5:].isnan().all()
    assert outcome_of(graphs).ops == ["moe"]


def test_vllm_37758() -> None:
    """The same expert K times for one token: its output is added K times."""
    x, ids, weights = _routed(6)
    gate_up, down = _expert_weights()
    same = ids[:, :1].expand_as(ids)
    once = _experts(x, ids[:, :1], weights.sum(dim=-1, keepdim=True), gate_up, down)
    torch.testing.assert_close(_experts(x, same, weights, gate_up, down), once)


@pytest.mark.parametrize("renormalize", (False, True))
def test_sglang_35160(renormalize: bool) -> None:
    """Without renormalising, the weights are the chosen probabilities, never the logits."""
    block = tiny_causal_lm("qwen2_moe", norm_topk_prob=renormalize).model.layers[0].mlp
    x = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(block, backend=perseus, options={"inner": "eager"})
    with torch.no_grad(), observe.collect() as graphs:
        torch.testing.assert_close(compiled(x), block(x))
        probabilities = F.linear(x[0], block.gate.weight).softmax(dim=-1)
        weights_TK, ids_TK = probabilities.topk(block.gate.top_k, dim=-1)
        if renormalize:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        routed = block.experts(x[0], ids_TK, weights_TK)
        shared = block.shared_expert(x[0]) * torch.sigmoid(block.shared_expert_gate(x[0]))
        torch.testing.assert_close(compiled(x)[0], routed + shared)
    assert outcome_of(graphs).ops == ["moe"]
    assert ("renormalize: True" in graphs[0].graph_diff) == renormalize


def test_megatron_lm_955() -> None:
    """Softmax before or after the top-k: two routers, two results, each that of its own code."""
    torch.manual_seed(0)
    first = changed(BatchedMM, route=softmax_router)()
    second = changed(BatchedMM, route=chosen_softmax_router)()
    second.load_state_dict(first.state_dict())
    x = torch.randn(6, 8)
    results = []
    for layer, routing in ((first, "softmax_topk"), (second, "topk_softmax")):
        torch._dynamo.reset()
        with torch.no_grad(), observe.collect() as graphs:
            results.append(torch.compile(layer, backend=perseus, options={"inner": "eager"})(x))
            torch.testing.assert_close(results[-1], layer(x))
        assert outcome_of(graphs).ops == ["moe"]
        # The default of the op is left out of the node.
        assert ("topk_softmax" in graphs[0].graph_diff) == (routing == "topk_softmax")
    assert not torch.allclose(*results)


def test_megatron_lm_955_mixtral() -> None:
    """Mixtral renormalises after its softmax, which is the softmax of the chosen logits."""
    block = tiny_causal_lm("mixtral").model.layers[0].mlp
    x = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits_TK, ids_TK = F.linear(x[0], block.gate.weight).topk(block.gate.top_k, dim=-1)
        expected = block.experts(x[0], ids_TK, logits_TK.softmax(dim=-1))
        actual = torch.compile(block, backend=perseus, options={"inner": "eager"})(x)
    torch.testing.assert_close(actual[0], expected)


def test_tensorrt_llm_16919() -> None:
    """Another token count at every step: one graph, and one kernel, since neither knows the count."""
    torch.manual_seed(0)
    layer = GroupedMM()
    twin = copy.deepcopy(layer)
    compiled = torch.compile(layer, backend=perseus, dynamic=True, options={"inner": "aot_eager"})
    with torch.no_grad(), observe.collect() as graphs:
        for num_tokens in (2, 3, 17, 64, 5, 1000, 4):
            x = torch.randn(num_tokens, 8)
            torch.testing.assert_close(compiled(x), twin(x))
    assert [len(graph.layers) for graph in graphs] == [1]
    gate_up, down = (lower.whole_arg(tensor) for tensor in _expert_weights())
    specs = set()
    for num_tokens in (1, 64, 4096):
        x, ids, weights = (lower.token_arg(tensor) for tensor in _routed(num_tokens))
        specs.add(lower.lower(lower.ExpertsArgs(x, ids, weights, gate_up, None, down, None), SPEC))
    assert len(specs) == 1
