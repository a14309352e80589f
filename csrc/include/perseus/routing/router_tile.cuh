// How do x and the router's weights become logits? One mma's worth of tokens and experts at a time, by a whole CTA.
//
// The summed axis is shared among the warps, so each reads its operands straight into registers, once, and shared
// memory only adds up the warps' sums. A step is 32 values of D: the four lanes of a row read 16 bytes each. Which
// values of D a register holds then differs from what the instruction says, but alike for both operands, and a sum has
// no order that matters here. It is the same order in every run.
#pragma once

#include "perseus/common/params.cuh"
#include "perseus/ptx/mma.cuh"
#include "perseus/ptx/sync.cuh"
#include "perseus/schedule/router_items.cuh"

namespace perseus {

template <u32 kWarps>
class RouterTile {
public:
    static constexpr u32 kPartialBytes = kWarps * kRouterTokens * kRouterExperts * 4;

    // `partials`: kPartialBytes of shared memory.
    PERSEUS_D RouterTile(const MoeParams& params, void* partials)
        : params_(params), partials_(static_cast<float*>(partials)) {}

    // Stores the logits of one product. All threads; the CTA sees them after its next barrier.
    PERSEUS_D void run(const RouterProduct& product) {
        const u32 row = threadIdx.x / kRouterExperts;
        const u32 column = threadIdx.x % kRouterExperts;
        const u32 token = product.first_token + row;
        const u32 expert = product.first_expert + column;
        const bool stores = row < kRouterTokens && token < params_.num_tokens && expert < params_.route.num_experts;
        const auto* bias_of = static_cast<const u16*>(params_.router_bias);
        const float bias = stores && bias_of != nullptr ? ptx::bf16_value(__ldg(bias_of + expert)) : 0.0f;
        float sums[2][4] = {};  // two chains, so that an mma does not wait for the one before
        multiply(sums, product);
        store_partials(sums);
        __syncthreads();
        if (!stores) return;
        float sum = 0.0f;
#pragma unroll
        for (u32 warp = 0; warp < kWarps; ++warp) sum += partial(warp, row, column);
        static_cast<u16*>(params_.logits)[static_cast<u64>(token) * params_.route.num_experts + expert] =
            static_cast<u16>(ptx::pack_bf16(sum + bias, 0.0f));
    }

private:
    static constexpr u32 kChunk = 8;  // BF16 in 16 bytes
    static constexpr u32 kStepChunks = 4;
    static constexpr u32 kStride = kWarps * kStepChunks;  // between the steps of a warp, in chunks
    static constexpr u32 kSteps = 8;                      // in flight

    static_assert(kWarps * 32 >= kRouterTokens * kRouterExperts, "a thread per logit");

    PERSEUS_D float& partial(u32 warp, u32 row, u32 column) {
        return partials_[(warp * kRouterTokens + row) * kRouterExperts + column];
    }

    PERSEUS_D void multiply(float (&sums)[2][4], const RouterProduct& product) {
        const u32 lane = threadIdx.x % 32;
        const u32 first_chunk = threadIdx.x / 32 * kStepChunks + lane % 4;
        // rows past the end repeat the last one; nobody stores their sums
        const uint4* token_rows[2];
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 token = smaller(product.first_token + 8 * half + lane / 4, params_.num_tokens - 1);
            token_rows[half] = chunk_of(params_.x, token * params_.x_row_elements) + first_chunk;
        }
        const u32 expert = smaller(product.first_expert + lane / 4, params_.route.num_experts - 1);
        const uint4* expert_row = chunk_of(params_.router_weight, expert * params_.router_row_elements) + first_chunk;
        const u32 num_chunks = params_.model_width / kChunk;
        for (u32 chunk = first_chunk; __any_sync(0xffffffffu, chunk < num_chunks); chunk += kSteps * kStride) {
            uint4 tokens[kSteps][2];
            uint4 weights[kSteps];
#pragma unroll
            for (u32 step = 0; step < kSteps; ++step) {
                const bool inside = chunk + step * kStride < num_chunks;
                const u32 at = chunk - first_chunk;
                tokens[step][0] = load(token_rows[0] + at + step * kStride, inside);
                tokens[step][1] = load(token_rows[1] + at + step * kStride, inside);
                weights[step] = load(expert_row + at + step * kStride, inside);
            }
#pragma unroll
            for (u32 step = 0; step < kSteps; ++step) {
                const uint4 low = tokens[step][0];
                const uint4 high = tokens[step][1];
                const uint4 weight = weights[step];
                ptx::mma_m16n8k16(sums[0], {low.x, low.y}, {high.x, high.y}, {weight.x, weight.y});
                ptx::mma_m16n8k16(sums[1], {low.z, low.w}, {high.z, high.w}, {weight.z, weight.w});
            }
        }
    }

    static PERSEUS_D const uint4* chunk_of(const void* base, i64 element) {
        return static_cast<const uint4*>(base) + element / kChunk;
    }

    static PERSEUS_D uint4 load(const uint4* address, bool inside) {
        return inside ? __ldg(address) : make_uint4(0, 0, 0, 0);
    }

    PERSEUS_D void store_partials(const float (&sums)[2][4]) {
        const u32 lane = threadIdx.x % 32;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            auto* pair = reinterpret_cast<float2*>(&partial(threadIdx.x / 32, lane / 4 + 8 * half, lane % 4 * 2));
            *pair = make_float2(sums[0][2 * half] + sums[1][2 * half], sums[0][2 * half + 1] + sums[1][2 * half + 1]);
        }
    }

    const MoeParams& params_;
    float* partials_;
};

}  // namespace perseus
