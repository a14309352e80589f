// How does a MoE launch choose the experts of its own tokens? Logits by claimed products, then one warp per token.
//
// Once the logits are there, at most as many tokens as a CTA has warps are routed by every CTA for itself, which saves
// telling the others. More tokens are routed once, in claimed runs, and all CTAs wait until each token has its choices.
#pragma once

#include "perseus/common/cta.cuh"
#include "perseus/ptx/copy.cuh"
#include "perseus/routing/route.cuh"
#include "perseus/routing/router_tile.cuh"

namespace perseus {

// Not inlined, so that its warm-up and its use run the same instructions. Code for 32 * kPerLane experts, since only
// unrolled loops over a lane's experts keep their scores in registers.
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

PERSEUS_D u32 claim_product(const MoeParams& params) {
    return atomicAdd(&static_cast<ControlBlock*>(params.control)->router_claim, 1u);
}

template <u32 kWarps>
class RouterPhase {
public:
    // `scratch`: RouterTile's shared memory; `broadcast`: one shared word; `first_product`: thread 0's claim.
    PERSEUS_D RouterPhase(const MoeParams& params, void* scratch, u32* broadcast, u32 first_product)
        : params_(params),
          control_(static_cast<ControlBlock*>(params.control)),
          tile_(params, scratch),
          broadcast_(broadcast),
          pending_(first_product) {}

    // All threads call it. False: a wait ran out of time, ids and weights are not there.
    PERSEUS_D bool run() {
        prefetch_operands();
        const u32 num_products = router_products(params_.num_tokens, params_.route.num_experts);
        const bool had_product = multiply_claimed(num_products);
        const bool alone = params_.num_tokens <= kWarps;
        u32 pending = 0;
        if (threadIdx.x == 0 && !alone) pending = atomicAdd(&control_->route_claim, 1u);
        // The code of what comes next may have to come from memory, too: an idle CTA runs it while others multiply. Not
        // before its claim is answered: claims are not in the order of CTAs, and a late product delays all.
        if (!had_product && warp() == kWarps - 1) route(0, RouteResult::kDiscard);
        if (!wait_by_all(params_, &control_->router_done, num_products, WaitPhase::kLogits, broadcast_)) return false;
        if (alone) {
            // NOTE: all CTAs store the same bytes to the same places, and each reads what it stored itself
            if (warp() < params_.num_tokens) route(warp(), RouteResult::kStore);
            __syncthreads();
            return true;
        }
        route_claimed(pending);
        return wait_by_all(params_, &control_->tokens_routed, params_.num_tokens, WaitPhase::kRoutes, broadcast_);
    }

private:
    static PERSEUS_D u32 warp() { return threadIdx.x / 32; }

    // Before the first claim is answered nobody knows who needs what, but all of it is needed soon, by somebody.
    PERSEUS_D void prefetch_operands() {
        constexpr u32 kLineBytes = 128;
        const u32 num_experts = params_.route.num_experts;
        const u32 lines_per_row = ceil_div(params_.model_width * 2, kLineBytes);
        const u32 num_lines = (num_experts + params_.num_tokens) * lines_per_row;
        for (u32 i = threadIdx.x * gridDim.x + blockIdx.x; i < num_lines; i += kWarps * 32 * gridDim.x) {
            const u32 row = i / lines_per_row;
            const bool is_weight = row < num_experts;
            const auto* base = static_cast<const u8*>(is_weight ? params_.router_weight : params_.x);
            const i64 row_bytes = (is_weight ? params_.router_row_elements : params_.x_row_elements) * 2;
            ptx::prefetch_l2(base + (is_weight ? row : row - num_experts) * row_bytes + i % lines_per_row * kLineBytes);
        }
    }

    // Whether there was one for this CTA.
    PERSEUS_D bool multiply_claimed(u32 num_products) {
        bool had_product = false;
        for (;;) {
            const u32 index = next_claim(&control_->router_claim, num_products, pending_, broadcast_);
            if (index >= num_products) return had_product;
            tile_.run(router_product(index, params_.route.num_experts));
            signal(&control_->router_done, 1);
            had_product = true;
        }
    }

    PERSEUS_D void route_claimed(u32 pending) {
        const u32 num_runs = ceil_div(params_.num_tokens, kWarps);
        for (;;) {
            const u32 index = next_claim(&control_->route_claim, num_runs, pending, broadcast_);
            if (index >= num_runs) return;
            const u32 first = index * kWarps;
            const u32 count = smaller(kWarps, params_.num_tokens - first);
            if (warp() < count) route(first + warp(), RouteResult::kStore);
            signal(&control_->tokens_routed, count);
        }
    }

    PERSEUS_D void route(u32 token, RouteResult result) {
        const RouteArrays arrays{params_.logits, params_.routed_ids, params_.routed_weights};
        route_any_token(params_.route, arrays, token, result);
    }

    const MoeParams& params_;
    ControlBlock* control_;
    RouterTile<kWarps> tile_;
    u32* broadcast_;
    u32 pending_;
};

// Whether the choices are there, of this launch or of before. All threads.
template <class C>
PERSEUS_D bool have_choices(const MoeParams& params, void* scratch, u32* broadcast, u32 first_product) {
    if constexpr (C::kRoutes) {
        constexpr u32 kWarps = C::kThreads / 32;
        static_assert(RouterTile<kWarps>::kPartialBytes <= C::kStages * C::kStageBytes, "sums of all warps must fit");
        return RouterPhase<kWarps>(params, scratch, broadcast, first_product).run();
    }
    return true;
}

}  // namespace perseus
