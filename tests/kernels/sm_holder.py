"""Who keeps SMs from the kernel under test? Another kernel, on another stream; its CTAs fill an SM each for a time."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator

import torch

from perseus_compile.jit import compiler, driver

_SOURCE = """
struct Hold { unsigned long long nanoseconds; int* sink; };
extern "C" __global__ void hold(Hold hold) {
    extern __shared__ int memory[];
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < hold.nanoseconds);
    memory[threadIdx.x] = 1;
    if (memory[threadIdx.x] == 0) *hold.sink = 1;
}
"""
_SHARED_BYTES = 200 * 1024  # with so much of it taken, no CTA of ours fits beside
_HOLD_NS = 400_000_000


class _Hold(ctypes.Structure):
    _fields_ = [("nanoseconds", ctypes.c_uint64), ("sink", ctypes.c_uint64)]


@contextlib.contextmanager
def hold_sms(num_held: int) -> Iterator[Callable[[], bool]]:
    """Inside, so many SMs are taken, for 0.4 s at most. The value says whether they still are."""
    image, _ = compiler.compile_source(_SOURCE, "sm_90a")
    holder = driver.Kernel(image, "hold")
    holder.set_shared_bytes(_SHARED_BYTES)
    side, ended = torch.cuda.Stream(), torch.cuda.Event()
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    params = _Hold(nanoseconds=_HOLD_NS, sink=sink.data_ptr())
    holder.launcher(params, moving={}, grid=num_held, threads=32, shared_bytes=_SHARED_BYTES).launch(side.cuda_stream)
    ended.record(side)
    yield lambda: not ended.query()
    side.synchronize()
