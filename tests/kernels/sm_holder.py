"""Who keeps SMs from the kernel under test? Another kernel, whose CTAs fill an SM each for a while."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator

import torch

from perseus_compile.jit import compiler, driver

_SOURCE = """
extern "C" __global__ void hold(unsigned long long nanoseconds, int* sink) {
    extern __shared__ int memory[];
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < nanoseconds);
    memory[threadIdx.x] = 1;
    if (memory[threadIdx.x] == 0) *sink = 1;
}
"""
