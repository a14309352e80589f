// How is the router of a call cut into items that CTAs claim? Pure arithmetic, host and device.
//
// A token block times an expert tile is one product. Few token blocks: an item is one product, and the CTA that
// finishes the last one of a token block chooses for its tokens. Many: an item is a token block with all experts, which
// needs no counter. Items wait for nothing, so whatever number of CTAs is resident, all items end.
#pragma once

#include "perseus/common/types.cuh"

namespace perseus {

inline constexpr u32 kMaxSharedRouterBlocks = 64;  // token blocks that have a counter; half of them fill half of a GPU

struct RouterItem {
    u32 block;  // token block
    u32 first_tile;
    u32 num_tiles;  // expert tiles
};

struct RouterItems {
    u32 num_blocks;
    u32 num_tiles;        // per token block
    u32 items_per_block;  // 1 or num_tiles

    PERSEUS_HD u32 num_items() const { return num_blocks * items_per_block; }

    PERSEUS_HD RouterItem item(u32 index) const {
        return {index / items_per_block, index % items_per_block, num_tiles / items_per_block};
    }
};

PERSEUS_HD RouterItems router_items(u32 num_tokens, u32 num_experts, u32 tokens_per_block, u32 experts_per_tile) {
    const u32 blocks = ceil_div(num_tokens, tokens_per_block);
    const u32 tiles = ceil_div(num_experts, experts_per_tile);
    return {blocks, tiles, blocks <= kMaxSharedRouterBlocks ? tiles : 1};
}

}  // namespace perseus
