// What must a router know after its logits? Plain numbers and addresses, for the routing kernel and the MoE kernel.
//
// Axes: T tokens, K choices per token, E experts.
#pragma once

#include "perseus/common/types.cuh"

namespace perseus {

enum class Routing : u32 { kSoftmaxTopk = 0, kTopkSoftmax = 1, kSigmoidTopk = 2 };

struct RouteArrays {
    const void* logits;  // F32 or BF16 [T, E], contiguous
    void* ids;           // i32 [T, K]
    void* weights;       // F32 [T, K]
};

struct RouteParams {
    const void* correction_bias;  // F32 [E] or null
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

// Of the routing kernel.
struct RouteKernelParams {
    RouteArrays arrays;
    RouteParams route;
};

}  // namespace perseus
