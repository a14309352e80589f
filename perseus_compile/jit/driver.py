"""How does Python reach the CUDA driver? Modules through ctypes, launches through ``_C``; needs no CUDA toolkit."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from perseus_compile import _C
from perseus_compile.errors import BuildError, LaunchError
from perseus_compile.jit.cache import default_folder

_log = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
LIBRARY = "libcuda.so.1"
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise LaunchError(
            f"the CUDA driver library {LIBRARY} must be loadable, got {error}; install a driver or run on CPU"
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


def load_once(kernels: dict[K, V | None], key: K, load: Callable[[], V], instead: str) -> V | None:
    """The kernel of ``key``, loaded at the first call; None, with a warning, where it cannot be built or loaded.

    What cannot be built is not tried again; what the driver refuses, which may be for want of memory, is.

    Args:
        kernels: those that were loaded before; None: could not be built.
        instead: what happens without the kernel, a clause for the warning.

    Raises:
        LaunchError: it is not loaded and the current stream is being captured.
    """
    if key not in kernels:
        refuse_in_capture()
        try:
            kernels[key] = load()
        except BuildError as error:
            _log.warning("%s; %s", error, instead)
            kernels[key] = None
        except LaunchError as error:
            _log.warning("%s; %s", error, instead)
            return None
    return kernels[key]


def current_device() -> int:
    """``torch.cuda.current_device()`` without asking whether CUDA has been initialised."""
    return torch._C._cuda_getDevice()


def current_stream(device_index: int) -> int:
    """The driver's handle of torch's current stream, without an object for it."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def allocate(num_bytes: int, stream: int) -> int:
    """Address of memory of torch's allocator on the current device, for work on ``stream``; a tensor costs more."""
    return torch._C._cuda_cudaCachingAllocator_raw_alloc(num_bytes, stream)


def free(address: int) -> None:
    """Gives memory of ``allocate`` back: to what is launched on its stream later."""
    torch._C._cuda_cudaCachingAllocator_raw_delete(address)


class Place(NamedTuple):
    """An address: ``offset`` bytes behind a base that every launch brings; without a base, the address itself."""

    base: str | None
    offset: int


class TensorMapShape(NamedTuple):
    """A BF16 tensor map, innermost axis first; 128-byte swizzle, zeros outside."""

    sizes: tuple[int, ...]  # elements per axis
    strides_bytes: tuple[int, ...]  # of all axes but the innermost, multiples of 16
    box: tuple[int, ...]  # elements per axis that one load brings


class TensorMap(NamedTuple):
    place: Place  # a multiple of 16
    shape: TensorMapShape


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
        self._context = ctypes.c_void_p()
        _check(driver.cuCtxGetCurrent(ctypes.byref(self._context)), f"asking for the context of {name}")
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

    def launcher(
        self,
        params: ctypes.Structure,
        *,
        moving: Mapping[str, Place],
        tensor_maps: Sequence[TensorMap] = (),
        bases: Sequence[str] = (),
        grid: int,
        threads: int,
        shared_bytes: int = 0,
        control: _C.ControlBlocks | None = None,
    ) -> _C.KernelLauncher:
        """Launches of one call site: ``launcher.launch(stream, *addresses of the bases)``.

        Args:
            params: the first parameter of the kernel, copied here.
            moving: which of its fields get an address at every launch, and which one.
            tensor_maps: the parameters after the first.
            bases: names for the addresses that a launch brings; the name ``control`` means the control block.

        Raises:
            LaunchError: the driver refuses a tensor map of a fixed address.
        """
        index = {name: number for number, name in enumerate((*bases, "control", None))}
        fields = type(params)
        return _C.KernelLauncher(
            function=self._function.value or 0,
            context=self._context.value or 0,
            params=bytes(params),
            patches=[(getattr(fields, name).offset, index[place.base], place.offset) for name, place in moving.items()],
            tensor_maps=[(index[one.place.base], one.place.offset, *one.shape) for one in tensor_maps],
            num_addresses=len(bases),
            grid=grid,
            threads=threads,
            shared_bytes=shared_bytes,
            control=control,
            driver=LIBRARY,
        )
