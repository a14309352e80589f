// How does a CTA wait for another one without ever hanging? Polls a counter; on the deadline it reports and goes on.
//
// After an abort every wait that is not over returns at once and the kernel runs to its end on memory it owns:
// pipelines drain as usual, a CTA that waited in vain publishes nothing more, and sums that need it become NaN. So no
// role needs a second way out.
#pragma once

#include "perseus/common/params.cuh"
#include "perseus/ptx/sync.cuh"

namespace perseus {

struct WaitSite {
    WaitPhase phase;
    u32 expert;
    u32 tile;
};

PERSEUS_D void report_timeout(const MoeParams& params, const WaitSite& site, u32 observed, u32 expected) {
    auto* control = static_cast<ControlBlock*>(params.control);
    if (atomicExch(&control->aborted, 1u) != 0 || params.error == nullptr) return;
    auto* error = static_cast<volatile ErrorRecord*>(params.error);
    error->cta = blockIdx.x;
    error->expert = site.expert;
    error->tile = site.tile;
    error->observed = observed;
    error->expected = expected;
    __threadfence_system();
    error->phase = static_cast<u32>(site.phase);  // last: the host takes a record with a phase as complete
}

PERSEUS_D bool is_aborted(const MoeParams& params) {
    return ptx::load_acquire(&static_cast<const ControlBlock*>(params.control)->aborted) != 0;
}

// One thread calls it. False: the launch is aborted, what the counter stands for is not there.
PERSEUS_D bool wait_at_least(const MoeParams& params, const u32* counter, u32 expected, const WaitSite& site) {
    u32 observed = ptx::load_acquire(counter);
    if (observed >= expected) return true;
    const u64 start = ptx::global_timer_ns();
    for (u32 tries = 1;; ++tries) {
        observed = ptx::load_acquire(counter);
        if (observed >= expected) return true;
        if (tries % 64 != 0) continue;
        if (is_aborted(params)) return false;
        if (ptx::global_timer_ns() - start > params.deadline_ns) {
            report_timeout(params, site, observed, expected);
            return false;
        }
    }
}

}  // namespace perseus
