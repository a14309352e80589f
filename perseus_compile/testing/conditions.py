"""Under which conditions was a number measured? Every benchmark row carries them."""

from __future__ import annotations

import datetime
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import perseus_compile


def conditions(device: torch.device, *, commit: str | None = None, clock_mhz: int | None = None) -> dict[str, Any]:
    """Hardware, versions, commit and date, ready for a JSON row.

    Args:
        device: what was measured; rows of a CPU have no GPU.
        commit: of the source tree, for a copy that git does not know; None asks git.
        clock_mhz: the SM clock under the measured load.
    """
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "clock_mhz": clock_mhz,
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "perseus_compile": perseus_compile.__version__,
        "commit": commit or _commit(),
        "date": datetime.date.today().isoformat(),
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    """The commit of the source tree that is measured; "unknown" for an installed copy."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
