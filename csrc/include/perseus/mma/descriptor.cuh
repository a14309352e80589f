// How does wgmma find a tile in shared memory? Descriptors for the two layouts in use, both with 128-byte swizzle.
#pragma once

#include "perseus/common/config.cuh"

namespace perseus {

// Tiles are runs of 128-byte rows, 8 rows to a swizzle atom of 1024 bytes; every tile starts on such an atom.
// K contiguous: a row is 64 values of K; 8-row groups are 1024 bytes apart (stride offset).
// M contiguous: a row is 64 values of M at one k; groups of 8 k are 1024 bytes apart (stride offset), and the leading
// offset, between runs of 64 M, is not used because one wgmma has M = 64.
PERSEUS_D u64 make_descriptor(u32 smem_address) {
    constexpr u64 kSwizzle128 = u64{1} << 62;
    constexpr u64 kStrideOffset = u64{1024 >> 4} << 32;
    constexpr u64 kLeadingOffset = u64{1} << 16;
    return kSwizzle128 | kStrideOffset | kLeadingOffset | ((smem_address & 0x3ffff) >> 4);
}

// What to add to a descriptor for the next 16 values of K.
template <WeightLayout kLayout>
inline constexpr u64 kWeightStep = kLayout == WeightLayout::kOutIn ? (16 * 2) >> 4 : (16 * kSwizzleBytes) >> 4;
inline constexpr u64 kTokenStep = (16 * 2) >> 4;

}  // namespace perseus
