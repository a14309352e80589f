// What do all threads of a CTA do as one? Claim work, tell other CTAs that theirs is stored, wait for others.
//
// Every function is called by all threads; `broadcast` is one word of shared memory.
#pragma once

#include "perseus/common/wait.cuh"

namespace perseus {

// Tells all threads thread 0's `value`.
PERSEUS_D u32 broadcast_of_first(u32 value, u32* broadcast) {
    if (threadIdx.x == 0) *broadcast = value;
    __syncthreads();
    const u32 told = *broadcast;
    __syncthreads();
    return told;
}

// Number of the CTA's next item. `pending` is thread 0's claim, made before; unless it is past the end, the claim after
// it is on its way while the caller works on this one.
PERSEUS_D u32 next_claim(u32* claims, u32 num_items, u32& pending, u32* broadcast) {
    const u32 claimed = pending;
    if (threadIdx.x == 0 && claimed < num_items) pending = atomicAdd(claims, 1u);
    return broadcast_of_first(claimed, broadcast);
}

// Everything that the CTA has stored comes before the addition.
PERSEUS_D void signal(u32* counter, u32 value) {
    __syncthreads();
    if (threadIdx.x == 0) ptx::add_release(counter, value);
}

// False: the launch is aborted, what the counter stands for is not there.
PERSEUS_D bool wait_by_all(const MoeParams& params, const u32* counter, u32 expected, WaitPhase phase, u32* broadcast) {
    const bool arrived = threadIdx.x == 0 && wait_at_least(params, counter, expected, {phase, 0, 0});
    return broadcast_of_first(arrived, broadcast) != 0;
}

}  // namespace perseus
