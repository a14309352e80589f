// Which experts does a token choose, and with which weights? A router after its logits, one warp per token.
//
// Meaning as perseus_compile/routing.py: scores in float32, choice by score (+ correction bias, inside the best
// groups), weights of the chosen, renormalised, rounded, scaled. A softmax keeps the order of its logits, so the choice
// is made on them. Equal scores: the lower expert first. A NaN score counts as the largest, so that ids are valid and
// distinct whatever comes in.
#pragma once

#include "perseus/common/route_params.cuh"
#include "perseus/ptx/sync.cuh"

namespace perseus {

inline constexpr u32 kAllLanes = 0xffffffffu;

PERSEUS_D float warp_sum(float value) {
#pragma unroll
    for (u32 distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
    return value;
}

// Orders scores by one unsigned comparison; NaN is the largest. Never 0.
PERSEUS_D u32 rank_of(float score) {
    const u32 bits = __float_as_uint(score == score ? score : __uint_as_float(0x7fffffffu));
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

PERSEUS_D float score_of(u32 rank) { return __uint_as_float((rank & 0x80000000u) != 0 ? rank & 0x7fffffffu : ~rank); }

// The best rank so far, and whose it is. Rank 0: nobody's.
struct Candidate {
    u32 rank = 0;
    u32 index = kAllLanes;

    // Others come in rising index, so that the lower one wins a tie.
    PERSEUS_D void consider(u32 other_rank, u32 other_index) {
        if (other_rank <= rank) return;
        rank = other_rank;
        index = other_index;
    }

    PERSEUS_D Candidate best_of_warp() const {
        const u32 best = __reduce_max_sync(kAllLanes, rank);
        return {best, __reduce_min_sync(kAllLanes, rank == best ? index : kAllLanes)};
    }
};

// The scores of one token: lane l holds experts l, l + 32, ...
template <u32 kPerLane>
class TokenScores {
public:
    PERSEUS_D TokenScores(const RouteParams& params, const void* logits, u32 token) : params_(params) {
        const u64 first = static_cast<u64>(token) * params.num_experts;
        if (params.logits_are_bf16) load(static_cast<const u16*>(logits) + first);
        else load(static_cast<const float*>(logits) + first);
        if (params.routing == static_cast<u32>(Routing::kSigmoidTopk)) sigmoid();
    }

    // Lane k < K gets the k-th chosen expert and its score, or logit.
    PERSEUS_D void choose(u32& id, float& weight) {
        for (u32 k = 0; k < params_.top_k; ++k) {
            Candidate best;
#pragma unroll
            for (u32 i = 0; i < kPerLane; ++i) best.consider(rank_[i], expert(i));
            const u32 chosen = best.best_of_warp().index;
            float score = 0.0f;
#pragma unroll
            for (u32 i = 0; i < kPerLane; ++i) {
                if (chosen != expert(i)) continue;
                rank_[i] = 0;
                score = score_[i];
            }
            score = __shfl_sync(kAllLanes, score, chosen % 32);
            if (lane() == k) {
                id = chosen;
                weight = score;
            }
        }
    }

    // Of a softmax over all experts.
    PERSEUS_D float sum_of_exponentials(float largest) const {
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < kPerLane; ++i) sum += exists(i) ? expf(score_[i] - largest) : 0.0f;
        return warp_sum(sum);
    }

private:
    static PERSEUS_D u32 lane() { return threadIdx.x % 32; }
    static PERSEUS_D u32 expert(u32 i) { return i * 32 + lane(); }
    static PERSEUS_D float value_of(u16 logit) { return ptx::bf16_value(logit); }
    static PERSEUS_D float value_of(float logit) { return logit; }
    PERSEUS_D bool exists(u32 i) const { return expert(i) < params_.num_experts; }

    // No branch between the loads: each would wait for the one before.
    template <typename Logit>
    PERSEUS_D void load(const Logit* logits) {
#pragma unroll
        for (u32 i = 0; i < kPerLane; ++i) score_[i] = exists(i) ? value_of(__ldcg(logits + expert(i))) : 0.0f;
#pragma unroll
        for (u32 i = 0; i < kPerLane; ++i) rank_[i] = exists(i) ? rank_of(score_[i]) : 0;
    }

    PERSEUS_D void sigmoid() {
        const auto* correction = static_cast<const float*>(params_.correction_bias);
        float bias[kPerLane];
#pragma unroll
        for (u32 i = 0; i < kPerLane; ++i) {
            bias[i] = correction != nullptr && exists(i) ? __ldg(correction + expert(i)) : 0.0f;
        }
#pragma unroll
        for (u32 i = 0; i < kPerLane; ++i) {
            score_[i] = 1.0f / (1.0f + expf(-score_[i]));
            rank_[i] = exists(i) ? rank_of(score_[i] + bias[i]) : 0;
        }
        if (params_.topk_groups < params_.num_groups) limit_groups();
    }

    // Experts outside the best groups are never chosen while there are others; a group is worth its two best.
    PERSEUS_D void limit_groups() {
        const u32 group_size = params_.num_experts / params_.num_groups;
        Candidate own_group;  // of group `lane`
        for (u32 group = 0; group < params_.num_groups; ++group) {
            Candidate first;
            float worth = 0.0f;
            for (u32 turn = 0; turn < smaller(2u, group_size); ++turn) {
                Candidate best;
#pragma unroll
                for (u32 i = 0; i < kPerLane; ++i) {
                    const bool inside = expert(i) / group_size == group && expert(i) != first.index;
                    if (inside) best.consider(rank_[i], expert(i));
                }
                first = best.best_of_warp();
                worth += score_of(first.rank);
            }
            if (lane() == group) own_group = {rank_of(worth), group};
        }
        u32 allowed = 0;
        for (u32 turn = 0; turn < params_.topk_groups; ++turn) {
            const u32 best = own_group.best_of_warp().index;
            if (lane() == best) own_group.rank = 0;
            allowed |= 1u << best;
        }
        const u32 lowest = rank_of(__uint_as_float(0xff800000u));  // minus infinity
#pragma unroll
        for (u32 i = 0; i < kPerLane; ++i) {
            if (exists(i) && (allowed >> expert(i) / group_size & 1) == 0) rank_[i] = lowest;
        }
    }

    const RouteParams& params_;
    float score_[kPerLane];  // logits, or their sigmoids
    u32 rank_[kPerLane];     // of the score, or of the score with its correction; 0: no such expert, or chosen already
};

PERSEUS_D float rounded(const RouteParams& params, float value) {
    return params.round_to_bf16 ? ptx::bf16_low(ptx::pack_bf16(value, 0.0f)) : value;
}

enum class RouteResult : u32 { kStore, kDiscard };

template <u32 kPerLane>
PERSEUS_D void route_token(const RouteParams& params, const RouteArrays& arrays, u32 token, RouteResult result) {
    const u32 lane = threadIdx.x % 32;
    const bool chosen = lane < params.top_k;
    u32 id = 0;
    float weight = 0.0f;
    TokenScores<kPerLane> scores(params, arrays.logits, token);
    scores.choose(id, weight);
    if (params.routing != static_cast<u32>(Routing::kSigmoidTopk)) {  // so far it is a logit
        const float largest = __shfl_sync(kAllLanes, weight, 0);
        const bool over_all = params.routing == static_cast<u32>(Routing::kSoftmaxTopk);
        weight = expf(weight - largest);
        weight /= over_all ? scores.sum_of_exponentials(largest) : warp_sum(chosen ? weight : 0.0f);
    }
    if (params.renormalize) weight /= warp_sum(chosen ? weight : 0.0f) + params.renormalize_eps;
    weight = rounded(params, weight);
    if (params.scale != 1.0f) weight = rounded(params, weight * params.scale);
    if (!chosen || result == RouteResult::kDiscard) return;
    const u64 index = static_cast<u64>(token) * params.top_k + lane;
    static_cast<i32*>(arrays.ids)[index] = static_cast<i32>(id);
    static_cast<float*>(arrays.weights)[index] = weight;
}

}  // namespace perseus

// One variant per translation unit: PERSEUS_EXPERTS_PER_LANE, 32 of which hold all experts.
#if defined(PERSEUS_EXPERTS_PER_LANE)
extern "C" __global__ void __launch_bounds__(128)
    perseus_route(const __grid_constant__ perseus::RouteKernelParams params) {
    const perseus::u32 token = blockIdx.x * 4 + threadIdx.x / 32;
    if (token >= params.route.num_tokens) return;
    perseus::route_token<PERSEUS_EXPERTS_PER_LANE>(params.route, params.arrays, token, perseus::RouteResult::kStore);
}
#endif
