"""A CUDA driver without a device (fake_driver.cpp), and what it was asked for."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).with_name("fake_driver.cpp")
_MAX_MAPS, _MAX_PARAM_BYTES = 4, 512


class FakeMap(ctypes.Structure):
    """The numbers that a tensor map was made from."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("address", "rank", "dtype", "swizzle")),
        ("sizes", ctypes.c_uint64 * 4),
        ("strides", ctypes.c_uint64 * 3),
        ("box", ctypes.c_uint32 * 4),
    ]


class Launch(ctypes.Structure):
    """One launch, as the driver got it."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("function", "stream", "context")),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("num_attributes", ctypes.c_uint32),
        ("params", ctypes.c_uint8 * _MAX_PARAM_BYTES),
        ("maps", FakeMap * _MAX_MAPS),
    ]

    def read_params(self, structure: type[ctypes.Structure]) -> Any:
        return structure.from_buffer_copy(self.params)


class FakeDriver:
    """The built library; ``path`` is what ``_C`` takes as the driver."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("g++") or shutil.which("c++")
        assert compiler, "no C++ compiler on the path"
        self.path = str(folder / "libfake_driver.so")
        command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
        subprocess.run([*command, str(_SOURCE), "-o", self.path], check=True)
        self.library = ctypes.CDLL(self.path)
        assert self.library.fake_launch_bytes() == ctypes.sizeof(Launch)

    def reset(self, params: type[ctypes.Structure], *, num_maps: int) -> None:
        self.library.fake_reset(ctypes.sizeof(params), num_maps)

    def capture(self, stream: int, number: int) -> None:
        """From now on, launches on ``stream`` belong to a graph capture."""
        self.library.fake_capture(ctypes.c_uint64(stream), ctypes.c_uint64(number))

    def fail(self, *, launch: int = 0, encode: int = 0) -> None:
        """From now on, these are the results of launching and encoding."""
        self.library.fake_fail(launch, encode)

    @property
    def num_encoded(self) -> int:
        return int(self.library.fake_num_encoded())

    @property
    def num_misaligned(self) -> int:
        """Tensor maps that did not start at a multiple of 64 bytes."""
        return int(self.library.fake_num_misaligned())

    @property
    def launches(self) -> list[Launch]:
        found = [Launch() for _ in range(self.library.fake_num_launches())]
        for index, launch in enumerate(found):
            self.library.fake_read_launch(index, ctypes.byref(launch))
        return found
