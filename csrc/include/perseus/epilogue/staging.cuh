// How do sums, which lie feature by feature in registers, become rows of tokens in memory? Through shared memory.
//
// A warpgroup's staging area holds one 128-byte row (64 features) per token, 16-byte chunks swizzled by the token so
// that neither the transposing stores nor the row reads hit a bank twice.
#pragma once

#include "perseus/mma/mainloop.cuh"

namespace perseus {

inline constexpr u32 kChunkElements = 8;  // BF16 in 16 bytes
inline constexpr u32 kChunksPerRow = kSwizzleBytes / 16;

PERSEUS_D u32 staged_chunk_offset(u32 token, u32 chunk) { return token * kSwizzleBytes + ((chunk ^ (token & 7)) << 4); }

// Stores values(j, h), the packed pair of tokens 8*j + 2*(lane%4) + {0, 1} at weight row 16*warp + lane/4 + 8*h.
template <u32 kN, typename Values>
PERSEUS_D void stage_transposed(u32 staging, Values values) {
    const u32 lane = threadIdx.x % 32;
    const u32 warp = threadIdx.x / 32 % 4;
    const u32 matrix = lane / 8;
    const u32 address = staging + staged_chunk_offset(8 * (matrix / 2) + lane % 8, 2 * warp + matrix % 2);
#pragma unroll
    for (u32 j = 0; j + 1 < kN / 8; j += 2) {
        ptx::store_matrix_x4_trans(address + j * 8 * kSwizzleBytes, values(j, 0), values(j, 1), values(j + 1, 0),
                                   values(j + 1, 1));
    }
    if constexpr (kN / 8 % 2 == 1) {
        constexpr u32 kLast = kN / 8 - 1;
        ptx::store_matrix_x2_trans(address + kLast * 8 * kSwizzleBytes, values(kLast, 0), values(kLast, 1));
    }
}

// Copies the staged rows out; destination(pass, token, chunk) is the address of 16 bytes, or null where nothing
// belongs. All 128 threads of the warpgroup call it after one of its barriers. Who tells other CTAs: run_scheduler.
template <u32 kN, typename Destination>
PERSEUS_D void copy_staged_rows(const u8* staging, u32 num_rows, Destination destination) {
    constexpr u32 kRowsPerPass = 128 / kChunksPerRow;
    const u32 chunk = threadIdx.x % kChunksPerRow;
#pragma unroll
    for (u32 pass = 0; pass < ceil_div(kN, kRowsPerPass); ++pass) {
        const u32 token = pass * kRowsPerPass + threadIdx.x % 128 / kChunksPerRow;
        if (token >= num_rows) continue;
        uint4* target = destination(pass, token, chunk);
        if (target != nullptr) *target = *reinterpret_cast<const uint4*>(staging + staged_chunk_offset(token, chunk));
    }
}

}  // namespace perseus
