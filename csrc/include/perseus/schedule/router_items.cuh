// How is the router of a call cut into items that CTAs claim? Pure arithmetic, host and device.
//
// First the products: a block of tokens times a tile of experts each. Then the choices: a run of tokens each, one warp
// per token. Choices wait until all products are done and a product waits for nothing, so any number of resident CTAs
// ends.
#pragma once

#include "perseus/common/types.cuh"

namespace perseus {

inline constexpr u32 kRouterTokens = 16;  // of a product: one mma holds them
inline constexpr u32 kRouterExperts = 8;  // likewise

struct RouterProduct {
    u32 first_token;
    u32 first_expert;
};

PERSEUS_HD u32 router_products(u32 num_tokens, u32 num_experts) {
    return ceil_div(num_tokens, kRouterTokens) * ceil_div(num_experts, kRouterExperts);
}

PERSEUS_HD RouterProduct router_product(u32 index, u32 num_experts) {
    const u32 tiles = ceil_div(num_experts, kRouterExperts);
    return {index / tiles * kRouterTokens, index % tiles * kRouterExperts};
}

}  // namespace perseus
