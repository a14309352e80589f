// How does a consumer warpgroup turn full stages into sums? Weights are A (M side), tokens are B (N side).
#pragma once

#include "perseus/common/params.cuh"
#include "perseus/mma/descriptor.cuh"
#include "perseus/mma/pipeline.cuh"
#include "perseus/ptx/sync.cuh"
#include "perseus/ptx/wgmma.cuh"

namespace perseus {

// Sums of one warpgroup over a tile of kN tokens: for sub-tile s, weight row `16*warp + lane/4 + 8*h` and token
// `8*j + 2*(lane%4) + c` the sum is sums[s][4*j + 2*h + c].
template <u32 kN>
using TileSums = float[kSubTilesPerGroup][kN / 2];

template <class C, u32 kN>
PERSEUS_D void multiply_tile(TileSums<kN>& sums, SharedStorage<C>& shared, RingPosition<C::kStages>& position,
                             u32 group, u32 num_k_blocks) {
    const bool answers = threadIdx.x % 32 == 0;
#pragma unroll
    for (u32 s = 0; s < kSubTilesPerGroup; ++s) {
#pragma unroll
        for (u32 i = 0; i < kN / 2; ++i) sums[s][i] = 0.0f;
    }
    u32 previous_stage = 0;
    for (u32 k_block = 0; k_block < num_k_blocks; ++k_block) {
        ptx::mbarrier_wait(&shared.stage_full[position.slot], position.parity);
        ptx::fence_proxy_async_shared();  // tokens came by cp.async, which is not the tensor cores' proxy
        u64 weights[kSubTilesPerGroup];
#pragma unroll
        for (u32 s = 0; s < kSubTilesPerGroup; ++s) {
            weights[s] = make_descriptor(shared.weight_address(position.slot) +
                                         (s * C::kGroups + group) * kSubTileBytes);
        }
        const u64 tokens = make_descriptor(shared.token_address(position.slot));
        ptx::wgmma_fence();
#pragma unroll
        for (u32 step = 0; step < kTileK / 16; ++step) {
#pragma unroll
            for (u32 s = 0; s < kSubTilesPerGroup; ++s) {
                ptx::Wgmma<kN, C::kLayout == WeightLayout::kInOut>::run(
                    sums[s], weights[s] + step * kWeightStep<C::kLayout>, tokens + step * kTokenStep);
            }
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();  // the products of the previous stage are done, its memory is free
        if (k_block > 0 && answers) ptx::mbarrier_arrive(&shared.stage_empty[previous_stage]);
        previous_stage = position.slot;
        position.advance();
    }
    ptx::wgmma_wait<0>();
    if (answers) ptx::mbarrier_arrive(&shared.stage_empty[previous_stage]);
}

// Calls run(width) with the smallest compiled tile width that holds `num_tokens`, as a compile-time constant.
template <u32 kValue>
struct TileWidth {
    static constexpr u32 value = kValue;
};

template <u32 kMaxTokens, typename Run>
PERSEUS_D void with_tile_width(u32 num_tokens, Run run) {
#define PERSEUS_TRY_WIDTH(WIDTH)                                  \
    if constexpr (WIDTH <= kMaxTokens) {                          \
        if (num_tokens <= WIDTH) return run(TileWidth<WIDTH>{});  \
    }
    PERSEUS_FOR_EACH_TILE_WIDTH(PERSEUS_TRY_WIDTH)
#undef PERSEUS_TRY_WIDTH
}

}  // namespace perseus
