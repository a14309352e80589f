"""Does the tree keep its rules? Import direction, no torch in device headers, file sizes, a documented row per rule."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_PYTHON_LINES = 450

# Leaves import nothing of the package; matching and rewriting read a captured view and never see how ops are run.
LEAVES = ("facts", "errors", "options", "env", "process_groups")
LEAF_MAY_IMPORT = ("perseus_compile.errors",)
PASSES_MAY_IMPORT = (
    "facts",
    "conditions",
    "errors",
    "capture",
    "dynamo_writes",
    "process_groups",
    "ops",
    "observe",
    "passes",
)

PYTHON_FILES = sorted(
    path for folder in ("perseus_compile", "passes", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)


def _module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "passes":
        parts.insert(0, "perseus_compile")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path) -> Iterator[str]:
    """Absolute dotted names of everything that the file imports from the package, `from x import y` as x.y."""
    package = _module_name(path) if path.name == "__init__.py" else _module_name(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "perseus_compile")


def test_relative_and_absolute_imports_are_read() -> None:
    assert "perseus_compile.facts.Refusal" in set(_imports(ROOT / "perseus_compile" / "observe.py"))
    assert "perseus_compile.errors.UnsupportedMoE" in set(_imports(ROOT / "perseus_compile" / "prepare.py"))


@pytest.mark.parametrize("leaf", [name for name in LEAVES if (ROOT / f"perseus_compile/{name}.py").is_file()])
def test_leaves_import_nothing_of_the_package(leaf: str) -> None:
    imported = set(_imports(ROOT / "perseus_compile" / f"{leaf}.py"))
    assert {name for name in imported if not name.startswith(LEAF_MAY_IMPORT)} == set()


@pytest.mark.parametrize("path", sorted((ROOT / "passes").rglob("*.py")), ids=lambda path: path.stem)
def test_passes_never_import_how_ops_are_run(path: Path) -> None:
    allowed = tuple(f"perseus_compile.{name}" for name in PASSES_MAY_IMPORT)
    assert {name for name in _imports(path) if not name.startswith(allowed)} == set()


def test_headers_for_kernels_include_nothing_of_torch() -> None:
    headers = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".hpp", ".cuh", ".cpp", ".h")]
    assert headers
    included = {
        (path.name, include)
        for path in headers
        for include in re.findall(r"#\s*include\s*[<\"]([^>\"]+)", path.read_text())
    }
    assert {(name, include) for name, include in included if re.match(r"(torch|ATen|c10)/", include)} == set()


@pytest.mark.parametrize("path", PYTHON_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_files_stay_readable(path: Path) -> None:
    text = path.read_text()
    assert text.isascii()
    if "golden" not in path.name:  # golden text is long and reviewed as output
        assert text.count("\n") <= MAX_PYTHON_LINES


def test_every_spelling_has_a_row_in_the_docs() -> None:
    from perseus_compile.passes.patterns import spellings

    documented = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "patterns.md").read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(spelling.name for spelling in spellings())


def test_readme_has_a_row_per_option() -> None:
    from perseus_compile import Options

    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    defaults = {field.name: field.default for field in dataclasses.fields(Options)}
    assert {name: ast.literal_eval(default) for name, default in rows} == defaults


def test_readme_has_a_row_per_command() -> None:
    from perseus_compile.cli import app, bench

    commands = {command.name for command in app.registered_commands}
    commands |= {f"bench {command.name}" for command in bench.app.registered_commands}
    documented = re.findall(r"^\| `perseus ([a-z0-9 ]+[a-z])", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(commands)
