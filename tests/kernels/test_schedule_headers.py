"""Do the scheduler and layout headers, compiled for the host, cover every tile once, and does Python mirror them?"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from perseus_compile.jit import abi
from perseus_compile.jit.spec import include_dir

_SOURCE = Path(__file__).with_name("schedule_check.cpp")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "no C++ compiler on the path"
    target = tmp_path_factory.mktemp("schedule") / "schedule_check"
    command = [
        compiler,
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{include_dir()}",
        str(_SOURCE),
        "-o",
        str(target),
    ]
    subprocess.run(command, check=True)
    return target


def test_every_tile_once_and_every_logit_once(program: Path) -> None:
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        pytest.param("worklist", "in_expert % num_blocks", "in_expert % num_blocks / 2 * 2", id="tiles"),
        pytest.param("router_items", "index / tiles *", "index / tiles / 2 *", id="tokens-of-a-router"),
        pytest.param("router_items", "index % tiles *", "index % tiles / 2 *", id="experts-of-a-router"),
    ],
)
def test_the_check_can_fail(tmp_path: Path, name: str, right: str, wrong: str) -> None:
    """A schedule in which something is done twice and something else never is caught."""
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler
    root = tmp_path / "include"
    shutil.copytree(include_dir(), root)
    header = root / "perseus" / "schedule" / f"{name}.cuh"
    text = header.read_text()
    assert right in text
    header.write_text(text.replace(right, wrong))
    target = tmp_path / "broken"
    subprocess.run([compiler, "-std=c++17", f"-I{root}", str(_SOURCE), "-o", str(target)], check=True)
    done = subprocess.run([target], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "schedule_check.cpp" in done.stderr


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 8, 8, 8, 0),
        (1, 1, 1, 8, 8, 8, 1),
        (100, 8, 128, 2048, 768, 16, 128),
        (4097, 32, 1024, 2880, 2880, 128, 1024),
        (131072, 8, 8, 7168, 14336, 128, 0),
        (131072, 8, 8, 7168, 14336, 128, 60),
    ],
)
def test_python_mirrors_the_layout(program: Path, shape: tuple[int, ...]) -> None:
    output = subprocess.run([program, "layout", *map(str, shape)], capture_output=True, text=True, check=True).stdout
    *offsets, params_bytes, control_bytes = map(int, output.split())
    names = (
        *("num_tokens", "top_k", "num_local_experts", "model_width", "expert_width", "max_tokens_per_tile"),
        "num_router_experts",
    )
    assert abi.workspace_layout(**dict(zip(names, shape, strict=True))) == abi.WorkspaceLayout(*offsets)
    assert (ctypes.sizeof(abi.MoeParams), abi.CONTROL_WORDS * 4) == (params_bytes, control_bytes)


def test_parameters_lie_where_python_puts_them(tmp_path: Path) -> None:
    source = '#include <cstddef>\n#include "perseus/common/params.cuh"\n'
    for structure in (abi.MoeParams, abi.RouteParams, abi.RouteKernelParams, abi.ErrorRecord):
        source += _same_offsets(structure)
    assert _compiles(tmp_path, source)
    assert not _compiles(tmp_path, source.replace("expert_width) == ", "expert_width) == 1 + "))


def _same_offsets(structure: type[ctypes.Structure]) -> str:
    """Source that compiles if all fields lie where Python has them; RouteKernelParams groups some of them."""
    source = f'static_assert(sizeof(perseus::{structure.__name__}) == {ctypes.sizeof(structure)}, "size");\n'
    for name, *_ in structure._fields_:
        offset = getattr(structure, name).offset
        path = f"arrays.{name}" if structure is abi.RouteKernelParams and name != "route" else name
        source += f'static_assert(offsetof(perseus::{structure.__name__}, {path}) == {offset}, "{name}");\n'
    return source


def _compiles(folder: Path, source: str) -> bool:
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "no C++ compiler on the path"
    unit = folder / "offsets.cpp"
    unit.write_text(source)
    command = [compiler, "-std=c++17", "-fsyntax-only", f"-I{include_dir()}", str(unit)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
