// Which experts does a token choose, and with which weights? A router after its logits, one warp per token.
//
// Meaning as perseus_compile/routing.py: scores in float32, choice by score (+ correction bias, inside the best
// groups), weights of the chosen, renormalised, rounded, scaled. Equal scores: the lower expert first. A NaN score
// counts as the largest, so that ids are valid and distinct whatever comes in.
#pragma once

#include "perseus/ptx/sync.cuh"

namespace perseus {

enum class Routing : u32 { kSoftmaxTopk = 0, kTopkSoftmax = 1, kSigmoidTopk = 2 };

struct RouteParams {
    const void* logits;           // F32 or BF16 [T, E], contiguous
    const void* correction_bias;  // F32 [E] or null
    void* ids;                    // i32 [T, K]
    void* weights;                // F32 [T, K]
    u32 num_tokens;
    u32 num_experts;
    u32 top_k;                    // at most 32: lane k keeps choice k
    u32 routing;                  // Routing
    u32 logits_are_bf16;
    u32 renormalize;
    u32 round_to_bf16;            // the weights, after renormalising and again after scaling
    u32 num_groups;
    u32 topk_groups;
    float renormalize_eps;
    float scale;
};

inline constexpr u32 kAllLanes = 0xffffffffu;

PERSEUS_D float warp_sum(float value) {
#pragma unroll
    for (u32 distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
    return value;
}

PERSEUS_D u64 warp_max(u64 value) {
#pragma unroll
    for (u32 distance = 16; distance > 0; distance /= 2) {
        const u64 other = __shfl_xor_sync(kAllLanes, value, distance);
        value = other > value ? other : value;
    }
    return value;
}

// Orders (score, lower index first) by one unsigned comparison; never 0.
PERSEUS_D u64 rank_key(float score, u32 index) {
    const u32 bits = __float_as_uint(score == score ? score : __uint_as_float(0x7fffffffu));
    const u32 ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
    return static_cast<u64>(ordered) << 32 | (kAllLanes - index);
}

PERSEUS_D u32 index_of_key(u64 key) { return kAllLanes - static_cast<u32>(key); }

// The scores of one token: lane l holds experts l, l + 32, ...
template <u32 kPerLane>
class TokenScores {
public:
    PERSEUS_D TokenScores(const RouteParams& params, u32 token) : params_(params) {
#pragma unroll
        for (u32 i = 0; i < kPerLane; ++i) {
            const u64 index = static_cast<u64>(token) * params.num_experts + (exists(i) ? expert(i) : 0);
            const float logit = params.logits_are_bf16 ? ptx::bf16_value(static_cast<const u16*>(params.logits)[index])
                                                       : static_cast<const float*>(params.logits)[index];
            score_[i] = logit;
            choice_[i] = logit;
        }
        if (params.routing == static_cast<u32>(Routing::kSoftmaxTopk)) softmax();
        if (params.routing == static_cast<u32>(Routing::kSigmoidTopk)) sigmoid();
    }

    // Lane k < K gets the k-th chosen expert and its score.
    PERSEUS_D void choose(u32& id, float& weight) {
        u64 key[kPerLane];
#pragma unroll
        for (u32 i = 0; i < kPerLane; ++i) key[i] = exists(i) ? rank_key(choice_[i], expert(i)) : 0;
        for (u32 k = 0; k < params_.top_k; ++k) {
            u64 best = 0;
#pragma unroll
            for (u32 i = 0; i < kPerLane; ++i) best = key[i] > best ? key[i] : best;
            best = warp_max(best);
            const u32 chosen = index_of_key(best);
            float score = 0.0f;
#pragma unroll
            for (u32 i = 0; i < kPerLane; ++i) {
                if (key[i] == best) key[i] = 0;
                score = chosen / 32 == i ? score_[i] : score;
            }
            score = __shfl_sync(kAllLanes, score, chosen % 32);
            if (lane() == k) {
                id = chosen;
                weight = score;
            }
        }
    }

private:
    static PERSEUS_D u32 lane() { return threadIdx.x % 32; }
    static PERSEUS_D u32 expert(u32 i) { return i * 32 + lane(); }
    PERSEUS_D bool exists(u32 i) const { return expert(i) < params_.num_experts; }

    PERSEUS_D void softmax() {
        u64 best = 0;
#pragma unroll
        for (u32 i = 0; i < kPerLane; ++i) {
            const u64 key = exists(i) ? rank_key(score_[i], expert(i)) : 0;
            best = key > best ? key : best;
        }
        const u32 winner = index_of_key(warp_max(best));
        float largest = 0.0f;
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < kPerLane; ++i) largest = winner / 32 == i ? score_[i] : largest;
        largest = __shfl_sync(kAllLanes, largest, winner % 32);
#pragma unroll
        for (u32 i = 0; i < kPerLane; ++i) {
            score_[i] = exists(i) ? expf(score_[i] - largest) : 0.0f;
            sum += score_[i];
        }
        sum = warp_sum(sum);
#pragma unroll
        for (u32 i = 0; i < kPerLane; ++i) choice_[i] = score_[i] = score_[i] / sum;
    }

    PERSEUS_D void sigmoid() {
        const auto* bias = static_cast<const float*>(params_.correction_bias);
#pragma unroll
        for (u32 i = 0; i < kPerLane; ++i) {
            score_[i] = 1.0f / (1.0f + expf(-score_[i]));
            choice_[i] = score_[i] + (bias != nullptr && exists(i) ? bias[expert(i)] : 0.0f);
        }
        if (params_.topk_groups < params_.num_groups) limit_groups();
    }

    // Experts outside the best groups are never chosen while there are others; a group is worth its two best.
    PERSEUS_D void limit_groups() {
        const u32 group_size = params_.num_experts / params_.num_groups;
        u64 group_key = 0;  // of group `lane`
        for (u32 group = 0; group < params_.num_groups; ++group) {
            u64 first = 0;
            float worth = 0.0f;
            for (u32 turn = 0; turn < smaller(2u, group_size); ++turn) {
                u64 best = 0;
                float value = 0.0f;
#pragma unroll
                for (u32 i = 0; i < kPerLane; ++i) {
                    const bool inside = exists(i) && expert(i) / group_size == group;
                    const u64 key = inside ? rank_key(choice_[i], expert(i)) : 0;
                    if (key > best && key != first) {
                        best = key;
                        value = choice_[i];
                    }
                }
                first = warp_max(best);
                worth += __shfl_sync(kAllLanes, value, index_of_key(first) % 32);
            }
            if (lane() == group) group_key = rank_key(worth, group);
        }
        u32 allowed = 0;
        for (u32 turn = 0; turn < params_.topk_groups; ++turn) {
            const u64 best = warp_max(group_key);
            if (group_key == best) group_key = 0;
            allowed |= 1u << index_of_key(best);
        }
#pragma unroll
        for (u32 i = 0; i < kPerLane; ++i) {
            if (exists(i) && (allowed >> expert(i) / group_size & 1) == 0) choice_[i] = __uint_as_float(0xff800000u);
        }
    }

    const RouteParams& params_;
    float score_[kPerLane];
    float choice_[kPerLane];
};

PERSEUS_D float rounded(const RouteParams& params, float value) {
    return params.round_to_bf16 ? ptx::bf16_low(ptx::pack_bf16(value, 0.0f)) : value;
}

template <u32 kPerLane>
PERSEUS_D void route_token(const RouteParams& params, u32 token) {
    const u32 lane = threadIdx.x % 32;
    const bool chosen = lane < params.top_k;
    u32 id = 0;
    float weight = 0.0f;
    TokenScores<kPerLane>(params, token).choose(id, weight);
    if (params.routing == static_cast<u32>(Routing::kTopkSoftmax)) {
        weight = expf(weight - __shfl_sync(kAllLanes, weight, 0));  // choice 0 is the largest
        weight /= warp_sum(chosen ? weight : 0.0f);
    }
    if (params.renormalize) weight /= warp_sum(chosen ? weight : 0.0f) + params.renormalize_eps;
    weight = rounded(params, weight);
    if (params.scale != 1.0f) weight = rounded(params, weight * params.scale);
    if (!chosen) return;
    const u64 index = static_cast<u64>(token) * params.top_k + lane;
    static_cast<i32*>(params.ids)[index] = static_cast<i32>(id);
    static_cast<float*>(params.weights)[index] = weight;
}

}  // namespace perseus

// One variant per translation unit: PERSEUS_EXPERTS_PER_LANE, 32 of which hold all experts.
#if defined(PERSEUS_EXPERTS_PER_LANE)
extern "C" __global__ void __launch_bounds__(128) perseus_route(const __grid_constant__ perseus::RouteParams params) {
    const perseus::u32 token = blockIdx.x * 4 + threadIdx.x / 32;
    if (token < params.num_tokens) perseus::route_token<PERSEUS_EXPERTS_PER_LANE>(params, token);
}
#endif
