// The stages of a MoE layer on the CPU, for the experts that have few rows: rows sorted by expert in, rows out. Each
// stage runs on several threads; a row's numbers do not depend on their count.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "host/aligned.hpp"
#include "host/dispatch.hpp"
#include "host/parallel.hpp"

namespace perseus::host {

// An expert weight [num_experts, num_outs, depth]; strides in elements, one of the last two is 1.
template <typename T>
struct Weight {
    const T* data;
    int64_t num_outs, depth;
    int64_t expert_stride, out_stride, depth_stride;
};

// A run of at most kMaxTileRows rows of one expert, and where its packed panel starts, in rows.
struct RowBlock {
    int64_t expert, first_row, panel_row;
    int num_rows;
};

// Splits the rows of every expert that has 1..max_rows of them into blocks of nearly equal size, in order.
inline std::vector<RowBlock> row_blocks(const int64_t* offsets, int64_t num_experts, int64_t max_rows) {
    std::vector<RowBlock> blocks;
    int64_t panel_row = 0;
    for (int64_t expert = 0; expert < num_experts; ++expert) {
        int64_t row = offsets[expert];
        int64_t left = offsets[expert + 1] - row;
        if (left > max_rows) continue;
        for (int64_t parts = (left + kMaxTileRows - 1) / kMaxTileRows; parts > 0; --parts) {
            const auto num_rows = static_cast<int>((left + parts - 1) / parts);
            blocks.push_back({expert, row, panel_row, num_rows});
            row += num_rows;
            panel_row += num_rows;
            left -= num_rows;
        }
    }
    return blocks;
}

// How one weight layout is computed: which loops, and how the outputs are cut up.
template <typename Panel, typename T>
struct Form {
    const OutsFn<Panel, T>* outs;  // [rows - 1]
    PackFn<Panel, T> pack;
    int64_t outs_per_task;  // unit of parallel work, some microseconds of memory traffic
    int64_t outs_per_pass;  // their weights stay in cache while every row block of the expert passes over them
    int64_t row_stride;     // of the weight, along the axis that is not contiguous
};

template <typename Panel, typename T>
void linear_in_form(
    const Form<Panel, T>& form, const T* rows, const int64_t* row_index, const std::vector<RowBlock>& blocks,
    const Weight<T>& weight, T* out, int num_threads) {
    const int64_t panel_size = (blocks.back().panel_row + blocks.back().num_rows) * weight.depth;
    const Aligned<Panel> panels(panel_size);
    // Below some 64 thousand elements, packing takes less time than waking a second thread.
    const int num_pack_threads = panel_size < (1 << 16) ? 1 : num_threads;
    parallel_for(static_cast<int64_t>(blocks.size()), num_pack_threads, [&](int64_t i) {
        const RowBlock& block = blocks[i];
        const T* block_rows[kMaxTileRows];
        for (int m = 0; m < block.num_rows; ++m) {
            const int64_t row = block.first_row + m;
            block_rows[m] = rows + (row_index ? row_index[row] : row) * weight.depth;
        }
        form.pack(block_rows, block.num_rows, weight.depth, panels.get() + block.panel_row * weight.depth);
    });

    std::vector<size_t> first_block;  // of each expert hit, and the end
    for (size_t i = 0; i < blocks.size(); ++i) {
        if (i == 0 || blocks[i].expert != blocks[i - 1].expert) first_block.push_back(i);
    }
    const auto num_hit = static_cast<int64_t>(first_block.size());
    first_block.push_back(blocks.size());
    const int64_t tasks_per_expert = (weight.num_outs + form.outs_per_task - 1) / form.outs_per_task;
    parallel_for(num_hit * tasks_per_expert, num_threads, [&](int64_t task) {
        const int64_t hit = task / tasks_per_expert;
        const int64_t first_out = task % tasks_per_expert * form.outs_per_task;
        const int64_t end_out = std::min(first_out + form.outs_per_task, weight.num_outs);
        for (int64_t n = first_out; n < end_out; n += form.outs_per_pass) {
            for (size_t i = first_block[hit]; i < first_block[hit + 1]; ++i) {
                const RowBlock& block = blocks[i];
                form.outs[block.num_rows - 1](
                    panels.get() + block.panel_row * weight.depth,
                    weight.data + block.expert * weight.expert_stride + n * weight.out_stride, form.row_stride,
                    weight.depth, std::min(form.outs_per_pass, end_out - n),
                    out + block.first_row * weight.num_outs + n, weight.num_outs);
            }
        }
    });
}

// out[r] = rows[row_index[r]] @ weight[e].T for the rows r of every expert e that has at most max_rows of them.
//   rows: [., depth] and out: [R, num_outs], dense. row_index: [R], or null for rows[r]. offsets: [num_experts + 1].
template <typename T>
void linear(
    const Kernels<T>& kernels, const T* rows, const int64_t* row_index, const int64_t* offsets, int64_t num_experts,
    int64_t max_rows, const Weight<T>& weight, T* out, int num_threads) {
    const std::vector<RowBlock> blocks = row_blocks(offsets, num_experts, max_rows);
    if (blocks.empty()) return;
    if (weight.depth_stride == 1) {
        const Form<T, T> form{kernels.dot_outs, kernels.dot_pack, 64, 4, weight.out_stride};
        linear_in_form(form, rows, row_index, blocks, weight, out, num_threads);
    } else {
        const Form<float, T> form{kernels.outer_outs, kernels.outer_pack, 256, 256, weight.depth_stride};
        linear_in_form(form, rows, row_index, blocks, weight, out, num_threads);
    }
}

// rows[r] += bias[e], rounded, for the rows r of every expert e. bias: [num_experts, width], dense.
template <typename T>
void add_bias(const T* bias, const int64_t* offsets, int64_t num_experts, int64_t width, T* rows) {
    for (int64_t expert = 0; expert < num_experts; ++expert) {
        for (int64_t row = offsets[expert]; row < offsets[expert + 1]; ++row) {
            for (int64_t i = 0; i < width; ++i) {
                narrow(rows + row * width + i, widen(rows[row * width + i]) + widen(bias[expert * width + i]));
            }
        }
    }
}

// What is between the two linear maps of an expert.
struct Gate {
    Activation activation;
    bool interleaved;
    float alpha, limit;
};

// active: [num_rows, width] from hidden: [num_rows, 2 * width].
template <typename T>
void activate(
    const Kernels<T>& kernels, const Gate& gate, const T* hidden, int64_t num_rows, int64_t width, T* active,
    int num_threads) {
    const auto activate_row = kernels.activate_row[static_cast<int>(gate.activation)][gate.interleaved];
    constexpr int64_t kRowsPerTask = 16;
    parallel_for((num_rows + kRowsPerTask - 1) / kRowsPerTask, num_threads, [&](int64_t task) {
        const int64_t end = std::min(num_rows, (task + 1) * kRowsPerTask);
        for (int64_t row = task * kRowsPerTask; row < end; ++row) {
            activate_row(hidden + row * 2 * width, width, gate.alpha, gate.limit, active + row * width);
        }
    });
}

// out[t] = sum over k, in order and in float32, of weights[t, k] * rows[slots[t, k]]; negative slots are skipped.
//   slots and weights: [num_tokens, num_choices]; no weights: all 1. rows: [R, width]. out: [num_tokens, width]. Dense.
template <typename T, typename W>
void combine(
    const Kernels<T>& kernels, const T* rows, const int64_t* slots, const W* weights, int64_t num_tokens,
    int64_t num_choices, int64_t width, T* out, int num_threads) {
    constexpr int64_t kTokensPerTask = 16;
    parallel_for((num_tokens + kTokensPerTask - 1) / kTokensPerTask, num_threads, [&](int64_t task) {
        std::vector<float> token_weights(num_choices, 1.0f);
        const int64_t end = std::min(num_tokens, (task + 1) * kTokensPerTask);
        for (int64_t token = task * kTokensPerTask; token < end; ++token) {
            const int64_t first = token * num_choices;
            for (int64_t k = 0; weights && k < num_choices; ++k) token_weights[k] = widen(weights[first + k]);
            kernels.combine_token(rows, slots + first, token_weights.data(), num_choices, width, out + token * width);
        }
    });
}

}  // namespace perseus::host
