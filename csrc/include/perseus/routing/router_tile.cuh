// How do x and the router's weights become logits? One tile of tokens by experts, all warps of the CTA, mma.sync.
//
// The summed axis is shared among the warps, so each reads its operands straight into registers, once, and shared memory
// only adds up the warps' sums. A step is 32 values of D: the four lanes of a row read 16 bytes each. Which values of D a
// register holds then differs from what the instruction says, but alike for both operands, and a sum has no order that
// matters here. It is the same order in every run.
#pragma once

#include "perseus/common/config.cuh"
#include "perseus/common/params.cuh"
#include "perseus/ptx/mma.cuh"
#include "perseus/ptx/sync.cuh"

namespace perseus {

template <class C>
class RouterTile {
public:
    static constexpr u32 kTokens = C::kRouterTokens;
    static constexpr u32 kExperts = C::kRouterExperts;
    static constexpr u32 kWarps = C::kThreads / 32;
    static constexpr u32 kPartialBytes = kWarps * kTokens * (kExperts % 32 == 8 ? kExperts : kExperts + 8) * 4;

    // `partials`: kPartialBytes of shared memory.
    PERSEUS_D RouterTile(const MoeParams& params, void* partials)
        : params_(params), partials_(static_cast<float*>(partials)) {}

    // Stores the logits of tokens from `first_token` and experts from `first_expert` on. All threads; on return, the CTA
    // sees them.
    PERSEUS_D void run(u32 first_token, u32 first_expert) {
        const u32 expert = first_expert + threadIdx.x % kExperts;
        const bool has_bias = params_.router_bias != nullptr && expert < params_.route.num_experts;
        const float bias = has_bias ? ptx::bf16_value(__ldg(static_cast<const u16*>(params_.router_bias) + expert)) : 0;
        float sums[kTokens / 16][kExperts / 8][4] = {};
        multiply(sums, first_token, first_expert);
        store_partials(sums);
        __syncthreads();
        auto* logits = static_cast<u16*>(params_.logits);
        for (u32 row = threadIdx.x / kExperts; row < kTokens; row += C::kThreads / kExperts) {
            float logit = 0.0f;
#pragma unroll
            for (u32 warp = 0; warp < kWarps; ++warp) logit += partial(warp, row, threadIdx.x % kExperts);
            const u32 token = first_token + row;
            if (token >= params_.num_tokens || expert >= params_.route.num_experts) continue;
            logits[static_cast<u64>(token) * params_.route.num_experts + expert] =
                static_cast<u16>(ptx::pack_bf16(logit + bias, 0.0f));
        }
        __syncthreads();
    }

private:
    static constexpr u32 kTokenRows = kTokens / 8;  // per lane
    static constexpr u32 kExpertRows = kExperts / 8;
    static constexpr u32 kPitch = kPartialBytes / 4 / kWarps / kTokens;  // floats; keeps rows in different banks
    static constexpr u32 kChunk = 8;                                     // BF16 in 16 bytes
    static constexpr u32 kStepChunks = 4;

    static_assert(C::kThreads % kExperts == 0, "a thread adds up sums of one expert");

    static PERSEUS_D u32 lane() { return threadIdx.x % 32; }
    static PERSEUS_D u32 warp() { return threadIdx.x / 32; }
    PERSEUS_D float& partial(u32 warp, u32 row, u32 column) {
        return partials_[(warp * kTokens + row) * kPitch + column];
    }

    PERSEUS_D void multiply(float (&sums)[kTokens / 16][kExperts / 8][4], u32 first_token, u32 first_expert) {
        const auto* x = static_cast<const uint4*>(params_.x);
        const auto* weight = static_cast<const uint4*>(params_.router_weight);
        u32 token_offset[kTokenRows];  // in 16-byte chunks, so that they fit into one register each
        u32 expert_offset[kExpertRows];
        // rows past the end repeat the last one; nobody stores their sums
#pragma unroll
        for (u32 i = 0; i < kTokenRows; ++i) {
            const u32 row = smaller(first_token + 8 * i + lane() / 4, params_.num_tokens - 1);
            token_offset[i] = row * static_cast<u32>(params_.x_row_elements / kChunk);
        }
#pragma unroll
        for (u32 i = 0; i < kExpertRows; ++i) {
            const u32 row = smaller(first_expert + 8 * i + lane() / 4, params_.route.num_experts - 1);
            expert_offset[i] = row * static_cast<u32>(params_.router_row_elements / kChunk);
        }
        const u32 num_chunks = params_.model_width / kChunk;
        for (u32 first = warp() * kStepChunks; first < num_chunks; first += C::kRouterSteps * kWarps * kStepChunks) {
            uint4 tokens[C::kRouterSteps][kTokenRows];
            uint4 weights[C::kRouterSteps][kExpertRows];
#pragma unroll
            for (u32 step = 0; step < C::kRouterSteps; ++step) {
                const u32 chunk = first + step * kWarps * kStepChunks + lane() % 4;
                const bool inside = chunk < num_chunks;
#pragma unroll
                for (u32 i = 0; i < kTokenRows; ++i) tokens[step][i] = load(x + token_offset[i] + chunk, inside);
#pragma unroll
                for (u32 i = 0; i < kExpertRows; ++i) weights[step][i] = load(weight + expert_offset[i] + chunk, inside);
            }
#pragma unroll
            for (u32 step = 0; step < C::kRouterSteps; ++step) add_products(sums, tokens[step], weights[step]);
        }
    }

    static PERSEUS_D uint4 load(const uint4* address, bool inside) {
        return inside ? __ldg(address) : make_uint4(0, 0, 0, 0);
    }

    static PERSEUS_D void add_products(float (&sums)[kTokens / 16][kExperts / 8][4], const uint4 (&tokens)[kTokenRows],
                                       const uint4 (&weights)[kExpertRows]) {
#pragma unroll
        for (u32 m = 0; m < kTokens / 16; ++m) {
            const uint4 low = tokens[2 * m];
            const uint4 high = tokens[2 * m + 1];
#pragma unroll
            for (u32 n = 0; n < kExpertRows; ++n) {
                ptx::mma_m16n8k16(sums[m][n], {low.x, low.y}, {high.x, high.y}, {weights[n].x, weights[n].y});
                ptx::mma_m16n8k16(sums[m][n], {low.z, low.w}, {high.z, high.w}, {weights[n].z, weights[n].w});
            }
        }
    }

    PERSEUS_D void store_partials(const float (&sums)[kTokens / 16][kExperts / 8][4]) {
#pragma unroll
        for (u32 m = 0; m < kTokens / 16; ++m) {
#pragma unroll
            for (u32 n = 0; n < kExpertRows; ++n) {
                const u32 row = 16 * m + lane() / 4;
                const u32 column = 8 * n + lane() % 4 * 2;
#pragma unroll
                for (u32 h = 0; h < 2; ++h) {
                    auto* pair = reinterpret_cast<float2*>(&partial(warp(), row + 8 * h, column));
                    *pair = make_float2(sums[m][n][2 * h], sums[m][n][2 * h + 1]);
                }
            }
        }
    }

    const MoeParams& params_;
    float* partials_;
};

}  // namespace perseus
