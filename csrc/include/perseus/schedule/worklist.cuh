// How are rows, sorted by expert, cut into token blocks, and in which order do tiles run? Pure arithmetic, host and
// device. Reads and writes no memory.
//
// Order of the queue: all GEMM 1 tiles; then, by groups of output columns, GEMM 2 of the group and the combine items of
// the group before it, so that sums, which wait for memory, run beside products, which do not. A tile depends on tiles
// before it only, tiles are claimed in order and every CTA works through its claims in order; so whatever number of
// CTAs is resident, the first unfinished tile can always run.
#pragma once

#include "perseus/common/types.cuh"

namespace perseus {

// One expert's rows: `num_rows` from `first_row` on, in blocks `first_block` onwards. 16 bytes: read in one access.
struct alignas(16) TokenBlock {
    u32 expert;
    u32 first_row;
    u32 num_rows;
    u32 first_block;
};

PERSEUS_HD u32 blocks_of(u32 num_rows, u32 max_tokens) { return ceil_div(num_rows, max_tokens); }

// Blocks of one expert are equally long, up to 8 rows: two blocks of 72 cost less than one of 128 and one of 16.
PERSEUS_HD u32 rows_per_block(u32 num_rows, u32 max_tokens) {
    return round_up(ceil_div(num_rows, blocks_of(num_rows, max_tokens)), 8u);
}

PERSEUS_HD u32 max_blocks(u64 num_rows, u32 num_experts, u32 max_tokens) {
    return static_cast<u32>(num_rows / max_tokens) + static_cast<u32>(smaller<u64>(num_rows, num_experts));
}

enum class TileKind : u32 { kGemm1 = 0, kGemm2 = 1, kCombine = 2, kEnd = 3 };

inline constexpr u32 kMaxColumnGroups = 8;

struct TileShape {
    u32 num_blocks;         // token blocks over all experts
    u32 hidden_tiles;       // weight tiles of GEMM 1 per token block
    u32 out_tiles;          // weight tiles of GEMM 2 per token block
    u32 num_combine_items;  // per column group
    u32 num_groups;         // column groups, 1 .. kMaxColumnGroups

    PERSEUS_HD u32 group_begin(u32 group) const { return group * out_tiles / num_groups; }
    PERSEUS_HD u32 group_tiles(u32 group) const { return group_begin(group + 1) - group_begin(group); }
};

struct QueueItem {
    TileKind kind;
    u32 group;  // column group of GEMM 2 and combine
    u32 index;  // among the items of this kind and group
};

PERSEUS_HD QueueItem decode_queue_index(const TileShape& shape, u32 index) {
    const u32 num_gemm1 = shape.num_blocks * shape.hidden_tiles;
    if (index < num_gemm1) return {TileKind::kGemm1, 0, index};
    index -= num_gemm1;
    for (u32 group = 0; group < shape.num_groups; ++group) {
        const u32 num_gemm2 = shape.num_blocks * shape.group_tiles(group);
        if (index < num_gemm2) return {TileKind::kGemm2, group, index};
        index -= num_gemm2;
        if (group == 0) continue;
        if (index < shape.num_combine_items) return {TileKind::kCombine, group - 1, index};
        index -= shape.num_combine_items;
    }
    if (index < shape.num_combine_items) return {TileKind::kCombine, shape.num_groups - 1, index};
    return {TileKind::kEnd, 0, 0};
}

struct GemmTile {
    u32 expert;
    u32 weight_tile;
    u32 block;      // token block over all experts
    u32 first_row;  // among the sorted rows
    u32 num_rows;
};

// Inside an expert the token blocks run fastest, so that a weight tile is read from memory once and then from L2.
PERSEUS_HD GemmTile decode_gemm_tile(const TokenBlock& rows, u32 tile_index, u32 weight_tiles, u32 max_tokens) {
    const u32 num_blocks = blocks_of(rows.num_rows, max_tokens);
    const u32 in_expert = tile_index - rows.first_block * weight_tiles;
    const u32 block_in_expert = in_expert % num_blocks;
    const u32 step = rows_per_block(rows.num_rows, max_tokens);
    const u32 start = block_in_expert * step;
    return {rows.expert, in_expert / num_blocks, rows.first_block + block_in_expert, rows.first_row + start,
            smaller(step, rows.num_rows - start)};
}

// Few tokens: one token per item, so that many SMs share the sum. Many: fewer claims, the same work per item whatever
// the number of column groups.
PERSEUS_HD u32 combine_tokens_per_item(u32 num_tokens, u32 num_groups) {
    return num_tokens <= 1024 ? num_groups : 8 * num_groups;
}

PERSEUS_HD u32 combine_items(u32 num_tokens, u32 num_groups) {
    return ceil_div(num_tokens, combine_tokens_per_item(num_tokens, num_groups));
}

// The counting sort works on equal runs of the flat list of choices.
inline constexpr u32 kMaxSortChunks = 64;

struct SortChunks {
    u32 num_chunks;
    u32 rows_per_chunk;
};

PERSEUS_HD SortChunks sort_chunks(u32 num_rows) {
    const u32 wanted = smaller(ceil_div(larger(num_rows, 1u), 1024u), kMaxSortChunks);
    const u32 rows = round_up(ceil_div(larger(num_rows, 1u), wanted), 32u);
    return {ceil_div(larger(num_rows, 1u), rows), rows};
}

// Up to this size every CTA sorts all rows by itself, into its shared memory, which is faster than exchanging counts.
// Past it, 132 CTAs that read the same list get in each other's way: 8192 rows took 66 k cycles against 20 k (H200).
inline constexpr u32 kPrivateSortRows = 1024;
inline constexpr u32 kPrivateSortBlocks = 384;

PERSEUS_HD bool is_private_sort(u64 num_rows, u32 num_experts, u32 max_tokens) {
    return num_rows <= kPrivateSortRows && max_blocks(num_rows, num_experts, max_tokens) <= kPrivateSortBlocks;
}

}  // namespace perseus
