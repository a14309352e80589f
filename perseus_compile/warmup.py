"""Which kernels does a layer need, and are they in the cache? Compiles ahead, in several processes; needs no GPU."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence

from perseus_compile import fused_router
from perseus_compile.errors import UnsupportedMoE
from perseus_compile.jit import compiler
from perseus_compile.jit.cache import ImageCache, default_folder
from perseus_compile.jit.shipped import FORMS
from perseus_compile.jit.spec import TILE_CONFIGS, spec_for, why_no_variant

DEFAULT_ARCH = "sm_90a"


@dataclasses.dataclass(frozen=True)
class Unit:
    """One kernel to compile."""

    name: str
    source: str
    arch: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a unit. ``is_kept``: it is in the cache now."""

    name: str
    seconds: float
    was_cached: bool
    is_kept: bool
    num_bytes: int


def expert_units(
    weight_layout: str, gate_layout: str, activation: str, arch: str = DEFAULT_ARCH, *, with_router: bool = True
) -> list[Unit]:
    """The kernels of one form of experts: one per tile configuration, and those that route as well.

    Raises:
        UnsupportedMoE: the fused kernel does not compute such experts.
    """
    reason = why_no_variant(gate_layout, activation)
    if reason is not None:
        raise UnsupportedMoE(f"{reason}; such experts run on the plain path, which compiles nothing")
    units = []
    for tiles, config in TILE_CONFIGS.items():
        for routes in (False, True) if with_router and config.may_route else (False,):
            spec = spec_for(
                tiles, weight_layout=weight_layout, gate_layout=gate_layout, activation=activation, routes=routes
            )
            what = "router and experts" if routes else "experts"
            units.append(Unit(f"{what} {weight_layout} {gate_layout} {activation} {tiles}", spec.source(), arch))
    return units


def router_unit(num_experts: int, arch: str = DEFAULT_ARCH) -> Unit:
    """The router kernel for so many experts; it needs nothing of an architecture's own (sm_90a -> sm_90)."""
    per_lane = fused_router.experts_of_a_lane(num_experts)
    return Unit(f"router of up to {32 * per_lane} experts", fused_router.kernel_source(per_lane), arch.rstrip("af"))


def shipped_units(arch: str = DEFAULT_ARCH) -> list[Unit]:
    """Every form of jit/shipped.py, and every router kernel."""
    routers = [router_unit(32 << power, arch) for power in range(fused_router.MAX_EXPERTS.bit_length() - 5)]
    experts = [unit for form in FORMS for unit in expert_units(*form, arch, with_router=form == FORMS[0])]
    return experts + routers


def build_all(units: Sequence[Unit], num_processes: int | None = None) -> Iterator[Outcome]:
    """Compiles what the cache lacks; outcomes come in the order in which the kernels are ready.

    Args:
        num_processes: at most so many; None: one per core that this process may use.

    Raises:
        BuildError: there is no compiler, or a kernel does not compile.
    """
    missing = []
    for unit in units:
        if ImageCache(default_folder()).load(compiler.image_key(unit.source, unit.arch)) is None:
            missing.append(unit)
        else:
            yield build_one(unit)
    if not missing:
        return
    num_processes = min(num_processes or len(os.sched_getaffinity(0)), len(missing))
    # Fresh interpreters: a fork of a process with threads, as torch has, may wait for ever.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(num_processes, context) as pool:
        futures = [pool.submit(build_one, unit) for unit in missing]
        try:
            for future in concurrent.futures.as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def build_one(unit: Unit) -> Outcome:
    """Compiles one kernel unless the cache has it."""
    start = time.perf_counter()
    cache, key = ImageCache(default_folder()), compiler.image_key(unit.source, unit.arch)
    was_cached = cache.load(key) is not None
    image = compiler.build_source(unit.source, unit.arch, cache)
    seconds = time.perf_counter() - start
    return Outcome(unit.name, seconds, was_cached, cache.path(key).is_file(), len(image))
