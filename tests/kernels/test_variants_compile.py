"""Does every shipped variant compile for sm_90a, without spills, and onto the tensor cores? Needs NVRTC, no GPU."""

from __future__ import annotations

import re
import struct

import pytest

from perseus_compile import fused_router
from perseus_compile.errors import BuildError
from perseus_compile.jit import compiler
from perseus_compile.jit.shipped import MAX_SHIPPED, shipped_variants
from perseus_compile.jit.spec import VariantSpec

_HGMMA = 0x79F0  # low 16 bits of an unconditional wgmma instruction in sm_90 machine code


def _has_nvrtc() -> bool:
    try:
        compiler.compiler_version()
    except BuildError:
        return False
    return True


def _count_instructions(image: bytes, low_bits: int) -> int:
    """Instructions are 16 bytes; an image's sections are aligned to more than that."""
    words = struct.unpack(f"<{len(image) // 8}Q", image[: len(image) // 8 * 8])
    return sum(word & 0xFFFF == low_bits for word in words[::2])


def test_number_of_shipped_variants() -> None:
    variants = shipped_variants()
    assert len(set(variants)) == len(variants) <= MAX_SHIPPED


@pytest.mark.skipif(not _has_nvrtc(), reason="needs NVRTC (pip install nvidia-cuda-nvrtc)")
@pytest.mark.parametrize("experts_per_lane", [1, 32])
def test_router_compiles(experts_per_lane: int) -> None:
    assert compiler.compile_source(fused_router.kernel_source(experts_per_lane), "sm_90")[0]


@pytest.mark.slow
@pytest.mark.skipif(not _has_nvrtc(), reason="needs NVRTC (pip install nvidia-cuda-nvrtc)")
@pytest.mark.parametrize(
    "variant",
    shipped_variants(),
    ids=lambda v: f"{v.tiles.groups}x{v.tiles.max_tokens}-{v.weight_layout}-{v.activation}{'-router' * v.routes}",
)
def test_variant_compiles_without_spills(variant: VariantSpec) -> None:
    image, log = compiler.compile_source(variant.source(), variant.arch, ("--ptxas-options=-v",))
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)  # one pair per function
    registers = re.search(r"Used (\d+) registers", log)
    assert spills and registers, log
    assert set(spills) == {("0", "0")}, log
    assert int(registers[1]) <= (168 if variant.tiles.groups == 2 else 255)
    assert "serialized" not in log, log
    widths = sum(width <= variant.tiles.max_tokens for width in (8, 16, 24, 32, 48, 64, 80, 96, 112, 128))
    assert _count_instructions(image, _HGMMA) >= 8 * widths  # 2 sub-tiles x 4 steps of K per tile width


@pytest.mark.skipif(not _has_nvrtc(), reason="needs NVRTC (pip install nvidia-cuda-nvrtc)")
def test_failure_names_its_log() -> None:
    with pytest.raises(BuildError, match="perseus-build-") as failure:
        compiler.compile_source("this is no C++;", "sm_90a")
    with open(str(failure.value).rsplit("read ", 1)[1]) as log:
        assert "this is no C++;" in log.read()
