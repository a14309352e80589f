"""Every named family: exact rewrite counts, and numbers and gradients as close to float64 as eager's own."""

from __future__ import annotations

import copy

import pytest
import torch
from closeness import ERROR_FACTOR, float64_copy, gradients_by_group, token_ids

import perseus_compile
from perseus_compile import observe
from perseus_compile.testing.models import MODEL_TYPES, tiny_causal_lm

# Errors below this many units in the last place of the largest value are noise, where a ratio says nothing.
NOISE_ULPS = 4
IMPLEMENTATIONS = ("grouped_mm", "batched_mm")
DTYPES = (torch.float32, torch.bfloat16)


def moe_layers(model_type: str, num_layers: int) -> int:
    """DeepSeek-V3 and GLM-4-MoE start with one dense layer."""
    return num_layers - 1 if model_type in ("deepseek_v3", "glm4_moe") else num_layers


def compiled_copy(model: torch.nn.Module, **options: object) -> torch.nn.Module:
    compiled = copy.deepcopy(model)
    compiled.compile(backend=perseus_compile.perseus, dynamic=True, fullgraph=True, options=options)
    return compiled


def rewritten_ops(reports: list[observe.GraphReport]) -> list[str]:
    assert [refusal for report in reports for refusal in report.refusals] == []
    return [layer.op for report in reports for layer in report.layers]


def assert_as_close(
    actual: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, what: str, dtype: torch.dtype
) -> None:
    """The error of ``actual`` against float64 is at most ERROR_FACTOR times eager's own.

    In bfloat16 by medians: ties in a router make single tokens of eager itself differ by as much as their size.
    """

    def measure(value: torch.Tensor) -> torch.Tensor:
        difference = (value.double() - exact).abs()
        return difference.median() if dtype == torch.bfloat16 else difference.square().mean().sqrt()

    error, own = measure(actual), measure(eager)
    noise = NOISE_ULPS * torch.finfo(dtype).eps * exact.abs().max()
    assert error <= ERROR_FACTOR * own or error <= noise, f"{what}: error {error:.3g}, eager's own {own:.3g}"


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_logits_and_gradients(model_type: str, implementation: str, dtype: torch.dtype) -> None:
    model = tiny_causal_lm(model_type, dtype=dtype, implementation=implementation)
    exact = float64_copy(model)
    with observe.collect() as reports:
        compiled = compiled_copy(model, inner="aot_eager")
        logits, eager_logits, exact_logits = (_train_step(each) for each in (compiled, model, exact))
    assert rewritten_ops(reports) == ["moe"] * moe_layers(model_type, 2)
    assert_as_close(logits, eager_logits, exact_logits, "logits", dtype)
    for name, gradients in gradients_by_group(compiled, model, exact).items():
        assert_as_close(*gradients, name, dtype)


def _train_step(model: torch.nn.Module) -> torch.Tensor:
    """The logits; gradients are left in the model."""
    model.train()
    ids = token_ids(16)
    output = model(ids, labels=ids, use_cache=False)
    output.loss.backward()
    return output.logits.detach()


@pytest.mark.parametrize("num_layers", (1, 2, 5))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_model_of_depth_n_has_n_rewrites(num_layers: int, implementation: str) -> None:
    model = tiny_causal_lm("qwen3_moe", num_layers=num_layers, implementation=implementation)
    with observe.collect() as reports, torch.no_grad():
        compiled_copy(model, inner="eager")(token_ids(4), use_cache=False)
    assert rewritten_ops(reports) == ["moe"] * num_layers


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_generate_gives_eagers_tokens(model_type: str) -> None:
    model = tiny_causal_lm(model_type).eval()
    settings = {"max_new_tokens": 6, "do_sample": False}
    with observe.collect() as reports:
        compiled = copy.deepcopy(model)
        compiled.compile(backend=perseus_compile.perseus, options={"inner": "eager"})
        tokens = compiled.generate(token_ids(5), **settings)
    assert set(rewritten_ops(reports)) == {"moe"}
    assert torch.equal(tokens, model.generate(token_ids(5), **settings))


@pytest.mark.parametrize(("model_type", "dtype"), [("qwen3_moe", torch.bfloat16), ("gpt_oss", torch.float32)])
def test_under_inductor(model_type: str, dtype: torch.dtype) -> None:
    model = tiny_causal_lm(model_type, dtype=dtype).eval()
    with observe.collect() as reports, torch.no_grad():
        logits = compiled_copy(model)(token_ids(16), use_cache=False).logits
        eager = model(token_ids(16), use_cache=False).logits
        exact = float64_copy(model)(token_ids(16), use_cache=False).logits
    assert rewritten_ops(reports) == ["moe", "moe"]
    assert_as_close(logits, eager, exact, "logits", dtype)
