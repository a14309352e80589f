// How does one thread signal others inside a CTA about shared memory? mbarrier objects and named barriers, thin.
#pragma once

#include "perseus/common/types.cuh"

namespace perseus::ptx {

PERSEUS_D u32 smem_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

PERSEUS_D void mbarrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
PERSEUS_D void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

PERSEUS_D void mbarrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

PERSEUS_D void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
                 : "memory");
}

PERSEUS_D bool mbarrier_try_wait(u64* barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(smem_address(barrier)), "r"(parity)
        : "memory");
    return done != 0;
}

PERSEUS_D u64 global_timer_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// NOTE: only roles of the same CTA arrive here, and a role that waits for another CTA goes on after its deadline. So
// this wait ends unless an arrival is lost, which would be our bug; the trap turns that into an error.
PERSEUS_D void mbarrier_wait(u64* barrier, u32 parity) {
    constexpr u64 kLostNs = 60'000'000'000;
    u64 start = 0;
    for (u32 tries = 1; !mbarrier_try_wait(barrier, parity); ++tries) {
        if (tries % 1024 != 0) continue;
        const u64 now = global_timer_ns();
        if (start == 0) start = now;
        if (now - start > kLostNs) __trap();
    }
}

// Barrier 0 is __syncthreads(); each consumer warpgroup owns one of the others.
PERSEUS_D void named_barrier_sync(u32 barrier, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace perseus::ptx
