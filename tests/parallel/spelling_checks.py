"""What every rank checks of hand-written expert-parallel layers: one node, and the numbers of their own code."""

from __future__ import annotations

import torch
import torch.distributed as dist
from eager_twin import weighted_sum
from marked_layers import OwnExperts
from spelled_layers import D, SplitExperts

import perseus_compile
from perseus_compile import observe


def check_spelling(kind: type[SplitExperts], token_counts: list[list[int]], inner: str = "eager") -> list[str]:
    """``token_counts``: tokens by rank, for each call. Returns what became of the layers."""
    layer, captured = kind(dist.group.WORLD), kind(dist.group.WORLD)  # the same parameters
    limit = {torch.float32: 1e-5, torch.bfloat16: 4e-2}[kind.dtype]
    with observe.collect() as reports:
        perseus_compile.compile(captured, inner=inner, dynamic=True)
        for num_tokens in token_counts:
            torch.manual_seed(10 + dist.get_rank())
            x = torch.randn(num_tokens[dist.get_rank()], D, dtype=kind.dtype)
            results = []
            for module in (layer, captured):
                leaf = x.clone().requires_grad_(True)
                out = module(leaf)
                weighted_sum(out).backward()
                results.append([out.detach(), leaf.grad, *(p.grad for p in module.parameters())])
                module.zero_grad()
            for expected, actual in zip(*results, strict=True):
                torch.testing.assert_close(actual, expected, rtol=limit, atol=limit)
    rows = [row for report in reports for row in report.layers]
    return [f"{row.op}: {row.why}" for row in rows] + [r.reason for report in reports for r in report.refusals]


def check_marked(kind: type[OwnExperts]) -> None:
    """The numbers of a layer whose tokens all ranks hold, with and without gradients."""
    torch.manual_seed(0)  # the same router and tokens on all ranks
    layer = kind(dist.group.WORLD)
    x = torch.randn(7, D)
    for records_gradients in (False, True):
        with torch.set_grad_enabled(records_gradients):
            results = []
            for module in (layer, perseus_compile.compile(layer.forward, inner="eager", on_unsupported="error")):
                leaf = x.clone().requires_grad_(records_gradients)
                out = module(leaf)
                if records_gradients:
                    weighted_sum(out).backward()
                grads = [leaf.grad, *(parameter.grad for parameter in layer.parameters())]
                results.append([out.detach(), *(grad for grad in grads if grad is not None)])
                layer.zero_grad()
            assert len(results[0]) == (5 if records_gradients else 1)
            torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
