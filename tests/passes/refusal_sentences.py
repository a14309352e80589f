"""Which sentences can refuse a layer? Reads the sources of the stages; nothing is run.

A sentence is a text that a function with ``str`` among its answers returns, that a ``Condition`` holds, that ends the
reading of an expert (``_lose``), or that an error of a check has. Values known only at run time are ``{name}``,
``NODE`` for the operator that the sentence is about, and ``{...}`` for longer expressions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_ERRORS = ("UnsupportedMoE", "CaptureError")


def sources() -> list[Path]:
    """The files whose functions refuse layers: capture, match, plan, and the checks of the ops that planning asks."""
    stages = [ROOT / "perseus_compile" / f"{name}.py" for name in ("capture", "plan", "lower", "grouped")]
    return [*sorted((ROOT / "passes").rglob("*.py")), *stages]


def sentences_of(path: Path) -> list[str]:
    found = (text for function in _functions(path) for text in _texts(function))
    return list(dict.fromkeys(text for text in found if len(re.findall(r"[a-z]{2,}", re.sub("{.*?}", "", text))) >= 2))


def as_pattern(sentence: str) -> re.Pattern[str]:
    """Matches what ``sentence`` becomes at run time."""
    parts = re.split(r"{.*?}|\bNODE\b", sentence)
    return re.compile(".+".join(map(re.escape, parts)), re.DOTALL)


def as_section() -> str:
    """Markdown: the sentences by file."""
    by_file = {path: sentences_of(path) for path in sources()}
    return "\n".join(
        f"`{path.relative_to(ROOT)}`\n\n" + "".join(f"- {text}\n" for text in texts)
        for path, texts in by_file.items()
        if texts
    )


def _functions(path: Path) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


def _texts(function: ast.FunctionDef) -> Iterator[str]:
    answers_text = function.returns is not None and re.search(r"\bstr\b", ast.unparse(function.returns))
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None and answers_text:
            yield from _leaves(node.value)
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name == "Condition":
                yield from _leaves(node.args[1])
            elif name in (*_ERRORS, "_lose") and not _is_no_failure(node):
                yield from _leaves(node.args[0])


def _is_no_failure(error: ast.Call) -> bool:
    """Whether it is ``CaptureError(..., is_failure=False)``, which refuses nothing."""
    return any(keyword.arg == "is_failure" for keyword in error.keywords)


def _leaves(expression: ast.expr) -> Iterator[str]:
    if isinstance(expression, ast.IfExp):
        yield from _leaves(expression.body)
        yield from _leaves(expression.orelse)
    elif isinstance(expression, ast.Tuple):
        for part in expression.elts:
            yield from _leaves(part)
    elif isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        yield expression.value
    elif isinstance(expression, ast.JoinedStr):
        yield "".join(map(_part, expression.values))


def _part(value: ast.expr) -> str:
    if isinstance(value, ast.Constant):
        return str(value.value)
    assert isinstance(value, ast.FormattedValue)
    if isinstance(value.value, ast.Name):
        return f"{{{value.value.id}}}"
    return "NODE" if ".describe(" in ast.unparse(value.value) else "{...}"
