// How do CTAs tell each other that global memory is ready, and how do proxies see each other's writes? Thin.
#pragma once

#include "perseus/ptx/mbarrier.cuh"

namespace perseus::ptx {

PERSEUS_D u32 load_acquire(const u32* address) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

// Everything this thread has seen, its CTA's writes before a barrier included, comes before the addition.
PERSEUS_D void add_release(u32* address, u32 value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Orders ordinary accesses of shared memory before those of the tensor cores and the copy engine.
PERSEUS_D void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same for global memory: between rows that consumers stored and copies of them by the copy engine.
PERSEUS_D void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

template <u32 kRegisters>
PERSEUS_D void grow_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <u32 kRegisters>
PERSEUS_D void shrink_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// 8x8 BF16 matrices, stored transposed: lane 8m + i gives the address of memory row i of matrix m.
PERSEUS_D void store_matrix_x4_trans(u32 smem, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

PERSEUS_D void store_matrix_x2_trans(u32 smem, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(smem), "r"(a), "r"(b)
                 : "memory");
}

PERSEUS_D u32 pack_bf16(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

PERSEUS_D float bf16_low(u32 packed) { return __uint_as_float(packed << 16); }
PERSEUS_D float bf16_high(u32 packed) { return __uint_as_float(packed & 0xffff0000u); }
PERSEUS_D float bf16_value(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }

}  // namespace perseus::ptx
