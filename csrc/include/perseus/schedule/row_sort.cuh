// Which rows belong to which expert? A stable counting sort of all choices, on the device, without a grid barrier.
//
// Few rows: every CTA sorts all of them for itself. Many: the flat list of choices is cut into chunks;
// CTAs claim chunks, count them, wait until all are counted, and place the rows of their own chunks. Nothing depends
// on how many CTAs are resident, and the result not on who did what.
#pragma once

#include "perseus/common/config.cuh"
#include "perseus/common/cta.cuh"
#include "perseus/schedule/worklist.cuh"

namespace perseus {

inline constexpr u32 kNoExpert = 0xffffffffu;

// Expert of choice `row` among the local ones, or kNoExpert where another rank, or nobody, owns it. Both widths of ids
// go through the same two word loads: a branch between loads would make each wait for the one before. Ordinary loads,
// since a router in this launch may have written the ids.
PERSEUS_D u32 local_expert(const MoeParams& params, u64 row) {
    const auto* words = static_cast<const u32*>(params.ids);
    const u64 low_word = params.ids_are_i64 ? 2 * row : row;
    const u32 low = words[low_word];
    const u32 high = words[low_word + params.ids_are_i64];
    const bool fits = params.ids_are_i64 == 0 || high == 0;
    const u32 local = low - params.expert_offset;  // negative ids become huge
    return fits && static_cast<i32>(low) >= 0 && local < params.num_local_experts ? local : kNoExpert;
}

// The sort's result, in shared or in global memory.
struct RoutedRows {
    u32* sorted;         // t*K + k of the i-th row in expert order
    TokenBlock* blocks;  // per token block, its expert's rows
    u32* hidden_ready;   // per token block, GEMM 1 tiles that are stored
    u32 num_blocks;
};

template <bool kPresent>
struct PrivateSortResult {
    u32 sorted[kPrivateSortRows];
    TokenBlock blocks[kPrivateSortBlocks];
};

template <>
struct PrivateSortResult<false> {};

template <class C>
class RowSort {
public:
    static constexpr u32 kThreads = C::kThreads;
    static constexpr u32 kWarps = kThreads / 32;
    static constexpr u32 kMaxTokens = C::kMaxTokens;

    // `scratch`: shared memory, (kWarps + 3) * E words; `broadcast`: one shared word.
    PERSEUS_D RowSort(const MoeParams& params, void* scratch, u32* broadcast)
        : params_(params),
          control_(static_cast<ControlBlock*>(params.control)),
          num_rows_(params.num_tokens * params.top_k),
          num_experts_(params.num_local_experts),
          warp_counts_(static_cast<u32*>(scratch)),
          totals_(warp_counts_ + kWarps * num_experts_),
          first_row_(totals_ + num_experts_),
          first_block_(first_row_ + num_experts_),
          broadcast_(broadcast) {}

    // All threads call it. False: a wait ran out of time, there is no list.
    PERSEUS_D bool run(PrivateSortResult<C::kPrivateSort>& result, RoutedRows& routed) {
        if constexpr (C::kPrivateSort) {
            if (is_private_sort(num_rows_, num_experts_, kMaxTokens)) {
                routed = {result.sorted, result.blocks, control_->private_hidden_ready, 0};
                sort_alone(routed);
                return true;
            }
        }
        routed = {static_cast<u32*>(params_.sorted_rows), static_cast<TokenBlock*>(params_.block_list),
                  static_cast<u32*>(params_.hidden_ready), 0};
        if (!sort_together(routed)) return false;
        routed.num_blocks = ptx::load_acquire(&control_->num_blocks);
        return true;
    }

private:
    PERSEUS_D void sort_alone(RoutedRows& routed) {
        chunks_ = {1, round_up(num_rows_, 32u)};
        count_chunk(0);
        for (u32 expert = threadIdx.x; expert < num_experts_; expert += kThreads) first_row_[expert] = 0;
        finish_first_rows();
        routed.num_blocks = *broadcast_;
        write_blocks(routed);
        place_chunk(0, routed);
        __syncthreads();
    }

    PERSEUS_D bool sort_together(const RoutedRows& routed) {
        chunks_ = sort_chunks(num_rows_);
        u64 claimed = 0;
        u32 counted_last = kMaxSortChunks;
        u32 pending = threadIdx.x == 0 ? atomicAdd(&control_->sort_claim, 1u) : 0;
        for (;;) {
            const u32 chunk = next_claim(&control_->sort_claim, chunks_.num_chunks, pending, broadcast_);
            if (chunk >= chunks_.num_chunks) break;
            count_chunk(chunk);
            publish_counts(chunk);
            claimed |= u64{1} << chunk;
            counted_last = chunk;
        }
        if (claimed != 0) {
            if (!wait_for_all(&control_->sort_counted, WaitPhase::kSortCount)) return false;
            for (u32 chunk = 0; chunk < chunks_.num_chunks; ++chunk) {
                if ((claimed >> chunk & 1) == 0) continue;
                if (chunk != counted_last) count_chunk(chunk);
                counted_last = kMaxSortChunks;  // placing uses the counts up
                find_first_rows(chunk);
                if (chunk == 0) {  // here first_row_ is the expert's first row of all
                    write_blocks(routed);
                    clear_hidden_ready(routed);
                }
                place_chunk(chunk, routed);
                signal(&control_->sort_done, 1);
            }
        }
        return wait_for_all(&control_->sort_done, WaitPhase::kSortDone);
    }

    PERSEUS_D bool wait_for_all(const u32* counter, WaitPhase phase) {
        return wait_by_all(params_, counter, chunks_.num_chunks, phase, broadcast_);
    }

    // Calls visit(expert, lanes of this warp with the same expert, row) for this warp's rows of the chunk, in order, on
    // all lanes; lanes without a local expert get kNoExpert.
    template <typename Visit>
    PERSEUS_D void for_each_row(u32 chunk, Visit visit) {
        constexpr u32 kBatch = 4;  // loads in flight
        const u32 lane = threadIdx.x % 32;
        const u32 chunk_begin = chunk * chunks_.rows_per_chunk;
        const u32 chunk_end = smaller(chunk_begin + chunks_.rows_per_chunk, num_rows_);
        const u32 begin = chunk_begin + threadIdx.x / 32 * rows_per_warp();
        const u32 end = smaller(begin + rows_per_warp(), chunk_end);
        for (u32 base = begin; base < end; base += kBatch * 32) {
            u32 experts[kBatch];
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i) {
                const u32 row = base + i * 32 + lane;
                const u32 expert = local_expert(params_, smaller(row, end - 1));
                experts[i] = row < end ? expert : kNoExpert;
            }
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i) {
                if (base + i * 32 >= end) break;
                visit(experts[i], __match_any_sync(0xffffffffu, experts[i]), base + i * 32 + lane);
                __syncwarp();
            }
        }
    }

    PERSEUS_D u32 rows_per_warp() const { return round_up(ceil_div(chunks_.rows_per_chunk, kWarps), 32u); }

    // Leaves, per warp and expert, the rows of earlier warps in this chunk; totals_ holds the chunk's counts.
    PERSEUS_D void count_chunk(u32 chunk) {
        const u32 warps = smaller(ceil_div(chunks_.rows_per_chunk, rows_per_warp()), kWarps);
        for (u32 i = threadIdx.x; i < warps * num_experts_; i += kThreads) warp_counts_[i] = 0;
        __syncthreads();
        u32* counts = warp_counts_ + threadIdx.x / 32 * num_experts_;
        const u32 lane = threadIdx.x % 32;
        for_each_row(chunk, [&](u32 expert, u32 peers, u32) {
            const bool leads = lane == static_cast<u32>(__ffs(peers)) - 1;
            if (leads && expert != kNoExpert) counts[expert] += __popc(peers);
        });
        __syncthreads();
        for (u32 expert = threadIdx.x; expert < num_experts_; expert += kThreads) {
            u32 before = 0;
            for (u32 warp = 0; warp < warps; ++warp) {
                u32& cell = warp_counts_[warp * num_experts_ + expert];
                const u32 count = cell;
                cell = before;
                before += count;
            }
            totals_[expert] = before;
        }
        __syncthreads();
    }

    PERSEUS_D void publish_counts(u32 chunk) {
        auto* counts = static_cast<u32*>(params_.chunk_counts) + chunk * num_experts_;
        for (u32 expert = threadIdx.x; expert < num_experts_; expert += kThreads) counts[expert] = totals_[expert];
        signal(&control_->sort_counted, 1);
    }

    // totals_: rows of each expert in all chunks; first_row_: where this chunk's rows of the expert go.
    PERSEUS_D void find_first_rows(u32 chunk) {
        const auto* counts = static_cast<const u32*>(params_.chunk_counts);
        for (u32 expert = threadIdx.x; expert < num_experts_; expert += kThreads) {
            u32 total = 0;
            u32 before = 0;
#pragma unroll 16
            for (u32 other = 0; other < chunks_.num_chunks; ++other) {
                const u32 count = __ldcg(counts + other * num_experts_ + expert);
                total += count;
                before += other < chunk ? count : 0;
            }
            totals_[expert] = total;
            first_row_[expert] = before;
        }
        finish_first_rows();
    }

    // Adds the rows of the experts before; one warp, each lane takes a run of experts. broadcast: number of blocks.
    PERSEUS_D void finish_first_rows() {
        __syncthreads();
        if (threadIdx.x < 32) {
            const u32 lane = threadIdx.x;
            const u32 run = ceil_div(num_experts_, 32u);
            const u32 begin = smaller(lane * run, num_experts_);
            const u32 end = smaller(begin + run, num_experts_);
            u32 rows = 0;
            u32 blocks = 0;
            for (u32 expert = begin; expert < end; ++expert) {
                rows += totals_[expert];
                blocks += blocks_of(totals_[expert], kMaxTokens);
            }
            u32 rows_before = rows;
            u32 blocks_before = blocks;
            for (u32 distance = 1; distance < 32; distance *= 2) {
                const u32 more_rows = __shfl_up_sync(0xffffffffu, rows_before, distance);
                const u32 more_blocks = __shfl_up_sync(0xffffffffu, blocks_before, distance);
                if (lane >= distance) {
                    rows_before += more_rows;
                    blocks_before += more_blocks;
                }
            }
            if (lane == 31) *broadcast_ = blocks_before;
            rows_before -= rows;
            blocks_before -= blocks;
            for (u32 expert = begin; expert < end; ++expert) {
                first_row_[expert] += rows_before;
                first_block_[expert] = blocks_before;
                rows_before += totals_[expert];
                blocks_before += blocks_of(totals_[expert], kMaxTokens);
            }
        }
        __syncthreads();
    }

    PERSEUS_D void write_blocks(const RoutedRows& routed) {
        for (u32 expert = threadIdx.x; expert < num_experts_; expert += kThreads) {
            const u32 first_block = first_block_[expert];
            const u32 num_blocks = blocks_of(totals_[expert], kMaxTokens);
            for (u32 block = 0; block < num_blocks; ++block) {
                routed.blocks[first_block + block] = {expert, first_row_[expert], totals_[expert], first_block};
            }
        }
    }

    PERSEUS_D void clear_hidden_ready(const RoutedRows& routed) {
        const u32 num_blocks = *broadcast_;
        for (u32 block = threadIdx.x; block < num_blocks; block += kThreads) routed.hidden_ready[block] = 0;
        if (threadIdx.x == 0) control_->num_blocks = num_blocks;
    }

    PERSEUS_D void place_chunk(u32 chunk, const RoutedRows& routed) {
        u32* offsets = warp_counts_ + threadIdx.x / 32 * num_experts_;
        const u32 lane = threadIdx.x % 32;
        for_each_row(chunk, [&](u32 expert, u32 peers, u32 row) {
            const bool placed = expert != kNoExpert;
            const u32 rank = __popc(peers & ((1u << lane) - 1));
            const u32 offset = placed ? offsets[expert] : 0;
            __syncwarp();
            if (placed) routed.sorted[first_row_[expert] + offset + rank] = row;
            if (placed && rank == 0) offsets[expert] = offset + __popc(peers);
        });
    }

    const MoeParams& params_;
    ControlBlock* control_;
    u32 num_rows_;
    u32 num_experts_;
    SortChunks chunks_;
    u32* warp_counts_;  // [kWarps, E]
    u32* totals_;       // [E]
    u32* first_row_;    // [E]
    u32* first_block_;  // [E]
    u32* broadcast_;
};

}  // namespace perseus
