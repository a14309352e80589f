"""What every rank checks of transformers' own expert-parallel plan, in which all ranks hold the same tokens."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from eager_twin import weighted_sum
from torch.distributed.device_mesh import init_device_mesh

from perseus_compile import observe
from perseus_compile.testing.models import tiny_causal_lm

_STYLES = {"gate_up_proj": "grouped_gemm", "down_proj": "grouped_gemm"}


def check_plan(implementation: str, train: bool) -> list[str]:
    """A MoE block compiled with the plan applied, against the whole block; returns what became of its layers."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    whole = tiny_causal_lm("olmoe", num_layers=1, implementation=implementation).model.layers[0].mlp
    shared = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {f"experts.{name}": style for name, style in _STYLES.items()} | {"experts": "ep_dispatch_experts"}
    apply_expert_parallelism(shared, mesh, mesh, plan, ep_implementation="all_reduce")
    inputs = [torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(0)).requires_grad_(train) for _ in "12"]
    with torch.set_grad_enabled(train), observe.collect() as reports:
        shared.compile(backend="perseus", options={"inner": "eager"})
        expected, actual = whole(inputs[0]), shared(inputs[1])
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        if train:
            for out in (expected, actual):
                weighted_sum(out).backward()
            for mine, other in ((inputs[1], inputs[0]), (shared.gate.weight, whole.gate.weight)):
                torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4)
            part = whole.experts.down_proj.grad.chunk(dist.get_world_size())[dist.get_rank()]
            torch.testing.assert_close(shared.experts.down_proj.grad.to_local(), part, rtol=1e-4, atol=1e-4)
    rows = [row for report in reports for row in report.layers]
    return [f"{row.op}: {row.why}" for row in rows] + [r.reason for report in reports for r in report.refusals]
