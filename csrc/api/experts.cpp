// Linear maps of experts with few rows, and the weighted sum over the choices, from raw addresses.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "api/api.hpp"
#include "host/aligned.hpp"
#include "host/check.hpp"
#include "host/dispatch.hpp"
#include "host/parallel.hpp"

namespace py = pybind11;

namespace perseus::api {
namespace {

using host::BFloat16;

// Output features per task: 128 KiB of bfloat16 weights at depth 1024, some microseconds of memory traffic.
constexpr int64_t kOutsPerTask = 64;
// Output features that stay in the first-level cache while every row block passes over them.
constexpr int64_t kOutsPerPass = 4;

struct LinearArgs {
    uintptr_t rows, weight, out;
    const int64_t* offsets;
    int64_t num_experts, max_rows, depth, num_outs;
    int64_t expert_stride, out_stride;  // of the weight, in elements; along depth it is contiguous
    int num_threads;
};

// A run of at most kMaxTileRows rows of one expert.
struct RowBlock {
    int64_t expert, first_row;
    int num_rows;
};

// Splits the rows of every expert that has 1..max_rows of them into blocks of nearly equal size, in order.
std::vector<RowBlock> row_blocks(const LinearArgs& args) {
    std::vector<RowBlock> blocks;
    for (int64_t expert = 0; expert < args.num_experts; ++expert) {
        int64_t row = args.offsets[expert];
        int64_t left = args.offsets[expert + 1] - row;
        if (left > args.max_rows) continue;
        for (int64_t parts = (left + host::kMaxTileRows - 1) / host::kMaxTileRows; parts > 0; --parts) {
            const auto num_rows = static_cast<int>((left + parts - 1) / parts);
            blocks.push_back({expert, row, num_rows});
            row += num_rows;
            left -= num_rows;
        }
    }
    return blocks;
}

template <typename T>
void run_linear(const LinearArgs& args) {
    const host::Kernels<T>& kernels = host::best_kernels<T>();
    const std::vector<RowBlock> blocks = row_blocks(args);
    if (blocks.empty()) return;
    const auto num_blocks = static_cast<int64_t>(blocks.size());
    const auto* rows = reinterpret_cast<const T*>(args.rows);
    const auto* weight = reinterpret_cast<const T*>(args.weight);
    auto* out = reinterpret_cast<T*>(args.out);

    // Panels lie in block order, so a block's panel starts after the rows of the blocks before it.
    std::vector<int64_t> panel_row(num_blocks + 1, 0);
    for (int64_t i = 0; i < num_blocks; ++i) panel_row[i + 1] = panel_row[i] + blocks[i].num_rows;
    const host::Aligned<T> panels(panel_row.back() * args.depth);
    host::parallel_for(num_blocks, args.num_threads, [&](int64_t i) {
        kernels.pack_rows(
            rows + blocks[i].first_row * args.depth, blocks[i].num_rows, args.depth,
            panels.get() + panel_row[i] * args.depth);
    });

    // One task: all rows of one expert times kOutsPerTask output features.
    std::vector<int64_t> first_block;
    for (int64_t i = 0; i < num_blocks; ++i) {
        if (i == 0 || blocks[i].expert != blocks[i - 1].expert) first_block.push_back(i);
    }
    const auto num_hit = static_cast<int64_t>(first_block.size());
    first_block.push_back(num_blocks);
    const int64_t tasks_per_expert = (args.num_outs + kOutsPerTask - 1) / kOutsPerTask;
    host::parallel_for(num_hit * tasks_per_expert, args.num_threads, [&](int64_t task) {
        const int64_t hit = task / tasks_per_expert;
        const int64_t first_out = task % tasks_per_expert * kOutsPerTask;
        const int64_t end_out = std::min(first_out + kOutsPerTask, args.num_outs);
        const T* expert_weight = weight + blocks[first_block[hit]].expert * args.expert_stride;
        for (int64_t n = first_out; n < end_out; n += kOutsPerPass) {
            const int64_t num_outs = std::min(kOutsPerPass, end_out - n);
            for (int64_t i = first_block[hit]; i < first_block[hit + 1]; ++i) {
                kernels.tile[blocks[i].num_rows - 1](
                    panels.get() + panel_row[i] * args.depth, expert_weight + n * args.out_stride, args.out_stride,
                    args.depth, num_outs, out + blocks[i].first_row * args.num_outs + n, args.num_outs);
            }
        }
    });
}

void few_rows_linear(
    uintptr_t rows, uintptr_t weight, uintptr_t out, const std::string& dtype, uintptr_t offsets, int64_t num_experts,
    int64_t max_rows, int64_t depth, int64_t num_outs, int64_t expert_stride, int64_t out_stride, int num_threads) {
    PERSEUS_CHECK(
        depth > 0 && num_outs > 0 && num_experts >= 0, "depth and num_outs must be positive, got depth=", depth,
        ", num_outs=", num_outs, ", num_experts=", num_experts, "; skip the call for an empty weight");
    PERSEUS_CHECK(num_threads >= 1, "num_threads must be at least 1, got ", num_threads, "; pass torch.get_num_threads()");
    const LinearArgs args{
        rows,  weight,   out,           reinterpret_cast<const int64_t*>(offsets), num_experts, max_rows,
        depth, num_outs, expert_stride, out_stride,                                num_threads};
    py::gil_scoped_release release;
    if (dtype == "float32") {
        run_linear<float>(args);
    } else if (dtype == "bfloat16") {
        run_linear<BFloat16>(args);
    } else {
        host::fail("dtype must be float32 or bfloat16, got ", dtype, "; use a GEMM per expert for others");
    }
}

template <typename T>
void run_combine(
    const T* rows, const int64_t* slots, const float* weights, T* out, int64_t num_tokens, int64_t num_choices,
    int64_t width, int num_threads) {
    const auto combine_token = host::best_kernels<T>().combine_token;
    constexpr int64_t kTokensPerTask = 16;
    host::parallel_for((num_tokens + kTokensPerTask - 1) / kTokensPerTask, num_threads, [&](int64_t task) {
        const int64_t end = std::min(num_tokens, (task + 1) * kTokensPerTask);
        for (int64_t token = task * kTokensPerTask; token < end; ++token) {
            combine_token(
                rows, slots + token * num_choices, weights + token * num_choices, num_choices, width, out + token * width);
        }
    });
}

void combine(
    uintptr_t rows, uintptr_t slots, uintptr_t weights, uintptr_t out, const std::string& dtype, int64_t num_tokens,
    int64_t num_choices, int64_t width, int num_threads) {
    PERSEUS_CHECK(num_threads >= 1, "num_threads must be at least 1, got ", num_threads, "; pass torch.get_num_threads()");
    py::gil_scoped_release release;
    const auto run = [&]<typename T>(const T* typed_rows) {
        run_combine<T>(
            typed_rows, reinterpret_cast<const int64_t*>(slots), reinterpret_cast<const float*>(weights),
            reinterpret_cast<T*>(out), num_tokens, num_choices, width, num_threads);
    };
    if (dtype == "float32") {
        run(reinterpret_cast<const float*>(rows));
    } else if (dtype == "bfloat16") {
        run(reinterpret_cast<const BFloat16*>(rows));
    } else {
        host::fail("dtype must be float32 or bfloat16, got ", dtype, "; sum other dtypes in torch");
    }
}

}  // namespace

void register_experts(py::module_& m) {
    m.def(
        "few_rows_linear", &few_rows_linear, py::kw_only{}, py::arg("rows"), py::arg("weight"), py::arg("out"),
        py::arg("dtype"), py::arg("offsets"), py::arg("num_experts"), py::arg("max_rows"), py::arg("depth"),
        py::arg("num_outs"), py::arg("expert_stride"), py::arg("out_stride"), py::arg("num_threads"),
        "out[r] = rows[r] @ weight[e].T for the rows r of every expert e that has at most max_rows of them.\n\n"
        "rows [R, depth] and out [R, num_outs] are dense and ordered by expert; offsets [num_experts + 1] int64 are the\n"
        "row segments; weight [num_experts, num_outs, depth] is contiguous along depth, strides in elements. Sums are in\n"
        "float32, the same bits for any number of threads.");
    m.def(
        "combine", &combine, py::kw_only{}, py::arg("rows"), py::arg("slots"), py::arg("weights"), py::arg("out"),
        py::arg("dtype"), py::arg("num_tokens"), py::arg("num_choices"), py::arg("width"), py::arg("num_threads"),
        "out[t] = sum over k, in order and in float32, of weights[t, k] * rows[slots[t, k]]; negative slots are skipped.\n\n"
        "rows [R, width] and out [num_tokens, width] are dense; slots int64 and weights float32 [num_tokens, num_choices].");
}

}  // namespace perseus::api
