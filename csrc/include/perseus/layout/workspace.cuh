// Where does each array lie in the one workspace allocation of a call, and how large is it? Host and device.
#pragma once

#include "perseus/common/types.cuh"
#include "perseus/schedule/worklist.cuh"

namespace perseus {

struct WorkspaceLayout {
    u64 hidden;
    u64 slots;
    u64 sorted_rows;
    u64 block_list;
    u64 hidden_ready;
    u64 chunk_counts;
    u64 logits;  // this and what follows: of a router in the launch
    u64 routed_ids;
    u64 routed_weights;
    u64 total_bytes;
};

struct WorkspaceShape {
    u32 num_tokens;
    u32 top_k;
    u32 num_local_experts;
    u32 model_width;
    u32 expert_width;
    u32 max_tokens_per_tile;
    u32 num_router_experts;  // 0: ids and weights are given
};

PERSEUS_HD WorkspaceLayout workspace_layout(const WorkspaceShape& shape) {
    constexpr u64 kAlign = 256;
    const u64 rows = static_cast<u64>(shape.num_tokens) * shape.top_k;
    const u64 blocks = max_blocks(rows, shape.num_local_experts, shape.max_tokens_per_tile);
    WorkspaceLayout layout{};
    u64 end = 0;
    const auto take = [&end](u64 bytes) {
        const u64 start = end;
        end = round_up<u64>(start + bytes, kAlign);
        return start;
    };
    layout.hidden = take(rows * shape.expert_width * 2);
    layout.slots = take(rows * shape.model_width * 2);
    layout.sorted_rows = take(rows * 4);
    layout.block_list = take(blocks * sizeof(TokenBlock));
    layout.hidden_ready = take(blocks * 4);
    layout.chunk_counts = take(static_cast<u64>(kMaxSortChunks) * shape.num_local_experts * 4);
    const u64 routed_rows = shape.num_router_experts > 0 ? rows : 0;
    layout.logits = take(static_cast<u64>(shape.num_tokens) * shape.num_router_experts * 2);
    layout.routed_ids = take(routed_rows * 4);
    layout.routed_weights = take(routed_rows * 4);
    layout.total_bytes = end;
    return layout;
}

}  // namespace perseus
