"""The whole way on a GPU: compiled models become one perseus node per layer and keep their numbers and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from closeness import ERROR_FACTOR, float64_copy, gradients_by_group, token_ids

import perseus_compile
from perseus_compile import observe
from perseus_compile.testing.models import MODEL_TYPES, tiny_causal_lm

pytestmark = pytest.mark.gpu


def model_on_gpu(model_type: str, implementation: str = "grouped_mm") -> torch.nn.Module:
    return tiny_causal_lm(model_type, dtype=torch.bfloat16, implementation=implementation).cuda()


def median_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double() - exact).abs().median())


@pytest.mark.parametrize("implementation", ("grouped_mm", "batched_mm"))
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_inference(model_type: str, implementation: str) -> None:
    model = model_on_gpu(model_type, implementation).eval()
    compiled = copy.deepcopy(model)
    compiled.compile(backend=perseus_compile.perseus, dynamic=True, options={"inner": "aot_eager", "verify": True})
    with torch.no_grad(), observe.collect() as reports:
        logits = compiled(token_ids(33).cuda(), use_cache=False).logits
        eager = model(token_ids(33).cuda(), use_cache=False).logits
        exact = float64_copy(model)(token_ids(33).cuda(), use_cache=False).logits
    assert [refusal for report in reports for refusal in report.refusals] == []
    assert {layer.op for report in reports for layer in report.layers} == {"moe"}
    assert median_error(logits, exact) <= ERROR_FACTOR * median_error(eager, exact)


@pytest.mark.parametrize("model_type", ("qwen3_moe", "deepseek_v3", "gpt_oss"))
def test_gradients(model_type: str) -> None:
    model = model_on_gpu(model_type).train()
    compiled, exact = copy.deepcopy(model), float64_copy(model)
    compiled.compile(backend=perseus_compile.perseus, dynamic=True, options={"inner": "aot_eager"})
    for each in (model, compiled, exact):
        each(token_ids(33).cuda(), labels=token_ids(33).cuda(), use_cache=False).loss.backward()
    for name, (actual, eager, wanted) in gradients_by_group(compiled, model, exact).items():
        noise = 1e-3 * float(wanted.abs().max())
        assert median_error(actual, wanted) <= max(ERROR_FACTOR * median_error(eager, wanted), noise), name


@pytest.mark.parametrize("mode", (None, "reduce-overhead"))
@pytest.mark.parametrize("model_type", ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"))
def test_inductor_replays_with_other_routing(model_type: str, mode: str | None) -> None:
    model = model_on_gpu(model_type).eval()
    compiled = copy.deepcopy(model)
    compiled.compile(backend=perseus_compile.perseus, fullgraph=True, **({"mode": mode} if mode else {}))
    exact = float64_copy(model)
    with torch.no_grad(), observe.collect() as reports:
        for seed in range(4):  # with CUDA graphs: warm up, record, replay
            ids = token_ids(16, seed=seed).cuda()
            logits = compiled(ids, use_cache=False).logits.clone()
            eager, wanted = (each(ids, use_cache=False).logits for each in (model, exact))
            assert median_error(logits, wanted) <= ERROR_FACTOR * median_error(eager, wanted)
    assert [refusal for report in reports for refusal in report.refusals] == []
    assert {layer.op for report in reports for layer in report.layers} == {"moe"}


def test_generate() -> None:
    model = model_on_gpu("qwen3_moe").eval()
    compiled = copy.deepcopy(model)
    compiled.compile(backend=perseus_compile.perseus, options={"inner": "eager"})
    settings = {"max_new_tokens": 4, "do_sample": False}
    with observe.collect() as reports:
        tokens = compiled.generate(token_ids(5).cuda(), **settings)
    assert tokens.shape == (2, 9)
    assert {layer.op for report in reports for layer in report.layers} == {"moe"}


def test_float32_layers_keep_their_own_code() -> None:
    model = tiny_causal_lm("qwen3_moe", dtype=torch.float32).cuda().eval()
    compiled = copy.deepcopy(model)
    compiled.compile(backend=perseus_compile.perseus, options={"inner": "eager"})
    with torch.no_grad(), observe.collect() as reports:
        torch.testing.assert_close(
            compiled(token_ids(9).cuda(), use_cache=False).logits, model(token_ids(9).cuda(), use_cache=False).logits
        )
    (reason,) = {refusal.reason for report in reports for refusal in report.refusals}
    assert reason == "a grouped GEMM on 'cuda' without a host wait needs dtype bfloat16, got torch.float32"
