"""Do loops over experts with weights of their own keep their numbers on a GPU, under Inductor and in CUDA graphs?"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from loops import ExpertLoop
from op_cases import Case, assert_near, make_case
from test_experts_list import as_lists, call, grads_of, lists_of

import perseus_compile
from perseus_compile import observe

pytestmark = pytest.mark.gpu


def _on_gpu(case: Case) -> Case:
    return Case(tuple(None if one is None else one.cuda() for one in case.tensors), case.numbers)


@pytest.mark.parametrize("apart", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_values_and_gradients(dtype: torch.dtype, apart: bool) -> None:
    case = make_case(dtype=dtype, num_tokens=40, width=64, inner=32, num_experts=9, expert_offset=3)
    exact = case.exact().leaves()
    grad = torch.randn(case["x"].shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = exact.reference()
    grads = iter(torch.autograd.grad(expected, exact.required(), grad.double()))
    by_name = [next(grads) if tensor is not None else None for i, tensor in enumerate(exact.tensors) if i != 1]
    on_gpu = _on_gpu(case)
    lists = lists_of(on_gpu, apart=apart)
    assert_near(call(on_gpu, lists).cpu(), expected, dtype)
    for actual, wanted in zip(grads_of(on_gpu, lists, grad.cuda()), as_lists(by_name, exact, apart=apart), strict=True):
        assert_near(actual.cpu(), wanted, dtype)


def test_replays_with_other_routing() -> None:
    """Counts are not read by the host while a graph is captured."""
    case = make_case(dtype=torch.bfloat16, num_tokens=24, width=64, inner=32)
    on_gpu = _on_gpu(case)
    lists = lists_of(on_gpu, apart=False)
    call(on_gpu, lists)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(on_gpu, lists)
    for shift in (1, 2):
        ids = (case["ids"] + shift) % 4
        on_gpu["ids"].copy_(ids)
        graph.replay()
        assert_near(out.cpu(), case.having(ids=ids).exact().reference(), torch.bfloat16)


@pytest.mark.parametrize("options", ({}, {"mode": "reduce-overhead"}), ids=("default", "reduce-overhead"))
def test_compiled_loop(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = ExpertLoop(width=64, expert_width=32).bfloat16().cuda()
    compiled = perseus_compile.compile(copy.deepcopy(layer), **options)
    exact = copy.deepcopy(layer).double()
    with torch.no_grad(), observe.collect() as reports:
        for seed in range(4):  # with CUDA graphs: warm up, record, replay
            x = torch.randn(20, 64, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()
            actual, eager, wanted = compiled(x).clone(), layer(x), exact(x.double())
            error, limit = ((one.double() - wanted).abs().median() for one in (actual, eager))
            assert error <= 1.5 * limit
    assert {layer.op for report in reports for layer in report.layers} == {"experts_list"}
