// How do bytes get into shared memory without passing through registers? TMA boxes and 16-byte cp.async, thin.
#pragma once

#include "perseus/common/params.cuh"
#include "perseus/ptx/mbarrier.cuh"

namespace perseus::ptx {

PERSEUS_D void prefetch_tensor_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// One box of a 4-D tensor map; completes `barrier` with its bytes, boxes that reach outside the tensor included.
PERSEUS_D void tma_load_4d(void* smem, const TensorMap* map, u64* barrier, u32 c0, u32 c1, u32 c2, u32 c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(smem_address(smem)),
        "l"(map), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

PERSEUS_D void tma_load_2d(u32 smem, const TensorMap* map, u64* barrier, u32 c0, u32 c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            smem),
        "l"(map), "r"(smem_address(barrier)), "r"(c0), "r"(c1)
        : "memory");
}

PERSEUS_D void prefetch_l2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

// Copies 16 bytes; the part past `valid_bytes` is zero-filled.
PERSEUS_D void cp_async_16(u32 smem, const void* global, u32 valid_bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(valid_bytes)
                 : "memory");
}

// The barrier gets one of its expected arrivals once all earlier cp.async of this thread are complete.
PERSEUS_D void cp_async_arrive(u64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
}

}  // namespace perseus::ptx
