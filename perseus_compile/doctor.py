"""What does this machine have, and what does each missing piece cost? Only looks; installs and changes nothing."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

from perseus_compile.errors import BuildError
from perseus_compile.jit.compiler import compiler_version


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One piece that perseus_compile can make use of."""

    name: str
    found: bool
    required: bool  # perseus_compile does nothing without it
    detail: str  # version, place or number
    cost: str  # what is lost where it is missing, in words; empty where it was found


def diagnose() -> list[Finding]:
    return [
        _torch(),
        _backend_name(),
        _compiler(),
        _vector_registers(),
        _transformers(),
        _gpu(),
        _nvlink(),
        _nvrtc(),
        _nvshmem(),
    ]


def _finding(name: str, detail: str | None, cost: str, *, required: bool = False) -> Finding:
    """``detail`` is None where the piece was not found."""
    found = detail is not None
    return Finding(name=name, found=found, required=required, detail=detail or "-", cost="" if found else cost)


def _torch() -> Finding:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return _finding("torch", f"{torch.__version__}, {build}, Python {platform.python_version()}", "", required=True)


def _backend_name() -> Finding:
    """Asks the entry points of the installed packages, as torch.compile does."""
    entries = importlib.metadata.entry_points(group="torch_dynamo_backends", name="perseus")
    return _finding(
        'backend "perseus"',
        next((f"entry point {entry.value}" for entry in entries), None),
        'torch.compile(backend="perseus") does not know the name: install with pip install -e .',
        required=True,
    )


def _vector_registers() -> Finding:
    capability = torch.backends.cpu.get_cpu_capability()
    return _finding(
        "CPU vector registers",
        capability if capability.startswith("AVX") else None,
        "MoE layers on the CPU are slower: their inner loops are written for AVX2 and AVX-512",
    )


def _compiler() -> Finding:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    return _finding(
        "C++ compiler",
        _first_line([compiler, "--version"]) if compiler else None,
        'Inductor cannot generate CPU code; options={"inner": "eager"} still works',
    )


def _transformers() -> Finding:
    return _finding(
        "transformers",
        _version("transformers"),
        "perseus demo, explain, diff and bench compile build Hugging Face models: pip install 'perseus_compile[hf]'",
    )


def _gpu() -> Finding:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    counts = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return _finding(
        "NVIDIA GPU",
        counts or None,
        "MoE layers run on the CPU; a bfloat16 layer is one kernel on compute capability 9.0 (H100, H200)",
    )


def _nvlink() -> Finding:
    num_gpus = torch.cuda.device_count()
    pairs = [
        f"{one}-{other}"
        for one, other in itertools.combinations(range(num_gpus), 2)
        if torch.cuda.can_device_access_peer(one, other)
    ]
    links = shutil.which("nvidia-smi") and " NV" in _output(["nvidia-smi", "topo", "-m"])
    return _finding(
        "NVLink",
        f"peer access between GPUs {', '.join(pairs)}" if pairs and links else None,
        "slower exchanges between ranks: they go through NCCL, which then has no direct links",
    )


def _nvrtc() -> Finding:
    try:
        version = compiler_version()
    except BuildError:
        version = None
    return _finding("NVRTC", version, "GPU kernels cannot be compiled: MoE layers on a GPU take the slower plain path")


def _nvshmem() -> Finding:
    return _finding(
        "NVSHMEM",
        _nvidia_library("libnvshmem_host.so*"),
        "nothing in this version: exchanges between ranks go through torch.distributed",
    )


def _nvidia_library(pattern: str) -> str | None:
    """A library of the NVIDIA wheels that a CUDA build of torch installs beside itself."""
    site_packages = Path(torch.__file__).parents[1]
    found = sorted(site_packages.glob(f"nvidia/**/{pattern}"))
    return str(found[0].relative_to(site_packages)) if found else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(command: list[str]) -> str:
    return _output(command).partition("\n")[0]


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
