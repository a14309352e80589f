// What does each warp of the MoE kernel do all day? Scheduling and weights, tokens, products, publishing.
#pragma once

#include "perseus/epilogue/combine.cuh"
#include "perseus/ptx/copy.cuh"

namespace perseus {

template <class C>
PERSEUS_D TileShape tile_shape(const MoeParams& params, u32 num_blocks) {
    return {num_blocks, ceil_div(params.expert_width, C::kHiddenPerTile), ceil_div(params.model_width, C::kOutPerTile),
            combine_items(params.num_tokens, params.num_column_groups), params.num_column_groups};
}

template <class C>
PERSEUS_D TileMessage describe_tile(const RoutedRows& routed, const TileShape& shape, u32 queue_index) {
    const QueueItem item = decode_queue_index(shape, queue_index);
    TileMessage message{item.kind, item.group, 0, item.index, 0, 0, 0};
    if (item.kind != TileKind::kGemm1 && item.kind != TileKind::kGemm2) return message;
    const bool is_gemm1 = item.kind == TileKind::kGemm1;
    const u32 weight_tiles = is_gemm1 ? shape.hidden_tiles : shape.group_tiles(item.group);
    const GemmTile tile =
        decode_gemm_tile(routed.blocks[item.index / weight_tiles], item.index, weight_tiles, C::kMaxTokens);
    message.expert = tile.expert;
    message.weight_tile = tile.weight_tile + (is_gemm1 ? 0 : shape.group_begin(item.group));
    message.block = tile.block;
    message.first_row = tile.first_row;
    message.num_rows = tile.num_rows;
    return message;
}

PERSEUS_D u32 claim_tile(const MoeParams& params) {
    return atomicAdd(&static_cast<ControlBlock*>(params.control)->tile_claim, 1u);
}

PERSEUS_D u32 num_k_blocks(const MoeParams& params, TileKind kind) {
    return ceil_div(kind == TileKind::kGemm1 ? params.model_width : params.expert_width, kTileK);
}

template <class C>
PERSEUS_D void load_weight_tile(const TensorMap* map, const TileMessage& tile, u32 k, u8* smem, u64* barrier) {
    const bool is_gemm1 = tile.kind == TileKind::kGemm1;
    if constexpr (C::kLayout == WeightLayout::kOutIn) {
        // GEMM 1: one box holds the gate rows and, as its second plane, the up rows
        const u32 feature = tile.weight_tile * (is_gemm1 ? C::kHiddenPerTile : C::kOutPerTile);
        ptx::tma_load_4d(smem, map, barrier, k, feature, 0, tile.expert);
    } else {
        constexpr u32 kSubTiles = C::kGroups * kSubTilesPerGroup;
#pragma unroll
        for (u32 i = 0; i < kSubTiles; ++i) {
            const bool by_plane = is_gemm1 && !C::kPairedColumns;
            const u32 feature = by_plane ? tile.weight_tile * C::kHiddenPerTile + i % C::kGroups * kWgmmaRows
                                         : tile.weight_tile * C::kWeightRows + i * kWgmmaRows;
            const u32 plane = by_plane ? i / C::kGroups : 0;
            ptx::tma_load_4d(smem + i * kSubTileBytes, map, barrier, feature, k, plane, tile.expert);
        }
    }
}

// One warp. Claims tiles and loads their weights; it never waits for other CTAs, so that weights of GEMM 2 are on their
// way before its tokens exist. The next tile is claimed shortly before this one is loaded: early enough to hide the
// claim, late enough that no CTA sits on work that another could do.
template <class C>
PERSEUS_D void run_weight_loads(const MoeParams& params, const RoutedRows& routed, const TileShape& shape,
                                const TensorMap* gate_up, const TensorMap* down, SharedStorage<C>& shared, u32 claim) {
    constexpr u32 kClaimAhead = 4;  // k blocks
    const bool leads = threadIdx.x % 32 == 0;
    TileOutbox<C> outbox(shared);
    RingPosition<C::kStages> position;
    for (;;) {
        const TileMessage tile = describe_tile<C>(routed, shape, __shfl_sync(0xffffffffu, claim, 0));
        outbox.post(tile);
        if (tile.kind == TileKind::kEnd) return;
        const bool has_weights = tile.kind != TileKind::kCombine;
        if (!has_weights && leads) claim = claim_tile(params);
        const TensorMap* map = tile.kind == TileKind::kGemm1 ? gate_up : down;
        const u32 k_blocks = has_weights ? num_k_blocks(params, tile.kind) : 0;
        const u32 claim_at = k_blocks - smaller(k_blocks, kClaimAhead);
        for (u32 k_block = 0; k_block < k_blocks; ++k_block) {
            if (k_block == claim_at && leads) claim = claim_tile(params);
            ptx::mbarrier_wait(&shared.stage_empty[position.slot], position.parity ^ 1);
            if (leads) {
                u64* full = &shared.stage_full[position.slot];
                ptx::mbarrier_arrive_expect_tx(full, C::kWeightBytes);
                load_weight_tile<C>(map, tile, k_block * kTileK, shared.stages[position.slot], full);
            }
            __syncwarp();
            position.advance();
        }
    }
}

// One warp. Consumers take a message when they have stored everything of the tile before; so the taking of one is the
// news that the one before can be published, and no consumer waits for its own stores.
template <class C>
PERSEUS_D void run_publisher(const MoeParams& params, const RoutedRows& routed, SharedStorage<C>& shared) {
    const bool leads = threadIdx.x % 32 == 0;
    TileInbox<C> inbox(shared);
    TileMessage before{TileKind::kEnd, 0, 0, 0, 0, 0, 0};
    if constexpr (C::kGroups == 1) warm_up_combine(params);
    for (;;) {
        const TileMessage tile = inbox.next();
        inbox.wait_taken_by_all();
        if (*static_cast<volatile u32*>(&shared.aborted) != 0) before.kind = TileKind::kEnd;
        if (leads && before.kind == TileKind::kGemm1) {
            ptx::fence_proxy_async_global();
            ptx::add_release(&routed.hidden_ready[before.block], 1);
        }
        if (leads && before.kind == TileKind::kGemm2) {
            ptx::add_release(&static_cast<ControlBlock*>(params.control)->slots_done[before.group], 1);
        }
        __syncwarp();
        if (tile.kind == TileKind::kEnd) return;
        before = tile;
    }
}

// Rows of x, wherever they are: 16-byte copies, 4 rows of 8 chunks per warp and pass.
template <class C>
PERSEUS_D void gather_input_rows(const MoeParams& params, const RoutedRows& routed, const TileMessage& tile,
                                 SharedStorage<C>& shared, RingPosition<C::kStages>& position, u32 gather_warp) {
    constexpr u32 kRowsPerPass = kGatherWarps * 4;
    constexpr u32 kPasses = C::kMaxTokens / kRowsPerPass;
    const u32 lane = threadIdx.x % 32;
    const u32 chunk = lane % 8;
    const u32 first_row = gather_warp * 4 + lane / 8;
    const u32 smem_offset = first_row * kSwizzleBytes + ((chunk ^ (first_row & 7)) << 4);
    const u32 row_chunks = static_cast<u32>(params.x_row_elements / kChunkElements);
    const auto* source = static_cast<const uint4*>(params.x) + chunk;
    u32 offsets[kPasses];  // in 16-byte chunks, so that they fit into one register each
#pragma unroll
    for (u32 pass = 0; pass < kPasses; ++pass) {
        // rows past the end repeat the last one; nobody reads their sums
        const u32 row = smaller(first_row + pass * kRowsPerPass, tile.num_rows - 1);
        offsets[pass] = routed.sorted[tile.first_row + row] / params.top_k * row_chunks;
    }
    const u32 k_blocks = num_k_blocks(params, tile.kind);
    for (u32 k_block = 0; k_block < k_blocks; ++k_block) {
        ptx::mbarrier_wait(&shared.stage_empty[position.slot], position.parity ^ 1);
        const u32 smem = shared.token_address(position.slot) + smem_offset;
        const u32 valid_bytes = k_block * kTileK + chunk * kChunkElements < params.model_width ? 16 : 0;
#pragma unroll
        for (u32 pass = 0; pass < kPasses; ++pass) {
            if (pass * kRowsPerPass >= tile.num_rows) break;
            ptx::cp_async_16(smem + pass * kRowsPerPass * kSwizzleBytes, source + offsets[pass], valid_bytes);
        }
        ptx::cp_async_arrive(&shared.stage_full[position.slot]);
        source += kChunksPerRow;
        position.advance();
    }
}

// Rows of hidden, which lie one after the other: TMA boxes, as soon as GEMM 1 has stored all of their features.
template <class C>
PERSEUS_D void load_hidden_rows(const MoeParams& params, const RoutedRows& routed, const TensorMap* hidden,
                                const TileMessage& tile, SharedStorage<C>& shared,
                                RingPosition<C::kStages>& position, u32 gather_warp) {
    constexpr u32 kBoxBytes = C::kHiddenBoxRows * kSwizzleBytes;
    const bool leads = gather_warp == 0 && threadIdx.x % 32 == 0;
    if (leads) {
        const u32 tiles = ceil_div(params.expert_width, C::kHiddenPerTile);
        const WaitSite site{WaitPhase::kHidden, tile.expert, tile.block};
        if (!wait_at_least(params, &routed.hidden_ready[tile.block], tiles, site)) shared.aborted = 1;
        ptx::fence_proxy_async_global();
    }
    __syncwarp();
    const u32 num_boxes = ceil_div(tile.num_rows, C::kHiddenBoxRows);
    const u32 k_blocks = num_k_blocks(params, tile.kind);
    for (u32 k_block = 0; k_block < k_blocks; ++k_block) {
        ptx::mbarrier_wait(&shared.stage_empty[position.slot], position.parity ^ 1);
        u64* full = &shared.stage_full[position.slot];
        if (leads) {
            ptx::mbarrier_arrive_expect_tx(full, num_boxes * kBoxBytes);
            for (u32 box = 0; box < num_boxes; ++box) {
                ptx::tma_load_2d(shared.token_address(position.slot) + box * kBoxBytes, hidden, full, k_block * kTileK,
                                 tile.first_row + box * C::kHiddenBoxRows);
            }
        } else {
            ptx::mbarrier_arrive(full);
        }
        position.advance();
    }
}

// kGatherWarps warps.
template <class C>
PERSEUS_D void run_token_loads(const MoeParams& params, const RoutedRows& routed, const TensorMap* hidden,
                               SharedStorage<C>& shared, u32 gather_warp) {
    TileInbox<C> inbox(shared);
    RingPosition<C::kStages> position;
    for (TileMessage tile = inbox.next(); tile.kind != TileKind::kEnd; tile = inbox.next()) {
        if (tile.kind == TileKind::kGemm1) gather_input_rows<C>(params, routed, tile, shared, position, gather_warp);
        if (tile.kind == TileKind::kGemm2) {
            load_hidden_rows<C>(params, routed, hidden, tile, shared, position, gather_warp);
        }
    }
}

// All warps of consumer warpgroup `group`.
template <class C>
PERSEUS_D void run_consumer(const MoeParams& params, const RoutedRows& routed, const TileShape& shape,
                            SharedStorage<C>& shared, u32 group) {
    TileInbox<C> inbox(shared);
    RingPosition<C::kStages> position;
    for (TileMessage tile = inbox.next(); tile.kind != TileKind::kEnd; tile = inbox.next()) {
        if (tile.kind == TileKind::kCombine) {
            combine_tokens<C>(params, shape, tile.weight_tile, tile.group);
            continue;
        }
        with_tile_width<C::kMaxTokens>(tile.num_rows, [&](auto width) {
            constexpr u32 kN = decltype(width)::value;
            const bool is_gemm1 = tile.kind == TileKind::kGemm1;
            TileSums<kN> sums;
            SlotRows<kN> rows{};
            if (!is_gemm1) rows.load(routed, tile);
            multiply_tile<C, kN>(sums, shared, position, group, num_k_blocks(params, tile.kind));
            if (is_gemm1) store_hidden<C, kN>(sums, params, routed, tile, group, shared.staging[group]);
            else store_slots<C, kN>(sums, rows, params, tile, group, shared.staging[group]);
        });
    }
}

}  // namespace perseus
