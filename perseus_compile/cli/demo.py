"""perseus demo: one random Qwen3-MoE model, from the graph to tokens per second. Fails if nothing was rewritten."""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
import typer
from rich.table import Table
from torch._dynamo.utils import counters

from perseus_compile.cli.console import errors, results, step
from perseus_compile.cli.inspect import print_diff
from perseus_compile.cli.models import require_transformers
from perseus_compile.explain import explain
from perseus_compile.testing.models import config_for, random_causal_lm, random_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Wide enough that the experts dominate: they hold 96 % of the parameters. In float64 the model needs 0.6 GB.
_SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.04,  # about 1 / sqrt(hidden_size), so that the experts matter in the residual stream
}
_NUM_LAYERS = 3
_PROMPT_SHAPE = (2, 32)  # sequences, tokens
_NEW_TOKENS = 32
_SPEED_ROUNDS = 5
_ERROR_DTYPES = (torch.float32, torch.bfloat16)
_BACKENDS = ("eager", "inductor", "perseus")


def demo() -> None:
    """Builds a random Qwen3-MoE model, compiles it and compares results and speed. Takes minutes on a CPU."""
    require_transformers()
    # Dynamo about helpers of transformers that are cached by version number; tracing through them is harmless.
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    with step("building a random Qwen3MoeForCausalLM"):
        model = random_causal_lm(config_for("qwen3_moe", num_layers=_NUM_LAYERS, **_SIZES))
    prompt = random_tokens(model, _PROMPT_SHAPE)
    with step("looking at the graph"), torch.no_grad():
        report = explain(model, prompt, use_cache=False)
    results().print(report)
    if report.layers:
        results().print("\nWhat the rewrite changes in the graph, first layer:")
        print_diff(report.layers[0].graph_diff)
    results().print(_error_table(model, prompt))
    results().print(_speed_table(model, prompt))
    if not counters["perseus"]["graphs"] or not counters["perseus"]["rewrites"]:
        message = "[red]error:[/red] perseus compiled no graph, or rewrote no layer"
        errors.print(message, highlight=False, soft_wrap=True)
        raise typer.Exit(1)


@torch.no_grad()
def _error_table(model: PreTrainedModel, prompt: torch.Tensor) -> Table:
    """Logits against a float64 eager run on the same rounded weights."""
    table = Table(title="Error of the logits against float64 eager", title_justify="left")
    for heading in ("dtype", "eager: median", "eager: largest", "perseus: median", "perseus: largest"):
        table.add_column(heading)
    for dtype in _ERROR_DTYPES:
        with step(f"comparing with float64, {dtype}"):
            rounded = copy.deepcopy(model).to(dtype)
            exact = _float64_logits(rounded, prompt)
            eager = (rounded(prompt).logits.double() - exact).abs()
            torch._dynamo.reset()
            rounded.compile(backend="perseus")
            compiled = (rounded(prompt).logits.double() - exact).abs()
        cells = (f"{value.item():.2e}" for error in (eager, compiled) for value in (error.median(), error.max()))
        table.add_row(str(dtype).removeprefix("torch."), *cells)
    return table


def _float64_logits(model: PreTrainedModel, prompt: torch.Tensor) -> torch.Tensor:
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # grouped_mm has no float64
    return exact(prompt).logits


def _speed_table(model: PreTrainedModel, prompt: torch.Tensor) -> Table:
    """Whole ``generate`` calls, prefill and then one token at a time, of all contestants in turn."""
    title = f"generate, float32, {torch.get_num_threads()} threads, median of {_SPEED_ROUNDS} (noisy on a busy machine)"
    table = Table(title=title, title_justify="left")
    for heading in ("", "tokens/s", "same tokens as eager", "first call (compiles)"):
        table.add_column(heading)
    torch._dynamo.reset()
    models = {backend: copy.copy(model) for backend in _BACKENDS}
    calls, tokens = defaultdict[str, list[float]](list), {}
    for backend, contestant in models.items():
        if backend != "eager":
            contestant.compile(backend=backend)
        with step(f"compiling for {backend}" if backend != "eager" else "generating with eager"):
            seconds, tokens[backend] = _generate(contestant, prompt)
        calls[backend].append(seconds)
    with step("generating in turn"):
        for _ in range(_SPEED_ROUNDS):
            for backend, contestant in models.items():
                calls[backend].append(_generate(contestant, prompt)[0])
    for backend, (first, *later) in calls.items():
        per_second = prompt.shape[0] * _NEW_TOKENS / statistics.median(later)
        same = (tokens[backend] == tokens["eager"]).float().mean().item()
        table.add_row(backend, f"{per_second:.1f}", f"{same:.0%}", f"{first:.1f} s")
    return table


def _generate(model: PreTrainedModel, prompt: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Seconds of one call, and the tokens that it made."""
    start = time.perf_counter()
    tokens = model.generate(prompt, max_new_tokens=_NEW_TOKENS, do_sample=False)
    return time.perf_counter() - start, tokens[:, prompt.shape[1] :]
