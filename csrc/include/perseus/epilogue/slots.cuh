// What happens to the sums of GEMM 2? Bias, BF16, and out to the slot of each row's (token, choice).
#pragma once

#include "perseus/epilogue/hidden.cuh"

namespace perseus {

PERSEUS_D float down_bias(const MoeParams& params, u32 expert, u32 feature) {
    if (params.down_bias == nullptr || feature >= params.model_width) return 0.0f;
    const u64 index = static_cast<u64>(expert) * params.model_width + feature;
    return ptx::bf16_value(__ldg(static_cast<const u16*>(params.down_bias) + index));
}

// Slots of the rows that this thread copies out, read before the products so that nobody waits for them after.
template <u32 kN>
struct SlotRows {
    static constexpr u32 kRowsPerPass = 128 / kChunksPerRow;
    u32 slot[ceil_div(kN, kRowsPerPass)];

    PERSEUS_D void load(const RoutedRows& routed, const TileMessage& tile) {
#pragma unroll
        for (u32 i = 0; i < ceil_div(kN, kRowsPerPass); ++i) {
            const u32 row = i * kRowsPerPass + threadIdx.x % 128 / kChunksPerRow;
            slot[i] = routed.sorted[tile.first_row + smaller(row, tile.num_rows - 1)];
        }
    }
};

template <class C, u32 kN>
PERSEUS_D void store_slots(TileSums<kN>& sums, const SlotRows<kN>& rows, const MoeParams& params,
                           const TileMessage& tile, u32 group, u8* staging) {
    auto* slots = static_cast<u16*>(params.slots);
    const u32 row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (u32 s = 0; s < kSubTilesPerGroup; ++s) {
        const u32 first_feature = tile.weight_tile * C::kOutPerTile + (s * C::kGroups + group) * kWgmmaRows;
        const float bias[2] = {down_bias(params, tile.expert, first_feature + row),
                               down_bias(params, tile.expert, first_feature + row + 8)};
        ptx::named_barrier_sync(1 + group, 128);  // the rows staged before are copied
        stage_transposed<kN>(ptx::smem_address(staging), [&](u32 j, u32 h) {
            const u32 i = 4 * j + 2 * h;
            return ptx::pack_bf16(sums[s][i] + bias[h], sums[s][i + 1] + bias[h]);
        });
        ptx::named_barrier_sync(1 + group, 128);
        copy_staged_rows<kN>(staging, tile.num_rows, [&](u32 pass, u32, u32 chunk) -> uint4* {
            const u32 feature = first_feature + chunk * kChunkElements;
            if (feature >= params.model_width) return nullptr;
            return reinterpret_cast<uint4*>(slots + static_cast<u64>(rows.slot[pass]) * params.model_width + feature);
        });
    }
}

}  // namespace perseus
