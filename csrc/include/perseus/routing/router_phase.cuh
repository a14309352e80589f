// How does a MoE launch choose the experts of its own tokens? Logits by claimed items, then one warp per token.
//
// Few tokens: every CTA waits for the logits and chooses for all tokens by itself, which saves telling the others. More:
// the CTA that finishes a token block chooses for it, and all wait until every token has its choices.
#pragma once

#include "perseus/common/cta.cuh"
#include "perseus/ptx/copy.cuh"
#include "perseus/routing/route.cuh"
#include "perseus/routing/router_tile.cuh"

namespace perseus {

// Not inlined, so that its warm-up and its use run the same instructions, and so that its registers are not the kernel's.
// Code for 32 * kPerLane experts; unrolled loops over a lane's experts keep their scores in registers.
__device__ __noinline__ void route_any_token(const RouteParams& params, RouteArrays arrays, u32 token,
                                             RouteResult result) {
    const u32 per_lane = ceil_div(params.num_experts, 32u);
    if (per_lane <= 1) route_token<1>(params, arrays, token, result);
    else if (per_lane <= 2) route_token<2>(params, arrays, token, result);
    else if (per_lane <= 4) route_token<4>(params, arrays, token, result);
    else if (per_lane <= 8) route_token<8>(params, arrays, token, result);
    else if (per_lane <= 16) route_token<16>(params, arrays, token, result);
    else route_token<32>(params, arrays, token, result);
}

template <class C>
class RouterPhase {
public:
    static constexpr u32 kWarps = C::kThreads / 32;
    static constexpr bool kFewRows = C::kGroups == 1;

    // Claims the first item. `scratch`: RouterTile's shared memory; `broadcast`: one shared word.
    PERSEUS_D RouterPhase(const MoeParams& params, void* scratch, u32* broadcast)
        : params_(params),
          control_(static_cast<ControlBlock*>(params.control)),
          items_(router_items(params.num_tokens, params.route.num_experts, C::kRouterTokens, C::kRouterExperts)),
          tile_(params, scratch),
          broadcast_(broadcast),
          pending_(threadIdx.x == 0 ? atomicAdd(&control_->router_claim, 1u) : 0) {}

    // All threads call it. False: a wait ran out of time, ids and weights are not there.
    PERSEUS_D bool run() {
        const bool alone = kFewRows && items_.num_blocks == 1;
        if constexpr (kFewRows) prefetch_operands(alone);
        for (;;) {
            const u32 index = next_claim(&control_->router_claim, items_.num_items(), pending_, broadcast_);
            if (index >= items_.num_items()) break;
            const RouterItem item = items_.item(index);
            for (u32 tile = item.first_tile; tile < item.first_tile + item.num_tiles; ++tile) {
                tile_.run(item.block * C::kRouterTokens, tile * C::kRouterExperts);
            }
            if (alone) signal(&control_->router_items_done[0], 1);
            else if (finishes(item.block)) route_block(item.block);
        }
        if constexpr (kFewRows) {
            if (alone) return route_alone();
        }
        return wait_by_all(params_, &control_->tokens_routed, params_.num_tokens, WaitPhase::kRouter, broadcast_);
    }

private:
    static PERSEUS_D u32 warp() { return threadIdx.x / 32; }

    // Before the first claim is answered nobody knows who needs what, but all of it is needed soon, by somebody.
    PERSEUS_D void prefetch_operands(bool tokens_too) {
        constexpr u32 kLineBytes = 128;
        const u32 num_experts = params_.route.num_experts;
        const u32 rows = num_experts + (tokens_too ? params_.num_tokens : 0);
        const u32 lines_per_row = ceil_div(params_.model_width * 2, kLineBytes);
        for (u32 i = threadIdx.x * gridDim.x + blockIdx.x; i < rows * lines_per_row; i += C::kThreads * gridDim.x) {
            const u32 row = i / lines_per_row;
            const bool is_weight = row < num_experts;
            const auto* base = static_cast<const u8*>(is_weight ? params_.router_weight : params_.x);
            const i64 row_bytes = (is_weight ? params_.router_row_elements : params_.x_row_elements) * 2;
            ptx::prefetch_l2(base + (is_weight ? row : row - num_experts) * row_bytes + i % lines_per_row * kLineBytes);
        }
    }

    // Whether all logits of the token block are there, and this CTA is the one that knows.
    PERSEUS_D bool finishes(u32 block) {
        if (items_.items_per_block == 1) return true;
        u32 done_before = 0;
        if (threadIdx.x == 0) {  // the tile ended with a barrier
            __threadfence();
            done_before = atomicAdd(&control_->router_items_done[block], 1u);
            __threadfence();
        }
        return broadcast_of_first(done_before, broadcast_) == items_.items_per_block - 1;
    }

    PERSEUS_D void route_block(u32 block) {
        const u32 begin = block * C::kRouterTokens;
        const u32 end = smaller(begin + C::kRouterTokens, params_.num_tokens);
        for (u32 token = begin + warp(); token < end; token += kWarps) route(token, RouteResult::kStore);
        signal(&control_->tokens_routed, end - begin);
    }

    // NOTE: all CTAs store the same bytes to the same places, and each reads what it stored itself.
    PERSEUS_D bool route_alone() {
        // one warp runs the code while logits are on their way: it may have to come from memory too
        if (warp() == kWarps - 1) route(0, RouteResult::kDiscard);
        bool arrived = true;
        if (warp() < params_.num_tokens) {
            if (threadIdx.x % 32 == 0) {
                arrived = wait_at_least(params_, &control_->router_items_done[0], items_.num_items(),
                                        {WaitPhase::kRouter, 0, 0});
            }
            arrived = __shfl_sync(kAllLanes, arrived, 0);
            __syncwarp();
        }
        for (u32 token = warp(); arrived && token < params_.num_tokens; token += kWarps) {
            route(token, RouteResult::kStore);
        }
        return __syncthreads_and(arrived) != 0;
    }

    PERSEUS_D void route(u32 token, RouteResult result) {
        const RouteArrays arrays{params_.logits, params_.routed_ids, params_.routed_weights};
        route_any_token(params_.route, arrays, token, result);
    }

    const MoeParams& params_;
    ControlBlock* control_;
    RouterItems items_;
    RouterTile<C> tile_;
    u32* broadcast_;
    u32 pending_;
};

// Whether the choices are there, of this launch or of before. All threads.
template <class C>
PERSEUS_D bool have_choices(const MoeParams& params, void* scratch, u32* broadcast) {
    static_assert(RouterTile<C>::kPartialBytes <= C::kStages * C::kStageBytes, "sums of all warps must fit");
    return params.router_weight == nullptr || RouterPhase<C>(params, scratch, broadcast).run();
}

}  // namespace perseus
