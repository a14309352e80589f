"""What is one kernel variant? Its template numbers, its source text, and the key under which its image is kept."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from pathlib import Path

from perseus_compile.errors import BuildError

_ENTRY_HEADER = "perseus/moe/sm90_moe_fwd.cuh"
ACTIVATIONS = {
    "silu": "kSilu",
    "gelu": "kGelu",
    "gelu_tanh": "kGeluTanh",
    "clamped_swiglu": "kClampedSwiglu",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileConfig:
    """Shape of a tile. See common/config.cuh; legality is checked there at compile time."""

    groups: int  # consumer warpgroups; each multiplies 128 weight rows
    max_tokens: int  # tokens per tile, at most
    stages: int  # of the load pipeline

    @property
    def may_route(self) -> bool:
        """Whether a launch with such tiles can compute the router, too."""
        return self.groups == 1


# Rows per expert decide: few rows stream weights with deep pipelines, many rows fill 256 x 128 tiles.
TILE_CONFIGS = {
    "few8": TileConfig(groups=1, max_tokens=8, stages=12),
    "few16": TileConfig(groups=1, max_tokens=16, stages=11),
    "few32": TileConfig(groups=1, max_tokens=32, stages=10),
    "few64": TileConfig(groups=1, max_tokens=64, stages=8),
    "many128": TileConfig(groups=2, max_tokens=128, stages=4),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariantSpec:
    """One variant of the MoE kernel. The token count is not part of it, nor is any width."""

    tiles: TileConfig
    weight_layout: str  # out_in | in_out
    paired_columns: bool  # gate and up alternate along the contiguous axis of in_out weights
    activation: str
    routes: bool = False  # the launch computes the router, too
    arch: str = "sm_90a"

    def source(self) -> str:
        layout = {"out_in": "kOutIn", "in_out": "kInOut"}[self.weight_layout]
        tiles = self.tiles
        return (
            '#include "perseus/common/config.cuh"\n'
            "namespace perseus {\n"
            f"using ThisConfig = MoeConfig<{tiles.groups}, {tiles.max_tokens}, {tiles.stages}, WeightLayout::{layout}, "
            f"{str(self.paired_columns).lower()}, Activation::{ACTIVATIONS[self.activation]}, "
            f"{str(self.routes).lower()}>;\n"
            "}\n"
            "#define PERSEUS_CONFIG ThisConfig\n"
            f'#include "{_ENTRY_HEADER}"\n'
        )


def source_key(source: str, arch: str, compiler_version: str, flags: tuple[str, ...]) -> str:
    """Hash of everything that changes an image: source, headers, compiler, flags, architecture."""
    digest = hashlib.sha256()
    for part in (source, headers_digest(), compiler_version, *flags, arch):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part.encode())
    return digest.hexdigest()[:32]


def why_no_variant(gate_layout: str, activation: str) -> str | None:
    """Why no variant of the fused kernel computes such experts; None: ``spec_for`` has one."""
    if gate_layout != "none" and activation in ACTIVATIONS:
        return None
    known = ", ".join(ACTIVATIONS)
    return f"the fused kernel computes {known} with a gate, got {activation} with gate_layout '{gate_layout}'"


def spec_for(tiles: str, *, weight_layout: str, gate_layout: str, activation: str, routes: bool = False) -> VariantSpec:
    """The variant for a call's layout numbers and a tile configuration's name."""
    return VariantSpec(
        tiles=TILE_CONFIGS[tiles],
        weight_layout=weight_layout,
        paired_columns=weight_layout == "in_out" and gate_layout == "interleaved",
        activation=activation,
        routes=routes,
    )


@functools.cache
def include_dir() -> Path:
    """Folder with perseus/..., in the installed package or in a source tree.

    Raises:
        BuildError: neither has it.
    """
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "csrc" / "include", package.parent / "csrc" / "include"):
        if (candidate / _ENTRY_HEADER).is_file():
            return candidate
    raise BuildError(
        f"the kernel headers must be installed beside the package, got no {_ENTRY_HEADER} under {package}; "
        "reinstall perseus_compile"
    )


@functools.cache
def headers_digest() -> str:
    """Hash of all of our headers, names included."""
    digest = hashlib.sha256()
    root = include_dir()
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".cuh", ".hpp")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
