// Where are the stages of the load pipeline, and whose turn is it? Shared memory of the kernel and its ring positions.
#pragma once

#include "perseus/common/config.cuh"
#include "perseus/ptx/mbarrier.cuh"
#include "perseus/schedule/row_sort.cuh"

namespace perseus {

// Position in a ring of kSize slots. A slot's barrier flips parity once per round.
template <u32 kSize>
struct RingPosition {
    u32 slot = 0;
    u32 parity = 0;

    PERSEUS_D void advance() {
        if (++slot == kSize) {
            slot = 0;
            parity ^= 1;
        }
    }
};

// What the scheduler tells the other roles about their next tile.
struct TileMessage {
    TileKind kind;
    u32 group;  // column group of GEMM 2 and combine
    u32 expert;
    u32 weight_tile;  // combine: number of the item
    u32 block;
    u32 first_row;
    u32 num_rows;
};

template <class C>
struct SharedStorage {
    alignas(1024) u8 stages[C::kStages][C::kStageBytes];  // weights, then tokens
    alignas(1024) u8 staging[C::kGroups][C::kStagingBytes];
    u64 stage_full[C::kStages];
    u64 stage_empty[C::kStages];
    u64 tile_full[kTileRing];
    u64 tile_empty[kTileRing];
    TileMessage tile[kTileRing];
    u32 broadcast;
    u32 aborted;  // a wait of this CTA ran out of time: what it stores from now on is not published
    PrivateSortResult<C::kPrivateSort> sort_result;

    PERSEUS_D u32 weight_address(u32 stage) const { return ptx::smem_address(stages[stage]); }
    PERSEUS_D u32 token_address(u32 stage) const { return ptx::smem_address(stages[stage]) + C::kWeightBytes; }

    // One thread. A stage is full after one arrival for the weights and one of each gather thread.
    PERSEUS_D void init_barriers() {
        aborted = 0;
        for (u32 stage = 0; stage < C::kStages; ++stage) {
            ptx::mbarrier_init(&stage_full[stage], 1 + kGatherWarps * 32);
            ptx::mbarrier_init(&stage_empty[stage], C::kGroups * 4);
        }
        for (u32 slot = 0; slot < kTileRing; ++slot) {
            ptx::mbarrier_init(&tile_full[slot], 1);
            ptx::mbarrier_init(&tile_empty[slot], (kGatherWarps + 1) * 32 + C::kGroups * 128);
        }
        ptx::fence_barrier_init();
    }
};

template <class C>
PERSEUS_HD constexpr u32 shared_bytes() {
    static_assert(sizeof(SharedStorage<C>) + 1024 <= kSmemLimit, "more shared memory than an SM has");
    return sizeof(SharedStorage<C>) + 1024;  // the kernel aligns its base to a swizzle atom
}

// How a role receives tiles: whole warps call next(). Every lane answers for itself, so that the answer also stands for
// what the lane stored before.
template <class C>
class TileInbox {
public:
    PERSEUS_D explicit TileInbox(SharedStorage<C>& shared) : shared_(shared) {}

    PERSEUS_D TileMessage next() {
        taken_ = position_;
        ptx::mbarrier_wait(&shared_.tile_full[position_.slot], position_.parity);
        const TileMessage message = shared_.tile[position_.slot];
        ptx::mbarrier_arrive(&shared_.tile_empty[position_.slot]);
        position_.advance();
        return message;
    }

    // Until all roles have taken the message that this one took last.
    PERSEUS_D void wait_taken_by_all() { ptx::mbarrier_wait(&shared_.tile_empty[taken_.slot], taken_.parity); }

private:
    SharedStorage<C>& shared_;
    RingPosition<kTileRing> position_;
    RingPosition<kTileRing> taken_;
};

// How the scheduler sends them. One warp.
template <class C>
class TileOutbox {
public:
    PERSEUS_D explicit TileOutbox(SharedStorage<C>& shared) : shared_(shared) {}

    PERSEUS_D void post(const TileMessage& message) {
        ptx::mbarrier_wait(&shared_.tile_empty[position_.slot], position_.parity ^ 1);
        if (threadIdx.x % 32 == 0) {
            shared_.tile[position_.slot] = message;
            ptx::mbarrier_arrive(&shared_.tile_full[position_.slot]);
        }
        __syncwarp();
        position_.advance();
    }

private:
    SharedStorage<C>& shared_;
    RingPosition<kTileRing> position_;
};

}  // namespace perseus
