"""How does source text become an image? NVRTC, which torch's CUDA wheels bring along, or nvcc where asked for."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import logging
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from perseus_compile import env
from perseus_compile.errors import BuildError
from perseus_compile.jit.cache import ImageCache, default_folder
from perseus_compile.jit.spec import VariantSpec, include_dir, source_key

_log = logging.getLogger(__name__)
# lambdas have no place for __device__ that a host compiler would take too
FLAGS = ("-std=c++17", "-default-device")
_NVCC_FLAGS = ("-std=c++17", "-O3", "-cubin")
_LIBRARY_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")


@functools.cache
def _nvrtc() -> Any:
    """The library: of the installed wheels first, then whatever the loader finds.

    Raises:
        BuildError: there is none.
    """
    candidates: list[str] = []
    for distribution in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for file in importlib.metadata.files(distribution) or ():
                if file.name in _LIBRARY_NAMES:
                    candidates.append(str(file.locate()))
    for name in (*candidates, *_LIBRARY_NAMES):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise BuildError(
        f"NVRTC must be loadable to compile kernels, got none of {[*candidates, *_LIBRARY_NAMES]}; "
        f"install nvidia-cuda-nvrtc, or set {env.NVCC.name} to a compiler"
    )


def _nvrtc_check(result: int, what: str) -> None:
    if result != 0:
        library = _nvrtc()
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise BuildError(
            f"NVRTC must be able to {what}, got {library.nvrtcGetErrorString(result).decode()}; "
            f"install another version of nvidia-cuda-nvrtc, or set {env.NVCC.name} to a compiler"
        )


def _nvcc() -> str | None:
    """The nvcc that the user asks for; None: use NVRTC.

    Raises:
        BuildError: there is no such program.
    """
    nvcc = env.NVCC.read()
    if nvcc is not None and shutil.which(nvcc) is None:
        raise BuildError(f"{env.NVCC.name} must name a compiler, got {nvcc!r}; unset it to compile with NVRTC")
    return nvcc


def compiler_version() -> str:
    """Name and version of the compiler in use; part of the cache key.

    Raises:
        BuildError: there is no compiler.
    """
    nvcc = _nvcc()
    if nvcc:
        output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
        return "nvcc " + output.strip().splitlines()[-1] if output.strip() else f"nvcc {nvcc}"
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc_check(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "tell its version")
    return f"nvrtc {major.value}.{minor.value}"


def _log_failure(source: str, text: str) -> Path:
    """Keeps the compiler's words and the source in a file that the error can name."""
    handle, name = tempfile.mkstemp(prefix="perseus-build-", suffix=".log")
    with os.fdopen(handle, "w") as file:
        file.write(f"{source}\n{text}\n")
    return Path(name)


def compile_source(source: str, arch: str, extra_flags: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """Image and log of one translation unit, by NVRTC.

    Raises:
        BuildError: it does not compile; the message names the log file.
    """
    library = _nvrtc()
    program = ctypes.c_void_p()
    _nvrtc_check(
        library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"perseus.cu", 0, None, None),
        "take a program",
    )
    try:
        options = [f"--gpu-architecture={arch}", f"-I{include_dir()}", *FLAGS, *extra_flags]
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        result = library.nvrtcCompileProgram(program, len(options), array)
        size = ctypes.c_size_t()
        _nvrtc_check(library.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "tell the size of its log")
        text = ctypes.create_string_buffer(max(size.value, 1))
        _nvrtc_check(library.nvrtcGetProgramLog(program, text), "return its log")
        log = text.value.decode(errors="replace")
        if result != 0:
            path = _log_failure(source, log)
            raise BuildError(f"a kernel must compile for {arch}, got errors from NVRTC; read {path}")
        _nvrtc_check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)), "tell the size of an image")
        image = ctypes.create_string_buffer(size.value)
        _nvrtc_check(library.nvrtcGetCUBIN(program, image), "return an image")
        return image.raw, log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _compile_nvcc(source: str, arch: str, nvcc: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="perseus-nvcc-") as folder:
        unit, image = Path(folder) / "perseus.cu", Path(folder) / "perseus.cubin"
        unit.write_text(source)
        target = f"arch={arch.replace('sm_', 'compute_')},code={arch}"
        command = [nvcc, *_NVCC_FLAGS, "-gencode", target, "-I", str(include_dir()), str(unit), "-o", str(image)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            log = _log_failure(source, " ".join(command) + "\n" + done.stdout + done.stderr)
            raise BuildError(f"a kernel must compile for {arch}, got errors from {nvcc}; read {log}")
        return image.read_bytes()


def image_key(source: str, arch: str) -> str:
    """The key of an image in the cache.

    Raises:
        BuildError: there is no compiler.
    """
    return source_key(source, arch, compiler_version(), _NVCC_FLAGS if _nvcc() else FLAGS)


def build(spec: VariantSpec, cache: ImageCache | None = None) -> bytes:
    """The image of ``spec``; see ``build_source``."""
    return build_source(spec.source(), spec.arch, cache)


def build_source(source: str, arch: str, cache: ImageCache | None = None) -> bytes:
    """The image of one translation unit: from the cache, or compiled and stored.

    Two processes that miss at the same time both compile; the later rename wins and both images are the same.

    Raises:
        BuildError: it does not compile; the message names the log file.
    """
    cache = cache or ImageCache(default_folder())
    key = image_key(source, arch)
    image = cache.load(key)
    if image is None:
        start = time.perf_counter()
        nvcc = _nvcc()
        image = _compile_nvcc(source, arch, nvcc) if nvcc else compile_source(source, arch)[0]
        _log.info("compiled %s for %s in %.1f s", key, arch, time.perf_counter() - start)
        cache.store(key, image)
    return image
