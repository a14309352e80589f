"""The spelling passes/patterns/einsum.py: it matches, and it nearly matches."""

from __future__ import annotations

import pytest
import torch
from spellings import BatchedMM, Experts, changed
from torch import Tensor

import perseus_compile
from perseus_compile import observe

EQUATIONS = {
    "out_in": "rd,rfd->rf",
    "in_out": "rd,rdf->rf",
}


def einsum_layer(equation: str, **sizes: object) -> Experts:
    def linear(layer: Experts, rows: Tensor, weight: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        return torch.einsum(equation, rows, weight[ids])

    torch.manual_seed(0)
    return changed(BatchedMM, linear=linear)(**sizes)


def compile_and_compare(layer: Experts) -> observe.GraphReport:
    x = torch.randn(5, 8)
    compiled = torch.compile(layer, backend=perseus_compile.perseus, dynamic=True, options={"inner": "eager"})
    with observe.collect() as reports, torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))
    (report,) = reports
    return report


@pytest.mark.parametrize("layout", EQUATIONS)
def test_it_matches(layout: str) -> None:
    # Square matrices: only the letters of the equation say how they lie.
    report = compile_and_compare(einsum_layer(EQUATIONS[layout], layout=layout, width=8, expert_width=8, bias=True))
    assert [layer.op for layer in report.layers] == ["moe"]
    text = " ".join(report.graph_diff.split())
    assert ("weight_layout: in_out" in text) == (layout == "in_out")  # out_in is the default


def test_matrices_first() -> None:
    def linear(layer: Experts, rows: Tensor, weight: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        return torch.einsum("bij, bj -> bi", weight[ids], rows)

    assert len(compile_and_compare(changed(BatchedMM, linear=linear)()).layers) == 1


def test_it_nearly_matches() -> None:
    """Sums the columns of each matrix as well: an einsum of the right ranks that is no linear map of the rows."""

    def linear(layer: Experts, rows: Tensor, weight: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        return torch.einsum("rd,rfe->rf", rows, weight[ids])

    report = compile_and_compare(changed(BatchedMM, linear=linear)())
    assert report.layers == []
    assert [refusal.reason for refusal in report.refusals] == [
        "aten.einsum.default (hidden) must multiply one row by one [E, a, b] matrix of its expert, got 'rd,rfe->rf'"
    ]
