"""Every family of the installed transformers, found by reading its packages: rewritten, or refused with a sentence.

The families are those of ``perseus_compile.testing.families``, so a new release of transformers brings its own tests.
docs/families.md is what this file finds; accept a change with EXPECTTEST_ACCEPT=1 and review it like code.

The matrix of implementations, dtypes and training takes half an hour and runs only when asked for:
``python -m pytest -m exhaustive tests/models/test_all_families.py``.
"""

from __future__ import annotations

import functools
import itertools
import os
from pathlib import Path

import pytest
import torch
import transformers

import perseus_compile
from perseus_compile import observe
from perseus_compile.testing.families import find_families, inputs_of, tiny_model
from perseus_compile.testing.survey import FamilyReport, as_markdown, survey

DOCS = Path(__file__).parents[2] / "docs" / "families.md"
FAMILIES = {family.name: family for family in find_families()}
DECORATED = [name for name, family in FAMILIES.items() if family.decorated]
OTHERS = [name for name, family in FAMILIES.items() if not family.decorated]
# Of the families whose experts run as grouped_mm or batched_mm, those of which every MoE layer must be rewritten. The
# others are named, with the reason, in docs/families.md.
WANTED_SHARE = 0.95
# The L2 norm of the error relative to that of the result; a wrong layer is off by a share of 1. In bfloat16 both sides
# round at every step, and gradients of norms and scales cancel: gemma4 comes to 0.1, the others to less than 0.04.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.15}
MATRIX = [
    (implementation, dtype, train)
    for implementation, dtype, train in itertools.product(
        ("grouped_mm", "batched_mm"), (torch.float32, torch.bfloat16), (False, True)
    )
    if (implementation, dtype, train) != ("grouped_mm", torch.float32, False)  # the tests that always run
]


@functools.cache
def report_of(name: str) -> FamilyReport:
    return survey(FAMILIES[name])


def check(report: FamilyReport, dtype: torch.dtype) -> None:
    """Right numbers, and a sentence for whatever is not rewritten."""
    assert report.output_error <= TOLERANCE[dtype] and report.gradient_error <= TOLERANCE[dtype]
    assert len(report.ops) <= report.num_layers
    assert report.is_rewritten or report.reasons


@pytest.mark.parametrize("name", DECORATED)
def test_decorated_family(name: str) -> None:
    check(report_of(name), torch.float32)


@pytest.mark.parametrize("name", OTHERS)
def test_other_family(name: str) -> None:
    check(report_of(name), torch.float32)


def test_share_of_families_that_are_rewritten() -> None:
    left = [name for name in DECORATED if not report_of(name).is_rewritten]
    assert len(left) <= (1 - WANTED_SHARE) * len(DECORATED), {name: report_of(name).reasons for name in left}


def test_docs_list_every_family() -> None:
    text = as_page([report_of(name) for name in FAMILIES])
    if os.environ.get("EXPECTTEST_ACCEPT"):
        DOCS.write_text(text)
    committed = DOCS.read_text()
    if f"transformers {transformers.__version__}," not in committed:
        pytest.skip(f"docs/families.md is about another release than transformers {transformers.__version__}")
    assert committed == text


def as_page(reports: list[FamilyReport]) -> str:
    decorated = [report for report in reports if report.decorated]
    others = [report for report in reports if not report.decorated]
    return (
        "# MoE families of transformers\n\n"
        f"What becomes of each family of transformers {transformers.__version__}, on tiny random models: how many of "
        "the MoE layers are rewritten, and\ninto which op. `experts` alone means that the router keeps its own code, "
        "for the reason in the last column.\n`tests/models/test_all_families.py` writes this file "
        "(`EXPECTTEST_ACCEPT=1`); `perseus explain --all` prints the same for the\nrelease that is installed.\n\n"
        f"## Experts that run as grouped_mm or batched_mm\n\n{sum(report.is_rewritten for report in decorated)} of "
        f"{len(decorated)} families are rewritten in every MoE layer.\n\n{as_markdown(decorated)}\n"
        "## Experts with code of their own\n\nAfter `perseus_compile.prepare(model)`, and captured as "
        f"`perseus_compile.compile(model)` does. {sum(report.is_rewritten for report in others)} of {len(others)} "
        f"families are rewritten in every\nMoE layer, the others keep their code.\n\n{as_markdown(others)}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ("muse_spark_text",) if name in FAMILIES])
def test_under_inductor(name: str) -> None:
    """A norm between expert and weight, so that ids and weights of the op are nodes that the rewrite adds."""
    model = tiny_model(FAMILIES[name])
    inputs = inputs_of(model, num_tokens=5)
    with torch.no_grad(), observe.collect() as graphs:
        expected = model(**inputs)[0]
        model.compile(backend=perseus_compile.perseus)
        torch.testing.assert_close(model(**inputs)[0], expected, rtol=1e-4, atol=1e-5)
    assert sum(len(graph.layers) for graph in graphs) >= 1
    assert [refusal for graph in graphs for refusal in graph.refusals] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(("implementation", "dtype", "train"), MATRIX)
@pytest.mark.parametrize("name", DECORATED)
def test_matrix(name: str, implementation: str, dtype: torch.dtype, train: bool) -> None:
    report = survey(FAMILIES[name], implementation=implementation, dtype=dtype, train=train)
    check(report, dtype)
    assert report.is_rewritten or not report_of(name).is_rewritten
