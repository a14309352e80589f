"""How does Python reach the CUDA driver? Modules, tensor maps and launches through ctypes; needs no CUDA toolkit."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from perseus_compile.errors import LaunchError
from perseus_compile.jit.cache import default_folder

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_BF16 = 9  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
_SWIZZLE_128B = 3
_L2_PROMOTION_128B = 2  # 256 bytes cost 2-3 % of the read rate where weights are streamed once (docs/measured.md)
_CAPTURE_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
TENSOR_MAP_BYTES = 128


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise LaunchError(
            f"the CUDA driver library libcuda.so.1 must be loadable, got {error}; install a driver or run on CPU"
        ) from error


_FIND_THE_CAUSE = "look for the first CUDA error of this process: CUDA_LAUNCH_BLOCKING=1 names the call it comes from"


def _check(result: int, what: str, what_to_do: str = _FIND_THE_CAUSE) -> None:
    if result == 0:
        return
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(result, ctypes.byref(text))
    reason = text.value.decode() if text.value else "unknown error"
    raise LaunchError(f"{what} must succeed, got CUDA error {result} ({reason}); {what_to_do}")


def refuse_in_capture() -> None:
    """To be called before anything that synchronises on first use: inside a capture that would spoil the graph.

    Raises:
        LaunchError: the current stream is being captured.
    """
    if torch.cuda.is_current_stream_capturing():
        raise LaunchError(
            "a kernel must be loaded before a CUDA graph captures it, got its first call inside a capture; "
            "call once with this token count before capturing"
        )


def capture_id(stream: int) -> int:
    """Number of the graph capture that ``stream`` is in, unique in the process; 0: it is in none."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    result = _driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    if result != 0:
        _check(result, "asking whether a stream is being captured")
    return number.value if status.value == _CAPTURE_ACTIVE else 0


class AlignedBuffer:
    """Host memory for one tensor map, which must start on a multiple of 64 bytes."""

    def __init__(self, num_bytes: int = TENSOR_MAP_BYTES, align: int = 64) -> None:
        self._raw = ctypes.create_string_buffer(num_bytes + align)
        start = ctypes.addressof(self._raw)
        self.address = start + (-start) % align


def encode_tensor_map(
    address: int, sizes: Sequence[int], strides_bytes: Sequence[int], box: Sequence[int]
) -> AlignedBuffer:
    """Tensor map of a BF16 tensor, innermost axis first, 128-byte swizzle, zeros outside.

    Args:
        address: device address, a multiple of 16.
        sizes: elements per axis.
        strides_bytes: of all axes but the innermost, multiples of 16.
        box: elements per axis that one load brings.

    Raises:
        LaunchError: the driver refuses the numbers.
    """
    rank = len(sizes)
    tensor_map = AlignedBuffer()
    result = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(tensor_map.address),
        ctypes.c_int(_BF16),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides_bytes),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*([1] * rank)),
        ctypes.c_int(0),
        ctypes.c_int(_SWIZZLE_128B),
        ctypes.c_int(_L2_PROMOTION_128B),
        ctypes.c_int(0),
    )
    _check(result, f"encoding a tensor map with sizes={list(sizes)}, strides={list(strides_bytes)}, box={list(box)}")
    return tensor_map


class Kernel:
    """One loaded kernel of the current device.

    Args:
        image: the cubin.
        name: entry point.
        facts_name: u32 array in the cubin that says what the host must know; None: there is none.
        num_facts: its length.
    """

    def __init__(self, image: bytes, name: str, facts_name: str | None = None, num_facts: int = 0) -> None:
        driver = _driver()
        self._module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        _check(
            driver.cuModuleLoadData(ctypes.byref(self._module), image),
            f"loading the module of {name}",
            f"update the NVIDIA driver if it is older than the compiler, else remove the files in {default_folder()}",
        )
        _check(
            driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()),
            f"finding kernel {name} in its module",
        )
        self.facts: list[int] = self._read_facts(facts_name, num_facts) if facts_name else []

    def _read_facts(self, name: str, count: int) -> list[int]:
        address = ctypes.c_uint64()
        size = ctypes.c_size_t()
        driver = _driver()
        _check(
            driver.cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), self._module, name.encode()),
            f"finding {name} in the module",
        )
        if size.value != 4 * count:
            raise LaunchError(
                f"{name} must hold {count} words, got {size.value} bytes; remove the files in {default_folder()}"
            )
        values = (ctypes.c_uint32 * count)()
        _check(driver.cuMemcpyDtoH_v2(values, address, ctypes.c_size_t(size.value)), f"reading {name}")
        return list(values)

    def set_shared_bytes(self, num_bytes: int) -> None:
        result = _driver().cuFuncSetAttribute(
            self._function, ctypes.c_int(_MAX_DYNAMIC_SHARED), ctypes.c_int(num_bytes)
        )
        _check(result, f"asking for {num_bytes} bytes of shared memory")

    def launch(self, grid: int, threads: int, shared_bytes: int, stream: int, arguments: Any) -> None:
        """``arguments``: array of addresses, one per kernel parameter."""
        result = _driver().cuLaunchKernel(
            self._function, grid, 1, 1, threads, 1, 1, shared_bytes, ctypes.c_void_p(stream), arguments, None
        )
        if result != 0:
            _check(result, f"launching {grid} CTAs of {threads} threads with {shared_bytes} bytes of shared memory")
