"""Does warming up put exactly the kernels into the cache that calls look for?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from perseus_compile import env, fused_router, warmup
from perseus_compile.errors import BuildError, UnsupportedMoE
from perseus_compile.jit import compiler
from perseus_compile.jit.shipped import shipped_variants
from perseus_compile.jit.spec import TILE_CONFIGS, spec_for


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path))
    return tmp_path


@pytest.fixture
def fake_nvrtc(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compiling takes no time; the list holds what was compiled in this process."""
    compiled: list[str] = []

    def compile_source(source: str, arch: str) -> tuple[bytes, str]:
        compiled.append(arch)
        return source.encode(), ""

    monkeypatch.delenv(env.NVCC.name, raising=False)
    monkeypatch.setattr(compiler, "compiler_version", lambda: "nvrtc 0.0")
    monkeypatch.setattr(compiler, "compile_source", compile_source)
    return compiled


def test_units_are_what_calls_build() -> None:
    units = warmup.expert_units("in_out", "interleaved", "clamped_swiglu")
    form = {"weight_layout": "in_out", "gate_layout": "interleaved", "activation": "clamped_swiglu"}
    kernels = [(tiles, routes) for tiles, one in TILE_CONFIGS.items() for routes in (False, True)[: 1 + one.may_route]]
    for unit, (tiles, routes) in zip(units, kernels, strict=True):
        spec = spec_for(tiles, **form, routes=routes)
        assert (unit.source, unit.arch) == (spec.source(), spec.arch)
        assert tiles in unit.name and ("router" in unit.name) == routes
    router = warmup.router_unit(100)
    assert (router.source, router.arch) == (fused_router.kernel_source(4), "sm_90")


@pytest.mark.parametrize(("gate_layout", "activation"), [("none", "silu"), ("concatenated", "clamped_silu")])
def test_experts_without_a_kernel_are_refused(gate_layout: str, activation: str) -> None:
    with pytest.raises(UnsupportedMoE, match=f"got {activation} with gate_layout '{gate_layout}'; such experts run on"):
        warmup.expert_units("out_in", gate_layout, activation)


def test_all_is_every_shipped_variant_and_every_router() -> None:
    units = warmup.shipped_units()
    sources = {unit.source for unit in units}
    assert {variant.source() for variant in shipped_variants()} < sources
    per_lane = {fused_router.experts_of_a_lane(experts) for experts in range(1, fused_router.MAX_EXPERTS + 1)}
    assert len(sources) == len(units) == len(shipped_variants()) + len(per_lane)
    assert {fused_router.kernel_source(one) for one in per_lane} < sources


def test_second_time_is_cached(fake_nvrtc: list[str]) -> None:
    unit = warmup.router_unit(8)
    first = warmup.build_one(unit)
    assert (first.was_cached, first.is_kept, first.num_bytes) == (False, True, len(unit.source))
    (second,) = warmup.build_all([unit])  # nothing to compile: no other process starts
    assert (second.was_cached, second.is_kept) == (True, True)
    assert fake_nvrtc == ["sm_90"]


def test_folder_that_cannot_be_written_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fake_nvrtc: list[str]
) -> None:
    (folder / "file").write_text("in the way")
    monkeypatch.setenv(env.CACHE_DIR.name, str(folder / "file"))
    assert not warmup.build_one(warmup.router_unit(8)).is_kept


def _has_nvrtc() -> bool:
    try:
        compiler.compiler_version()
    except BuildError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.skipif(not _has_nvrtc(), reason="needs NVRTC (pip install nvidia-cuda-nvrtc)")
def test_processes_compile_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    units = [warmup.router_unit(32), warmup.router_unit(64)]
    outcomes = list(warmup.build_all(units, num_processes=2))
    assert {one.name for one in outcomes} == {one.name for one in units}
    assert all(one.is_kept and not one.was_cached and one.num_bytes > 1000 for one in outcomes)
    monkeypatch.setattr(compiler, "compile_source", lambda *_: pytest.fail("it is in the cache"))
    assert compiler.build_source(units[0].source, units[0].arch)
    assert all(one.was_cached for one in warmup.build_all(units))


@pytest.mark.gpu
def test_a_call_finds_what_was_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = warmup.router_unit(16)
    warmup.build_one(unit)
    monkeypatch.setattr(compiler, "compile_source", lambda *_: pytest.fail("it is in the cache"))
    monkeypatch.setattr(fused_router, "_kernels", {})
    assert fused_router._kernel(1, torch.cuda.current_device()) is not None
