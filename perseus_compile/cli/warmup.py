"""perseus warmup: compiles kernels ahead into the cache. Needs no GPU."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from perseus_compile import warmup as warm
from perseus_compile.cli import expert_forms
from perseus_compile.cli.console import results, step
from perseus_compile.fused_router import MAX_EXPERTS
from perseus_compile.jit.cache import default_folder


def warmup(
    model_type: expert_forms.ModelType = None,
    experts: expert_forms.Experts = None,
    activation: expert_forms.ActivationOption = "silu",
    weight_layout: expert_forms.WeightLayoutOption = "out_in",
    gate_layout: expert_forms.GateLayoutOption = "concatenated",
    everything: Annotated[bool, typer.Option("--all", help="every form that known models have")] = False,
    arch: Annotated[str, typer.Option(help="architecture to compile for")] = warm.DEFAULT_ARCH,
    processes: Annotated[int | None, typer.Option(min=1, help="at most so many; one per core")] = None,
) -> None:
    """Compile ahead what a layer's calls would compile at first use: every tile configuration and the router.

    The layer is that of --model-type, or has --activation, --weight-layout and --gate-layout, and a router where
    --experts is given.
    """
    if everything:
        units = warm.shipped_units(arch)
    else:
        if model_type is not None:
            with step(f"looking at the experts of {model_type}"):
                spec = expert_forms.form_of_model(model_type).spec
        else:
            spec = expert_forms.spec_of_options(experts or 0, activation, weight_layout, gate_layout)
        if spec.num_experts > MAX_EXPERTS:
            raise typer.BadParameter(f"kernels take at most {MAX_EXPERTS} experts, got {spec.num_experts}")
        units = warm.expert_units(spec.weight_layout, spec.gate_layout, spec.activation, arch)
        units += [warm.router_unit(spec.num_experts, arch)] if spec.num_experts else []
    with step(f"compiling {len(units)} kernels for {arch}"):
        outcomes = sorted(warm.build_all(units, processes), key=lambda one: one.name)
    table = Table(title=f"Kernels for {arch} in {default_folder()}", title_justify="left")
    for heading in ("kernel", "seconds", "", "bytes"):
        table.add_column(heading)
    for one in outcomes:
        state = "cached" if one.was_cached else "built" if one.is_kept else "built, not kept"
        table.add_row(one.name, f"{one.seconds:.2f}", state, str(one.num_bytes))
    results().print(table)
    if not all(one.is_kept for one in outcomes):
        raise typer.Exit(1)
