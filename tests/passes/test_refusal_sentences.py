"""docs/patterns.md lists every sentence that can refuse a layer; accept a change with EXPECTTEST_ACCEPT=1."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import test_dense_experts
import test_near_miss
import test_near_miss_choices
import test_near_miss_loops
import test_near_miss_router
import test_near_miss_rows
import test_near_miss_writes
from refusal_sentences import ROOT, as_pattern, as_section, sentences_of, sources

DOCS = ROOT / "docs" / "patterns.md"
BEGIN, END = "<!-- written by tests/passes/test_refusal_sentences.py -->\n\n", "\n<!-- end -->\n"
NEAR_MISSES = [
    *(
        case
        for module in (test_near_miss, test_near_miss_router, test_near_miss_rows, test_near_miss_writes)
        for case in module.CASES
    ),
    *test_near_miss_loops.NEAR_MISSES,
    *test_near_miss_choices.NEAR_MISSES,
    *test_dense_experts.NEAR_MISSES,
]


def test_docs_list_every_sentence() -> None:
    text = DOCS.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    assert begin and end, "docs/patterns.md keeps the marks between which the sentences are written"
    wanted = head + begin + as_section() + end + tail
    if os.environ.get("EXPECTTEST_ACCEPT"):
        DOCS.write_text(wanted)
    assert DOCS.read_text() == wanted


def test_what_the_matcher_says_is_listed() -> None:
    """Every sentence that the near-misses provoke is one of those that the sources were read for."""
    patterns = [as_pattern(sentence) for path in sources() for sentence in sentences_of(path)]
    said = {line.partition(": ")[2] for case in NEAR_MISSES for line in case.outcome.splitlines() if ": " in line}
    assert len(said) > 60
    assert {sentence for sentence in said if not any(pattern.fullmatch(sentence) for pattern in patterns)} == set()


@pytest.mark.parametrize(
    ("source", "sentences"),
    [
        ('def f(x) -> str | None:\n    return "it has no gate" if x else None', ["it has no gate"]),
        (
            'def f(read, node, k) -> Value | str:\n    return f"{read.describe(node)} takes {k} of {k + 1} rows"',
            ["NODE takes {k} of {...} rows"],
        ),
        ('def f(x):\n    yield Condition("one mode", "its modes differ" if x else None)', ["its modes differ"]),
        ('def f(x):\n    raise UnsupportedMoE(f"K must be {x} here")', ["K must be {x} here"]),
        ('def f(x):\n    raise CaptureError("there is nothing", is_failure=False)', []),
        ('def f(x) -> str:\n    """A name of x."""\n    return f"{x}.weight"', []),
        ('def f(x) -> int:\n    return "never read here"', []),
    ],
)
def test_sentences_are_read_from_the_source(source: str, sentences: list[str], tmp_path: Path) -> None:
    path = tmp_path / "stage.py"
    path.write_text(source)
    assert sentences_of(path) == sentences
