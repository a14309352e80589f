"""The whole way on a GPU: compiled models become one perseus node per layer and keep their numbers and gradients."""

from __future__ import annotations

import copy

import pytest
import torch

import perseus_compile
from perseus_compile import observe
from perseus_compile.testing.models import MODEL_TYPES, tiny_causal_lm

pytestmark = pytest.mark.gpu

# A compiled model may be this much farther from float64 than eager is; medians, since ties flip single tokens.
ERROR_FACTOR = 1.5


def model_on_gpu(model_type: str, implementation: str = "grouped_mm") -> torch.nn.Module:
    return tiny_causal_lm(model_type, dtype=torch.bfloat16, implementation=implementation).cuda()


def token_ids(num_tokens: int) -> torch.Tensor:
    return torch.randint(0, 100, (2, num_tokens), generator=torch.Generator().manual_seed(1)).cuda()


def float64_copy(model: torch.nn.Module) -> torch.nn.Module:
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("batched_mm")
    return exact


def median_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double() - exact).abs().median())


@pytest.mark.parametrize("implementation", ("grouped_mm", "batched_mm"))
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_inference(model_type: str, implementation: str) -> None:
    model = model_on_gpu(model_type, implementation).eval()
    compiled = copy.deepcopy(model)
    compiled.compile(backend=perseus_compile.perseus, dynamic=True, options={"inner": "aot_eager", "verify": True})
    with torch.no_grad(), observe.collect() as reports:
        logits = compiled(token_ids(33), use_cache=False).logits
        eager = model(token_ids(33), use_cache=False).logits
        exact = float64_copy(model)(token_ids(33), use_cache=False).logits
    assert [refusal for report in reports for refusal in report.refusals] == []
    assert {layer.op for report in reports for layer in report.layers} == {"moe"}
    assert median_error(logits, exact) <= ERROR_FACTOR * median_error(eager, exact)


@pytest.mark.parametrize("model_type", ("qwen3_moe", "deepseek_v3", "gpt_oss"))
def test_gradients(model_type: str) -> None:
    model = model_on_gpu(model_type).train()
    compiled, exact = copy.deepcopy(model), float64_copy(model)
    compiled.compile(backend=perseus_compile.perseus, dynamic=True, options={"inner": "aot_eager"})
    for each in (model, compiled, exact):
        each(token_ids(33), labels=token_ids(33), use_cache=False).loss.backward()
    for (name, actual), eager, wanted in zip(
        compiled.named_parameters(), model.parameters(), exact.parameters(), strict=True
    ):
        assert (actual.grad is None) == (eager.grad is None), name
        if eager.grad is not None:
            noise = 1e-3 * float(wanted.grad.abs().max())
            own = median_error(eager.grad, wanted.grad)
            assert median_error(actual.grad, wanted.grad) <= max(ERROR_FACTOR * own, noise), name


def test_cuda_graphs_of_inductor() -> None:
    model = model_on_gpu("qwen3_moe").eval()
    compiled = copy.deepcopy(model)
    compiled.compile(backend=perseus_compile.perseus, mode="reduce-overhead")
    with torch.no_grad(), observe.collect() as reports:
        for seed in range(4):  # warm up, record, replay with other routing
            ids = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(seed)).cuda()
            logits = compiled(ids, use_cache=False).logits.clone()
            eager = model(ids, use_cache=False).logits
            assert float((logits - eager).float().abs().median()) < 0.02
    assert [len(report.layers) for report in reports] == [2]


def test_generate() -> None:
    model = model_on_gpu("qwen3_moe").eval()
    compiled = copy.deepcopy(model)
    compiled.compile(backend=perseus_compile.perseus, options={"inner": "eager"})
    settings = {"max_new_tokens": 4, "do_sample": False}
    with observe.collect() as reports:
        tokens = compiled.generate(token_ids(5), **settings)
    assert tokens.shape == (2, 9)
    assert {layer.op for report in reports for layer in report.layers} == {"moe"}


def test_float32_layers_keep_their_own_code() -> None:
    model = tiny_causal_lm("qwen3_moe", dtype=torch.float32).cuda().eval()
    compiled = copy.deepcopy(model)
    compiled.compile(backend=perseus_compile.perseus, options={"inner": "eager"})
    with torch.no_grad(), observe.collect() as reports:
        torch.testing.assert_close(
            compiled(token_ids(9), use_cache=False).logits, model(token_ids(9), use_cache=False).logits
        )
    (reason,) = {refusal.reason for report in reports for refusal in report.refusals}
    assert reason == "a grouped GEMM on 'cuda' without a host wait needs dtype bfloat16, got torch.float32"
