"""What has ``perseus tune`` measured on this machine? A JSON file per call shape, in the cache folder under ``plans``.

A file holds its key, the versions it was measured with, and the milliseconds of every candidate. Entries of other
versions are left alone and not used; a file that cannot be read is a miss with a warning. Files are replaced as a
whole, so processes that tune at the same time do not disturb each other. They are read once per process.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from perseus_compile.cuda_cost import PLAIN, CallShape, Candidate
from perseus_compile.jit.abi import MAX_COLUMN_GROUPS
from perseus_compile.jit.cache import default_folder, replace_file
from perseus_compile.jit.spec import TILE_CONFIGS, headers_digest

_log = logging.getLogger(__name__)
_DRIVER_FILE = Path("/proc/driver/nvidia/version")

Key = tuple[tuple[str, Any], ...]  # names and values, hashable
Timed = tuple[tuple[Candidate, float], ...]  # candidates and the medians of their measured milliseconds


def folder() -> Path:
    return default_folder() / "plans"


@functools.lru_cache(maxsize=4096)
def key_of(shape: CallShape, device_index: int) -> Key:
    """What a measurement holds for: device, driver, dtype, and the shape, whose token count is a bucket's."""
    device = {
        "device": torch.cuda.get_device_name(device_index),
        "driver": driver_version(),
        "dtype": "bfloat16",
    }
    return tuple({**device, **dataclasses.asdict(shape)}.items())


@functools.cache
def driver_version() -> str:
    """Of the kernel module, such as 580.159.04; where that is not readable, what the driver library says."""
    found = re.search(r"\d+\.\d+(\.\d+)?", _DRIVER_FILE.read_text()) if _DRIVER_FILE.is_file() else None
    return found[0] if found else f"CUDA {torch._C._cuda_getDriverVersion()}"  # type: ignore[attr-defined]  # CUDA builds


@functools.cache
def _versions() -> dict[str, str]:
    from perseus_compile import __version__  # late: the package imports this module

    return {"perseus_compile": __version__, "headers": headers_digest(), "torch": str(torch.__version__)}


_listeners: list[Callable[[], None]] = []


def when_recorded(forget: Callable[[], None]) -> None:
    """``forget`` is called after each ``record`` of this process: for those who keep plans."""
    _listeners.append(forget)


def lookup(key: Key) -> Timed | None:
    """Candidates measured for ``key`` with these versions, by this process or found in the folder at its first call."""
    return _entries().get(key)


def record(key: Key, measured: Timed) -> Path | None:
    """Keeps a measurement, in this process and on disk; returns its file, or None, with a warning, if it has none."""
    _entries()[key] = measured
    for forget in _listeners:
        forget()
    entry = {
        "key": dict(key),
        "versions": _versions(),
        "candidates": [{**dataclasses.asdict(one), "measured_ms": ms} for one, ms in measured],
    }
    name = hashlib.sha256(json.dumps([key, _versions()]).encode()).hexdigest()[:32]
    path = folder() / f"{name}.json"
    try:
        replace_file(path, json.dumps(entry, indent=1).encode())
    except OSError as error:
        _log.warning("tuned plans: %s cannot be written (%s), so this plan ends with the process", path, error)
        return None
    return path


@functools.cache
def _entries() -> dict[Key, Timed]:
    found = {}
    for path in sorted(folder().glob("*.json")):
        try:
            entry = json.loads(path.read_bytes())
            if entry["versions"] != _versions():
                continue
            found[tuple(entry["key"].items())] = tuple(_measured(one) for one in entry["candidates"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("tuned plans: %s is not readable (%r) and is ignored; run perseus tune again", path, error)
    return found


def _measured(fields: dict[str, Any]) -> tuple[Candidate, float]:
    """Checked, since a plan from a damaged file would fail far from here."""
    ms = fields.pop("measured_ms")
    one = Candidate(**fields)
    is_fused = one.path == "fused" and one.tiles in TILE_CONFIGS and 1 <= one.column_groups <= MAX_COLUMN_GROUPS
    if not (is_fused or one == PLAIN) or not ms > 0:
        raise ValueError(f"no such candidate: {one!r} in {ms} ms")
    return one, float(ms)
