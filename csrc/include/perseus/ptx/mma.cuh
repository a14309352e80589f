// How does one warp multiply small tiles that lie in its registers? mma.sync, thin.
#pragma once

#include "perseus/common/types.cuh"

namespace perseus::ptx {

// d[16, 8] += a[16, 16] * b[16, 8], BF16 in, F32 out. Lane 4g + q holds, as pairs of neighbours along the summed axis:
// a_low, a_high: row g and row g + 8; b: column g; pair [0] at 2q, pair [1] at 2q + 8. d: row g, then g + 8, columns 2q
// and 2q + 1.
PERSEUS_D void mma_m16n8k16(float (&d)[4], const u32 (&a_low)[2], const u32 (&a_high)[2], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a_low[0]), "r"(a_high[0]), "r"(a_low[1]), "r"(a_high[1]), "r"(b[0]), "r"(b[1]));
}

}  // namespace perseus::ptx
