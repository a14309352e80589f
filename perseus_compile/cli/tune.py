"""perseus tune: measures the ways to run a layer's experts on this GPU and keeps the fastest per token bucket."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.table import Table

from perseus_compile import cuda_plan
from perseus_compile.cli import expert_forms
from perseus_compile.cli.console import counts, errors, results, step
from perseus_compile.cli.expert_forms import ExpertForm
from perseus_compile.tune import ExpertWeights, TunedBucket, tune_bucket


def tune(
    model_type: expert_forms.ModelType = None,
    tokens: Annotated[str, typer.Option(help="token counts, separated by commas")] = "1,16,64,256,1024,4096,8192",
    hidden: expert_forms.Hidden = None,
    expert_width: expert_forms.ExpertWidth = None,
    experts: expert_forms.Experts = None,
    top_k: expert_forms.TopK = None,
    activation: expert_forms.ActivationOption = "silu",
    weight_layout: expert_forms.WeightLayoutOption = "out_in",
    gate_layout: expert_forms.GateLayoutOption = "concatenated",
    biases: Annotated[bool, typer.Option("--biases", help="both linear maps have a bias")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="measurements of each candidate, in rotating order")] = 15,
) -> None:
    """Measure tiles, column groups and the plain path for a layer; calls of this machine use the fastest from then on.

    The layer is that of --model-type, or has --hidden, --expert-width, --experts and --top-k. Weights are random.
    """
    wanted = counts("--tokens", tokens)
    reason = _no_gpu()
    if reason is not None:
        errors.print(f"[red]error:[/red] {reason}", highlight=False, soft_wrap=True)
        raise typer.Exit(1)
    if model_type is not None:
        with step(f"looking at the experts of {model_type}"):
            form = expert_forms.form_of_model(model_type)
    elif hidden is not None and expert_width is not None and experts is not None and top_k is not None:
        spec = expert_forms.spec_of_options(experts, activation, weight_layout, gate_layout)
        form = ExpertForm(model_width=hidden, expert_width=expert_width, top_k=top_k, has_biases=biases, spec=spec)
    else:
        raise typer.BadParameter("pass --model-type, or all of --hidden, --expert-width, --experts and --top-k")
    if form.top_k > form.spec.num_experts:
        raise typer.BadParameter(f"--top-k must be at most --experts, {form.spec.num_experts}; got {form.top_k}")
    weights = ExpertWeights.random(form.model_width, form.expert_width, form.has_biases, form.spec)
    for num_tokens in sorted({cuda_plan.token_bucket(count) for count in wanted}):
        with step(f"measuring at {num_tokens} tokens"):
            bucket = tune_bucket(weights, form.top_k, num_tokens, rounds=rounds)
        results().print(_table(bucket))
        where = bucket.file or "not kept: the cache folder is not writable"
        errors.print(f"[dim]{where}[/dim]", highlight=False, soft_wrap=True)


def _no_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "perseus tune measures on an NVIDIA GPU and found none; the planner's model needs no tuning"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return (
            "perseus tune chooses among tiles of a kernel for compute capability 9.0, got "
            f"{capability[0]}.{capability[1]}; layers on this GPU take the plain path"
        )
    return None


def _table(bucket: TunedBucket) -> Table:
    table = Table(title=f"{bucket.num_tokens} tokens, experts, milliseconds", title_justify="left")
    for heading in ("tiles x column groups", "predicted (model)", "measured", "chosen"):
        table.add_column(heading)
    for row in bucket.rows:
        measured = "-" if row.measured_ms is None else f"{row.measured_ms:.4f}"
        table.add_row(str(row.candidate), f"{row.predicted_ms:.4f}", measured, "yes" if row.is_chosen else "")
    return table
