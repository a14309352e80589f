// What does one launch of the MoE kernel get? Plain numbers and addresses; the host fills this, the kernel reads it.
//
// Axes: T tokens, K choices per token, E experts, D model width, F expert width, R routed rows (T*K).
#pragma once

#include "perseus/common/route_params.cuh"
#include "perseus/schedule/worklist.cuh"

namespace perseus {

// Same size and alignment as the driver's CUtensorMap, which NVRTC does not know.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

struct MoeParams {
    // tensors of the caller
    const void* x;                // BF16 [T, D], rows x_row_elements apart
    const void* ids;              // i32 or i64 [T, K], contiguous
    const void* weights;          // F32 or BF16 [T, K], contiguous
    const void* gate_up_bias;     // BF16 [E, 2F] or null
    const void* down_bias;        // BF16 [E, D] or null
    void* out;                    // BF16 [T, D], contiguous
    // with C::kRoutes only
    const void* router_weight;    // BF16 [router's E, D], rows router_row_elements apart
    const void* router_bias;      // BF16 [router's E] or null
    // workspace of this call, see layout/workspace.cuh
    void* hidden;                 // BF16 [R, F], rows sorted by expert
    void* slots;                  // BF16 [R, D], row t*K + k belongs to choice k of token t
    void* sorted_rows;            // u32 [R]: t*K + k of the i-th row in expert order
    void* block_list;             // TokenBlock [max blocks], one per token block
    void* hidden_ready;           // u32 [max blocks]
    void* chunk_counts;           // u32 [kMaxSortChunks, E]
    void* logits;                 // BF16 [T, router's E], with C::kRoutes only, as are the next two
    void* routed_ids;             // i32 [T, K], the same as ids
    void* routed_weights;         // F32 [T, K], the same as weights
    // words that are zero between launches
    void* control;                // ControlBlock
    void* error;                  // ErrorRecord in host memory, or null
    u64 deadline_ns;              // of any single wait
    i64 x_row_elements;
    i64 router_row_elements;
    u32 num_tokens;
    u32 top_k;
    u32 num_local_experts;
    u32 expert_offset;
    u32 model_width;              // D
    u32 expert_width;             // F
    u32 bias_feature_stride;      // gate_up_bias index = f * feature_stride + pair * pair_stride
    u32 bias_pair_stride;
    u32 ids_are_i64;
    u32 weights_are_bf16;
    u32 weight_on_input;          // the routing weight multiplies the input row instead of the output
    u32 num_column_groups;        // of the output; see schedule/worklist.cuh
    float act_alpha;              // clamped_swiglu
    float act_limit;
    RouteParams route;            // with C::kRoutes only
};

// Zero between launches: the last CTA to leave clears it. One per stream, and per stream and graph capture.
struct ControlBlock {
    u32 sort_claim;
    u32 sort_counted;
    u32 sort_done;
    u32 num_blocks;
    u32 tile_claim;
    u32 exits;
    u32 aborted;
    u32 router_claim;
    u32 router_done;
    u32 route_claim;
    u32 tokens_routed;
    u32 slots_done[kMaxColumnGroups];
    u32 private_hidden_ready[kPrivateSortBlocks];  // where nobody prepares counters in the workspace: private sorts
};

enum class WaitPhase : u32 { kSortCount = 1, kSortDone = 2, kHidden = 3, kSlots = 4, kLogits = 5, kRoutes = 6 };

// What the first wait that ran out of time was waiting for.
struct ErrorRecord {
    u32 phase;  // WaitPhase; 0: no error
    u32 cta;
    u32 expert;
    u32 tile;
    u32 observed;
    u32 expected;
};

}  // namespace perseus
