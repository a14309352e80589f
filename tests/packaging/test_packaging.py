"""Does every way of installing give the same package? Wheel (built from the sdist) and editable, in fresh venvs.

Nothing is downloaded: builds use the setuptools and pybind11 of this environment, and each fresh venv sees this
environment's packages behind its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_PROBE = """
import importlib.metadata, importlib.resources, json, sys
import torch
listed = "perseus" in torch._dynamo.list_backends()
imported_by_listing = "perseus_compile" in sys.modules
import perseus_compile, perseus_compile._C, perseus_compile.passes.patterns
headers = importlib.resources.files("perseus_compile.csrc") / "include"
distribution = importlib.metadata.distribution("perseus_compile")
print(json.dumps({
    "listed": listed,
    "imported_by_listing": imported_by_listing,
    "version": perseus_compile.__version__ == distribution.version,
    "files": {name: sys.modules[name].__file__ for name in (
        "perseus_compile", "perseus_compile._C", "perseus_compile.passes.patterns")},
    "headers": sorted(str(path.relative_to(headers)) for path in headers.rglob("*.[ch]*")),
    "entry_points": sorted(f"{e.group}: {e.name} = {e.value}" for e in distribution.entry_points),
    "metadata": str(distribution.locate_file("")),
}))
"""


def _run(*command: str | Path, cwd: Path) -> str:
    """Outside the repository, so that its folders are not importable by accident."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _venv(folder: Path) -> Path:
    """The Python of a new venv that finds this environment's packages after its own."""
    _run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    own = _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    behind = [path for path in sys.path if path.endswith("site-packages")]
    (Path(own) / "behind.pth").write_text("\n".join(behind) + "\n")
    return python


def _install(python: Path, *what: str | Path) -> None:
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--force-reinstall")
    _run(python, "-m", "pip", "install", *options, *what, cwd=python.parents[1])


def _probe(python: Path) -> dict:
    return json.loads(_run(python, "-c", _PROBE, cwd=python.parents[1]))


def _headers(root: Path) -> list[str]:
    include = root / "csrc" / "include"
    return sorted(str(path.relative_to(include)) for path in include.rglob("*.[ch]*"))


def _modules(root: Path) -> set[str]:
    """The Python files of the package, as the wheel names them."""
    own = {str(path.relative_to(root)) for path in root.glob("perseus_compile/**/*.py")}
    passes = {f"perseus_compile/{path.relative_to(root)}" for path in root.glob("passes/**/*.py")}
    return own | passes | {"perseus_compile/csrc/__init__.py"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, so that builds leave nothing in it and start from nothing."""
    built = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.so", "__pycache__")
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("source") / "repository", ignore=built))


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    _run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", out, source, cwd=out)
    (archive,) = out.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(out, filter="data")
    (unpacked,) = (path for path in out.iterdir() if path.is_dir())
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, unpacked, cwd=out)
    (built,) = out.glob("*.whl")
    return built


def _assert_complete(found: dict, source: Path) -> None:
    assert found["listed"], "the entry point must put perseus into torch._dynamo.list_backends()"
    assert not found["imported_by_listing"]
    assert found["version"], "perseus_compile.__version__ must be the version of pyproject.toml"
    assert found["headers"] == _headers(source)
    assert found["entry_points"] == [
        "console_scripts: perseus = perseus_compile.cli:main",
        "torch_dynamo_backends: perseus = perseus_compile.backend:perseus",
    ]


@pytest.mark.slow
def test_sdist_holds_all_that_a_build_needs(sdist: Path, source: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    host_code = {str(path.relative_to(source)) for path in source.glob("csrc/**/*.[ch]*") if path.is_file()}
    assert host_code <= names
    assert {"setup.py", "LICENSE", "tests/test_layout.py", "docs/debugging.md"} <= names


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(wheel: Path, source: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {name for name in names if name.endswith(".py")}
    headers = {f"perseus_compile/csrc/include/{name}" for name in _headers(source)}
    extension = {name for name in names if name.startswith("perseus_compile/_C.") and name.endswith(".so")}
    assert modules == _modules(source)
    assert len(extension) == 1
    stubs = {str(path.relative_to(source)) for path in source.glob("perseus_compile/*.pyi")}
    assert names - modules - extension - stubs == {"perseus_compile/py.typed", *headers}


@pytest.mark.slow
def test_wheel_install(wheel: Path, source: Path, tmp_path: Path) -> None:
    python = _venv(tmp_path / "venv")
    _install(python, wheel)
    found = _probe(python)
    _assert_complete(found, source)
    for name, file in found["files"].items():
        assert Path(file).is_relative_to(tmp_path), name


@pytest.mark.slow
def test_editable_install_follows_the_source(source: Path, tmp_path: Path) -> None:
    python = _venv(tmp_path / "venv")
    _install(python, "--editable", source)
    found = _probe(python)
    _assert_complete(found, source)
    for name, file in found["files"].items():
        assert Path(file).is_relative_to(source), name

    package = source / "passes" / "added_later"
    package.mkdir()
    (package / "__init__.py").write_text("VALUE = 42\n")
    program = "from perseus_compile.passes.added_later import VALUE; print(VALUE)"
    assert _run(python, "-c", program, cwd=tmp_path).strip() == "42"


@pytest.mark.slow
def test_backend_is_found_by_name_with_no_import(tmp_path: Path) -> None:
    program = 'import torch; print(torch.compile(lambda x: x + 1, backend="perseus")(torch.zeros(2)).tolist())'
    assert _run(sys.executable, "-c", program, cwd=tmp_path).strip() == "[1.0, 1.0]"


def test_passes_do_not_import_under_their_short_name() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import passes"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "perseus_compile.passes" in done.stderr
