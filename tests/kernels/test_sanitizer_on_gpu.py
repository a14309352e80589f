"""Does the fused kernel read and write only what is its own, and never race? By NVIDIA's compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
PROGRAM = Path(__file__).with_name("sanitized_calls.py")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_no_error(tool: str) -> None:
    checker = shutil.which("compute-sanitizer")
    if checker is None:
        pytest.skip("compute-sanitizer, of the CUDA toolkit, is not on the path")
    # Torch's allocator would hide an access past the end of a tensor behind the next one.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [checker, "--tool", tool, "--kernel-name", "regex=perseus", "--error-exitcode", "9"]
    found = subprocess.run(
        [*command, sys.executable, str(PROGRAM)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert "every call ran and was right" in found.stdout, found.stdout + found.stderr
    assert found.returncode == 0, found.stdout + found.stderr
    assert "0 errors" in found.stdout or "0 hazards" in found.stdout, found.stdout
