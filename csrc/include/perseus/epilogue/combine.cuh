// How do the slots of a token become its output? A float32 sum in choice order, so that the result never depends on
// which CTA finished first. Choices of other ranks are skipped; their slots hold garbage.
#pragma once

#include "perseus/epilogue/slots.cuh"
#include "perseus/ptx/copy.cuh"

namespace perseus {

inline constexpr u32 kCombineBatch = 8;   // slots of a token in flight per thread, each
inline constexpr u32 kCombineChunks = 2;  // so many 16-byte chunks of the output

PERSEUS_D void store_nan_chunk(uint4* target) {
    constexpr u32 kNanPair = 0x7fc07fc0u;
    *target = make_uint4(kNanPair, kNanPair, kNanPair, kNanPair);
}

PERSEUS_D void store_nan_output(const MoeParams& params, u32 thread, u32 num_threads) {
    const u64 chunks = static_cast<u64>(params.num_tokens) * params.model_width / kChunkElements;
    for (u64 i = thread; i < chunks; i += num_threads) store_nan_chunk(static_cast<uint4*>(params.out) + i);
}

enum class CombineResult : u32 { kStore, kNan, kDiscard };

// One token, one run of output features; one warp. Lane k knows choice k; every lane sums its chunks.
PERSEUS_D void combine_span(const MoeParams& params, u32 token, u32 first_chunk, u32 num_chunks, CombineResult result) {
    const u32 lane = threadIdx.x % 32;
    const u32 chunks_per_row = params.model_width / kChunkElements;
    const u64 first_row = static_cast<u64>(token) * params.top_k;
    const u64 choice = first_row + smaller(lane, params.top_k - 1);
    const bool is_local = lane < params.top_k && local_expert(params, choice) != kNoExpert;
    const float weight = params.weight_on_input ? 1.0f : routing_weight(params, choice);
    const auto* slots = static_cast<const uint4*>(params.slots) + first_row * chunks_per_row + first_chunk;
    u32 chunk[kCombineChunks];
    float sums[kCombineChunks][kChunkElements] = {};
#pragma unroll
    for (u32 c = 0; c < kCombineChunks; ++c) chunk[c] = smaller(c * 32 + lane, num_chunks - 1);
    for (u32 first = 0; first < params.top_k; first += kCombineBatch) {
        uint4 slot[kCombineBatch][kCombineChunks];
#pragma unroll
        for (u32 i = 0; i < kCombineBatch; ++i) {
            const u64 row = smaller(first + i, params.top_k - 1);
#pragma unroll
            for (u32 c = 0; c < kCombineChunks; ++c) slot[i][c] = __ldcg(slots + row * chunks_per_row + chunk[c]);
        }
        const u32 local_choices = __ballot_sync(0xffffffffu, is_local) >> first;
#pragma unroll
        for (u32 i = 0; i < kCombineBatch; ++i) {
            const float scale = __shfl_sync(0xffffffffu, weight, first + i);
            if ((local_choices >> i & 1) == 0) continue;
#pragma unroll
            for (u32 c = 0; c < kCombineChunks; ++c) {
                const u32 words[4] = {slot[i][c].x, slot[i][c].y, slot[i][c].z, slot[i][c].w};
#pragma unroll
                for (u32 w = 0; w < 4; ++w) {
                    sums[c][2 * w] += scale * ptx::bf16_low(words[w]);
                    sums[c][2 * w + 1] += scale * ptx::bf16_high(words[w]);
                }
            }
        }
    }
    auto* out = static_cast<uint4*>(params.out) + static_cast<u64>(token) * chunks_per_row + first_chunk;
#pragma unroll
    for (u32 c = 0; c < kCombineChunks; ++c) {
        if (c * 32 + lane >= num_chunks || result == CombineResult::kDiscard) continue;
        if (result == CombineResult::kNan) store_nan_chunk(out + chunk[c]);
        else {
            out[chunk[c]] = make_uint4(ptx::pack_bf16(sums[c][0], sums[c][1]), ptx::pack_bf16(sums[c][2], sums[c][3]),
                                       ptx::pack_bf16(sums[c][4], sums[c][5]), ptx::pack_bf16(sums[c][6], sums[c][7]));
        }
    }
}

// The same as one function that is not inlined, so that its warm-up and its use run the same instructions.
__device__ __noinline__ void combine_span_called(const MoeParams& params, u32 token, u32 first_chunk, u32 num_chunks,
                                                 CombineResult result) {
    combine_span(params, token, first_chunk, num_chunks, result);
}

// With few tokens one CTA alone sums, at the very end, and weights that streamed by have pushed these instructions out
// of L2: reading them from memory then takes longer than the sum. So an idle warp runs them once while weights come.
PERSEUS_D void warm_up_combine(const MoeParams& params) {
    constexpr u32 kFewTokens = 132;
    if (params.num_tokens > kFewTokens) return;
    combine_span_called(params, 0, 0, smaller(32 * kCombineChunks, params.model_width / kChunkElements),
                        CombineResult::kDiscard);
}

// One queue item: a few tokens and one column group, shared by all consumer warps of the CTA.
template <class C>
PERSEUS_D void combine_tokens(const MoeParams& params, const TileShape& shape, u32 item, u32 group) {
    const u32 per_item = combine_tokens_per_item(params.num_tokens, shape.num_groups);
    const u32 first_token = item * per_item;
    const u32 num_tokens = smaller(per_item, params.num_tokens - first_token);
    const auto* control = static_cast<const ControlBlock*>(params.control);
    bool arrived = true;
    if (threadIdx.x % 32 == 0) {
        // read in a moment; they may lie in memory still
        const u64 first_choice = static_cast<u64>(first_token) * params.top_k;
        ptx::prefetch_l2(static_cast<const u8*>(params.weights) + first_choice * (params.weights_are_bf16 ? 2 : 4));
        arrived = wait_at_least(params, &control->slots_done[group], shape.num_blocks * shape.group_tiles(group),
                                {WaitPhase::kSlots, 0, item});
    }
    arrived = __shfl_sync(0xffffffffu, arrived, 0);
    constexpr u32 kChunksPerTile = C::kOutPerTile / kChunkElements;
    constexpr u32 kSpan = 32 * kCombineChunks;
    const u32 begin = shape.group_begin(group) * kChunksPerTile;
    const u32 end = smaller(shape.group_begin(group + 1) * kChunksPerTile, params.model_width / kChunkElements);
    const u32 spans = ceil_div(end - begin, kSpan);
    for (u32 unit = threadIdx.x / 32 - kProducerWarps; unit < num_tokens * spans; unit += C::kGroups * 4) {
        const u32 first_chunk = begin + unit % spans * kSpan;
        const u32 num_chunks = smaller(kSpan, end - first_chunk);
        const CombineResult result = arrived ? CombineResult::kStore : CombineResult::kNan;
        // NOTE: calls and setmaxnreg do not go together, and only two groups use setmaxnreg
        const u32 token = first_token + unit / spans;
        if constexpr (C::kGroups == 1) combine_span_called(params, token, first_chunk, num_chunks, result);
        else combine_span(params, token, first_chunk, num_chunks, result);
    }
}

}  // namespace perseus
