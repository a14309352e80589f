// What is fixed when a kernel is compiled? Token counts, widths and expert counts are not: they are in params.cuh.
#pragma once

#include "perseus/common/types.cuh"

namespace perseus {

enum class Activation : i32 { kSilu = 0, kGelu = 1, kGeluTanh = 2, kClampedSwiglu = 3 };

// kOutIn: weights [E, N, K], the summed axis K is contiguous. kInOut: weights [E, K, N].
enum class WeightLayout : i32 { kOutIn = 0, kInOut = 1 };

inline constexpr u32 kSwizzleBytes = 128;  // one smem row of a tile; also the width of a TMA box
inline constexpr u32 kTileK = 64;          // BF16 elements in kSwizzleBytes
inline constexpr u32 kWgmmaRows = 64;      // weight rows of one wgmma
inline constexpr u32 kSubTileBytes = kWgmmaRows * kSwizzleBytes;
inline constexpr u32 kSubTilesPerGroup = 2;  // gate and up; both halves of the output rows in GEMM 2
inline constexpr u32 kSmemLimit = 227 * 1024;
inline constexpr u32 kProducerWarps = 4;
inline constexpr u32 kGatherWarps = 2;  // of the producer warps; the other two: weights and scheduling, publishing
inline constexpr u32 kTileRing = 2;     // tiles that the loads may be ahead of the products

// Weights are the M side of every product and tokens the N side. The padded part of a tile is then at most 7 tokens,
// and the same code streams weights for one token and runs 256 x 128 tiles for many.
template <u32 kGroups_, u32 kMaxTokens_, u32 kStages_, WeightLayout kLayout_, bool kPairedColumns_, Activation kAct_,
          bool kRoutes_>
struct MoeConfig {
    static constexpr u32 kGroups = kGroups_;        // consumer warpgroups
    static constexpr u32 kMaxTokens = kMaxTokens_;  // tokens of a tile, at most
    static constexpr u32 kStages = kStages_;
    static constexpr WeightLayout kLayout = kLayout_;
    // gate and up alternate along the rows of a weight tile: only where TMA strides cannot separate them, that is for
    // interleaved weights whose contiguous axis holds both
    static constexpr bool kPairedColumns = kPairedColumns_;
    static constexpr Activation kAct = kAct_;
    // the launch computes the router, too. Not a choice at run time: code that is not used still costs 1 to 3 us, since
    // with few tokens the instructions come from memory (docs/measured.md)
    static constexpr bool kRoutes = kRoutes_;

    static constexpr u32 kThreads = kProducerWarps * 32 + kGroups * 128;
    static constexpr u32 kWeightRows = kGroups * kSubTilesPerGroup * kWgmmaRows;
    static constexpr u32 kWeightBytes = kWeightRows * kSwizzleBytes;
    static constexpr u32 kTokenBytes = kMaxTokens * kSwizzleBytes;
    static constexpr u32 kStageBytes = kWeightBytes + kTokenBytes;
    static constexpr u32 kHiddenPerTile = kWeightRows / 2;  // hidden features that one GEMM 1 tile yields
    static constexpr u32 kOutPerTile = kWeightRows;         // output features that one GEMM 2 tile yields
    static constexpr u32 kHiddenBoxRows = kMaxTokens < 32 ? kMaxTokens : 32;  // rows of `hidden` in one TMA box
    static constexpr u32 kStagingBytes = kMaxTokens * kSwizzleBytes;  // per consumer warpgroup

    // room for the result of a private sort; the configurations for many rows use all of the memory for stages
    static constexpr bool kPrivateSort = kGroups == 1;

    static_assert(kGroups == 1 || kGroups == 2, "one or two consumer warpgroups");
    static_assert(kMaxTokens % 8 == 0 && kMaxTokens <= 128, "tokens per tile: a multiple of 8, at most 128");
    static_assert(!kRoutes || kGroups == 1, "a router in the launch is for few tokens");
    static_assert(!kPairedColumns || kLayout == WeightLayout::kInOut, "[E, N, K] weights are separated by TMA strides");
};

}  // namespace perseus
