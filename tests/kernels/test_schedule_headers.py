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


def test_every_tile_once(program: Path) -> None:
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_check_can_fail(tmp_path: Path) -> None:
    """A schedule in which two tiles of an expert are one is caught."""
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler
    root = tmp_path / "include"
    shutil.copytree(include_dir(), root)
    header = root / "perseus" / "schedule" / "worklist.cuh"
    text = header.read_text()
    assert "in_expert % num_blocks" in text
    header.write_text(text.replace("in_expert % num_blocks", "in_expert % num_blocks / 2 * 2"))
    target = tmp_path / "broken"
    subprocess.run([compiler, "-std=c++17", f"-I{root}", str(_SOURCE), "-o", str(target)], check=True)
    done = subprocess.run([target], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "schedule_check.cpp" in done.stderr


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 8, 8, 8),
        (100, 8, 128, 2048, 768, 16),
        (4097, 32, 1024, 2880, 2880, 128),
        (131072, 8, 8, 7168, 14336, 128),
    ],
)
def test_python_mirrors_the_layout(program: Path, shape: tuple[int, ...]) -> None:
    output = subprocess.run([program, "layout", *map(str, shape)], capture_output=True, text=True, check=True).stdout
    *offsets, params_bytes, control_bytes = map(int, output.split())
    names = ("num_tokens", "top_k", "num_local_experts", "model_width", "expert_width", "max_tokens_per_tile")
    assert abi.workspace_layout(**dict(zip(names, shape, strict=True))) == abi.WorkspaceLayout(*offsets)
    assert (ctypes.sizeof(abi.MoeParams), abi.CONTROL_WORDS * 4) == (params_bytes, control_bytes)
