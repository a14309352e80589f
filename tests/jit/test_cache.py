"""Is a kernel image that was stored the one that is loaded, and is anything else a miss?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from perseus_compile import fused_experts, fused_router
from perseus_compile.errors import BuildError
from perseus_compile.jit import compiler
from perseus_compile.jit import spec as spec_module
from perseus_compile.jit.cache import ImageCache
from perseus_compile.jit.spec import TILE_CONFIGS, source_key, spec_for

SPEC = spec_for("few16", weight_layout="out_in", gate_layout="concatenated", activation="silu")
_NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo V1; exit; fi
for last; do :; done
printf "%s" "$*" > "$last"  # its own command line as the image
"""
IMAGE = b"\x7fELF" + bytes(range(256))


def test_load_returns_what_was_stored(tmp_path: Path) -> None:
    cache = ImageCache(tmp_path / "new" / "folder")
    assert cache.load("key") is None
    assert cache.store("key", IMAGE)
    assert cache.load("key") == IMAGE
    assert [path.name for path in cache.folder.iterdir()] == ["key.cubin"], "temporary files were left"


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-1], lambda d: d[:20], lambda d: b"", lambda d: d[:-1] + b"x", lambda d: d + b"x"]
)
def test_corrupt_is_a_miss(tmp_path: Path, damage: object, caplog: pytest.LogCaptureFixture) -> None:
    cache = ImageCache(tmp_path)
    cache.store("key", IMAGE)
    cache.path("key").write_bytes(damage(cache.path("key").read_bytes()))  # type: ignore[operator]
    assert cache.load("key") is None
    assert "corrupt" in caplog.text
    cache.store("key", IMAGE)
    assert cache.load("key") == IMAGE


def test_folder_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    assert not ImageCache(tmp_path / "file" / "folder").store("key", IMAGE)
    assert "cannot be written" in caplog.text


def test_key_knows_everything_that_changes_the_image() -> None:
    others = [
        spec_for("few32", weight_layout="out_in", gate_layout="concatenated", activation="silu"),
        spec_for("few16", weight_layout="in_out", gate_layout="concatenated", activation="silu"),
        spec_for("few16", weight_layout="in_out", gate_layout="interleaved", activation="silu"),
        spec_for("few16", weight_layout="out_in", gate_layout="concatenated", activation="gelu"),
    ]
    source = SPEC.source()
    keys = [source_key(spec.source(), "sm_90a", "nvrtc 13.0", ("-O3",)) for spec in (SPEC, *others)]
    keys += [
        source_key(source, "sm_90a", "nvrtc 13.1", ("-O3",)),
        source_key(source, "sm_90a", "nvrtc 13.0", ("-O2",)),
        source_key(source, "sm_90a", "nvrtc 13.0", ("-O", "3")),
        source_key(source, "sm_90", "nvrtc 13.0", ("-O3",)),
    ]
    assert len(set(keys)) == len(keys)
    assert source_key(source, "sm_90a", "nvrtc 13.0", ("-O3",)) == keys[0]


def test_interleaved_out_in_needs_no_variant_of_its_own() -> None:
    assert spec_for("few16", weight_layout="out_in", gate_layout="interleaved", activation="silu") == SPEC


def test_token_count_is_no_part_of_a_variant() -> None:
    assert not {"num_tokens", "tokens", "T"} & set(SPEC.__dataclass_fields__)
    assert len(TILE_CONFIGS) <= 6


def test_wrong_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSEUS_NVCC", str(tmp_path / "no-such-nvcc"))
    with pytest.raises(BuildError, match=r"PERSEUS_NVCC must name a compiler, got .*no-such-nvcc.*; unset it"):
        compiler.compiler_version()
    with pytest.raises(BuildError, match="no-such-nvcc"):
        compiler.build(SPEC, ImageCache(tmp_path))


def test_wrong_compiler_means_the_plain_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PERSEUS_NVCC", str(tmp_path / "no-such-nvcc"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(fused_experts, "_kernels", {})
    assert fused_experts.kernel_for(SPEC, 0) is None
    assert fused_experts.kernel_for(SPEC, 0) is None
    assert len(caplog.records) == 1 and "plain path" in caplog.text
    monkeypatch.setattr(fused_router, "_kernels", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fused_router._kernel(1, 0) is None
    assert "no-such-nvcc" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("what", ["experts", "router"])
def test_nvcc_compiles_both_kernels(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(_NVCC)
    nvcc.chmod(0o755)
    monkeypatch.setenv("PERSEUS_NVCC", str(nvcc))
    cache = ImageCache(tmp_path / "cache")
    source = SPEC.source() if what == "experts" else fused_router.kernel_source(4)
    image = compiler.build_source(source, "sm_90a", cache)
    assert b"-gencode arch=compute_90a,code=sm_90a" in image
    assert compiler.build_source(source, "sm_90a", cache) == image
    assert len(list(cache.folder.iterdir())) == 1


def test_headers_of_both_suffixes_are_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_module, "include_dir", lambda: tmp_path)
    digests = set()
    for name in ("a.cuh", "b.hpp", "notes.txt"):
        (tmp_path / name).write_text("x")
        digests.add(spec_module.headers_digest.__wrapped__())
    assert len(digests) == 2


def test_build_uses_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fake(source: str, arch: str) -> tuple[bytes, str]:
        calls.append(arch)
        return IMAGE, ""

    monkeypatch.delenv("PERSEUS_NVCC", raising=False)
    monkeypatch.setattr(compiler, "compile_source", fake)
    monkeypatch.setattr(compiler, "compiler_version", lambda: "nvrtc 13.0")
    cache = ImageCache(tmp_path)
    assert compiler.build(SPEC, cache) == IMAGE
    assert compiler.build(SPEC, cache) == IMAGE
    assert calls == ["sm_90a"]
    cache.path(next(iter(tmp_path.iterdir())).stem).write_bytes(b"junk")
    assert compiler.build(SPEC, cache) == IMAGE
    assert len(calls) == 2
