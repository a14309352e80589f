// A MoE layer, or its experts alone, forward, in one launch on one Hopper GPU: a table of contents of the parts.
//
//   route     routing/router_phase.cuh logits, choices, weights; only with C::kRoutes   all warps
//   sort      schedule/row_sort.cuh    rows by expert, token blocks                 all warps
//   schedule  schedule/worklist.cuh    GEMM 1 tiles, GEMM 2 tiles, combine items    one warp, which also
//   load      moe/roles.cuh            loads weights by TMA; tokens: two more
//   multiply  mma/mainloop.cuh         wgmma, weights as M side, tokens as N side   one or two warpgroups
//   finish    epilogue/hidden.cuh      bias + activation -> hidden
//             epilogue/slots.cuh       bias -> one slot per (token, choice)
//             epilogue/combine.cuh     ordered float32 sum -> out
//   publish   moe/roles.cuh            tells other CTAs what is stored              one warp
#pragma once

#include "perseus/moe/roles.cuh"
#include "perseus/routing/router_phase.cuh"

namespace perseus {

// The last CTA to leave clears the control block, so that the next launch or the next replay needs no memset.
PERSEUS_D void leave(const MoeParams& params, u32* broadcast) {
    auto* control = static_cast<ControlBlock*>(params.control);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        *broadcast = atomicAdd(&control->exits, 1u) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (*broadcast == 0) return;
    auto* words = static_cast<u32*>(params.control);
    for (u32 i = threadIdx.x; i < sizeof(ControlBlock) / 4; i += blockDim.x) words[i] = 0;
}

template <class C>
PERSEUS_D void moe_forward(const MoeParams& params, const TensorMap* gate_up, const TensorMap* down,
                           const TensorMap* hidden, u8* dynamic_smem) {
    auto& shared = *reinterpret_cast<SharedStorage<C>*>(dynamic_smem + (0u - ptx::smem_address(dynamic_smem)) % 1024);
    const u32 warp = threadIdx.x / 32;
    u32 first_claim = 0;
    u32 first_product = 0;
    if (threadIdx.x == 0) {  // both under way while barriers are made and rows are sorted
        if constexpr (C::kRoutes) first_product = claim_product(params);
        first_claim = claim_tile(params);
        ptx::prefetch_tensor_map(gate_up);
        ptx::prefetch_tensor_map(down);
        ptx::prefetch_tensor_map(hidden);
        shared.init_barriers();
    }
    const bool has_choices = have_choices<C>(params, shared.stages, &shared.broadcast, first_product);
    RowSort<C> sort(params, shared.stages, &shared.broadcast);
    RoutedRows routed;
    if (has_choices && sort.run(shared.sort_result, routed)) {
        ptx::fence_proxy_async_shared();  // the sort's scratch becomes the copy engine's stages
        __syncthreads();
        const TileShape shape = tile_shape<C>(params, routed.num_blocks);
        if (warp < kProducerWarps) {
            if constexpr (C::kGroups == 2) ptx::shrink_registers<88>();
            if (warp == 0) run_weight_loads<C>(params, routed, shape, gate_up, down, shared, first_claim);
            else if (warp <= kGatherWarps) run_token_loads<C>(params, routed, hidden, shared, warp - 1);
            else run_publisher<C>(params, routed, shared);
        } else {
            if constexpr (C::kGroups == 2) ptx::grow_registers<208>();
            run_consumer<C>(params, routed, shape, shared, warp / 4 - 1);
        }
    } else {
        store_nan_output(params, threadIdx.x, C::kThreads);  // all of it: this CTA's claim, whatever it was, is lost
    }
    leave(params, &shared.broadcast);
}

}  // namespace perseus

// One variant per translation unit: PERSEUS_CONFIG is a MoeConfig.
#if defined(PERSEUS_CONFIG)
extern "C" __global__ void __launch_bounds__(perseus::PERSEUS_CONFIG::kThreads, 1)
    perseus_moe_fwd(const __grid_constant__ perseus::MoeParams params,
                    const __grid_constant__ perseus::TensorMap gate_up, const __grid_constant__ perseus::TensorMap down,
                    const __grid_constant__ perseus::TensorMap hidden) {
    extern __shared__ perseus::u8 dynamic_smem[];
    perseus::moe_forward<perseus::PERSEUS_CONFIG>(params, &gate_up, &down, &hidden, dynamic_smem);
}
// What the host must know of this image before it launches it.
extern "C" __constant__ perseus::u32 perseus_facts[10] = {
    perseus::shared_bytes<perseus::PERSEUS_CONFIG>(),
    perseus::PERSEUS_CONFIG::kThreads,
    sizeof(perseus::MoeParams),
    sizeof(perseus::ControlBlock),
    perseus::PERSEUS_CONFIG::kMaxTokens,
    perseus::PERSEUS_CONFIG::kWeightRows,
    perseus::PERSEUS_CONFIG::kLayout == perseus::WeightLayout::kInOut,
    perseus::PERSEUS_CONFIG::kPairedColumns,
    perseus::PERSEUS_CONFIG::kHiddenBoxRows,
    perseus::PERSEUS_CONFIG::kRoutes,
};
#endif
