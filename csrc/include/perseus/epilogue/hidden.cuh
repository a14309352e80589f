// What happens to the sums of GEMM 1? Bias, gated activation, BF16, and out to the rows of `hidden`.
#pragma once

#include "perseus/epilogue/activation.cuh"
#include "perseus/epilogue/staging.cuh"

namespace perseus {

// Ordinary loads, since a router in this launch may have written the weights.
PERSEUS_D float routing_weight(const MoeParams& params, u64 choice) {
    return params.weights_are_bf16 ? ptx::bf16_value(static_cast<const u16*>(params.weights)[choice])
                                   : static_cast<const float*>(params.weights)[choice];
}

// A weight on the input row scales the sums before the bias, since the product is linear.
template <class C, u32 kN>
PERSEUS_D void apply_input_weight(TileSums<kN>& sums, const MoeParams& params, const RoutedRows& routed,
                                  const TileMessage& tile) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 i = 0; i < kN / 4; ++i) {
        const u32 token = smaller(8 * (i / 2) + 2 * (lane % 4) + i % 2, tile.num_rows - 1);
        const float weight = routing_weight(params, routed.sorted[tile.first_row + token]);
#pragma unroll
        for (u32 s = 0; s < kSubTilesPerGroup; ++s) {
            sums[s][4 * (i / 2) + i % 2] *= weight;
            sums[s][4 * (i / 2) + 2 + i % 2] *= weight;
        }
    }
}

PERSEUS_D float gate_up_bias(const MoeParams& params, u32 expert, u32 feature, u32 pair) {
    if (params.gate_up_bias == nullptr || feature >= params.expert_width) return 0.0f;
    const u64 index = static_cast<u64>(expert) * 2 * params.expert_width +
                      static_cast<u64>(feature) * params.bias_feature_stride + pair * params.bias_pair_stride;
    return ptx::bf16_value(__ldg(static_cast<const u16*>(params.gate_up_bias) + index));
}

// Sub-tile 0 holds the gate and sub-tile 1 the up values of the same 64 features.
template <class C, u32 kN>
PERSEUS_D void stage_hidden_separate(TileSums<kN>& sums, const MoeParams& params, const TileMessage& tile, u32 group,
                                     u32 staging) {
    const u32 row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    const u32 feature = tile.weight_tile * C::kHiddenPerTile + group * kWgmmaRows + row;
    float bias[2][2];
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
#pragma unroll
        for (u32 pair = 0; pair < 2; ++pair) bias[h][pair] = gate_up_bias(params, tile.expert, feature + 8 * h, pair);
    }
    stage_transposed<kN>(staging, [&](u32 j, u32 h) {
        const u32 i = 4 * j + 2 * h;
        float value[2];
#pragma unroll
        for (u32 c = 0; c < 2; ++c) {
            value[c] = gated_activation<C::kAct>(sums[0][i + c] + bias[h][0], sums[1][i + c] + bias[h][1],
                                                 params.act_alpha, params.act_limit);
        }
        return ptx::pack_bf16(value[0], value[1]);
    });
}

// Weight rows alternate gate, up: lanes 4 apart hold the two halves of a feature. They swap one token of each pair, so
// that the even one finishes the first token and the odd one the second.
template <class C, u32 kN>
PERSEUS_D void stage_hidden_paired(TileSums<kN>& sums, const MoeParams& params, const TileMessage& tile, u32 group,
                                   u8* staging) {
    const u32 lane = threadIdx.x % 32;
    const u32 warp = threadIdx.x / 32 % 4;
    const bool holds_up = (lane / 4) % 2 == 1;
#pragma unroll
    for (u32 s = 0; s < kSubTilesPerGroup; ++s) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            const u32 in_sub_tile = warp * 8 + h * 4 + lane / 8;  // feature, of 32
            const u32 feature = tile.weight_tile * C::kHiddenPerTile + (s * C::kGroups + group) * 32 + in_sub_tile;
            const float gate_bias = gate_up_bias(params, tile.expert, feature, 0);
            const float up_bias = gate_up_bias(params, tile.expert, feature, 1);
            const u32 chunk = s * 4 + in_sub_tile / kChunkElements;
#pragma unroll
            for (u32 j = 0; j < kN / 8; ++j) {
                const float first = sums[s][4 * j + 2 * h];
                const float second = sums[s][4 * j + 2 * h + 1];
                const float received = __shfl_xor_sync(0xffffffffu, holds_up ? first : second, 4);
                const float gate = (holds_up ? received : first) + gate_bias;
                const float up = (holds_up ? second : received) + up_bias;
                const float value = gated_activation<C::kAct>(gate, up, params.act_alpha, params.act_limit);
                const u32 token = 8 * j + 2 * (lane % 4) + (holds_up ? 1 : 0);
                auto* target = reinterpret_cast<u16*>(staging + staged_chunk_offset(token, chunk));
                target[in_sub_tile % kChunkElements] = static_cast<u16>(ptx::pack_bf16(value, 0.0f));
            }
        }
    }
}

template <class C, u32 kN>
PERSEUS_D void store_hidden(TileSums<kN>& sums, const MoeParams& params, const RoutedRows& routed,
                            const TileMessage& tile, u32 group, u8* staging) {
    if (params.weight_on_input) apply_input_weight<C, kN>(sums, params, routed, tile);
    ptx::named_barrier_sync(1 + group, 128);  // the rows staged before are copied
    if constexpr (C::kPairedColumns) {
        stage_hidden_paired<C, kN>(sums, params, tile, group, staging);
    } else {
        stage_hidden_separate<C, kN>(sums, params, tile, group, ptx::smem_address(staging));
    }
    ptx::named_barrier_sync(1 + group, 128);
    auto* hidden = static_cast<u16*>(params.hidden);
    const u32 tile_feature = tile.weight_tile * C::kHiddenPerTile;
    copy_staged_rows<kN>(staging, tile.num_rows, [&](u32, u32 token, u32 chunk) -> uint4* {
        const u32 feature = tile_feature + (C::kPairedColumns ? (chunk / 4 * C::kGroups + group) * 32 + chunk % 4 * 8
                                                              : group * kWgmmaRows + chunk * kChunkElements);
        if (feature >= params.expert_width) return nullptr;
        return reinterpret_cast<uint4*>(hidden + static_cast<u64>(tile.first_row + token) * params.expert_width +
                                        feature);
    });
}

}  // namespace perseus
