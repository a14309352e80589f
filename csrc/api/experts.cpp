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

struct LinearArgs {
    uintptr_t rows, weight, out;
    const int64_t* row_index;  // row r is rows[row_index[r]]; null: rows[r]
    const int64_t* offsets;
    int64_t num_experts, max_rows, depth, num_outs;
    int64_t expert_stride, out_stride, depth_stride;  // of the weight, in elements; one of the last two is 1
    int num_threads;
};

// A run of at most kMaxTileRows rows of one expert, and where its packed panel starts, in rows.
struct RowBlock {
    int64_t expert, first_row, panel_row;
    int num_rows;
};

// Splits the rows of every expert that has 1..max_rows of them into blocks of nearly equal size, in order.
std::vector<RowBlock> row_blocks(const LinearArgs& args) {
    std::vector<RowBlock> blocks;
    int64_t panel_row = 0;
    for (int64_t expert = 0; expert < args.num_experts; ++expert) {
        int64_t row = args.offsets[expert];
        int64_t left = args.offsets[expert + 1] - row;
        if (left > args.max_rows) continue;
        for (int64_t parts = (left + host::kMaxTileRows - 1) / host::kMaxTileRows; parts > 0; --parts) {
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
    const host::OutsFn<Panel, T>* outs;  // [rows - 1]
    host::PackFn<Panel, T> pack;
    int64_t outs_per_task;  // unit of parallel work, some microseconds of memory traffic
    int64_t outs_per_pass;  // their weights stay in cache while every row block of the expert passes over them
    int64_t row_stride;     // of the weight, along the axis that is not contiguous
};

template <typename Panel, typename T>
void run_form(const LinearArgs& args, const Form<Panel, T>& form) {
    const std::vector<RowBlock> blocks = row_blocks(args);
    if (blocks.empty()) return;
    const auto* rows = reinterpret_cast<const T*>(args.rows);
    const auto* weight = reinterpret_cast<const T*>(args.weight);
    auto* out = reinterpret_cast<T*>(args.out);

    const int64_t panel_size = (blocks.back().panel_row + blocks.back().num_rows) * args.depth;
    const host::Aligned<Panel> panels(panel_size);
    // Below some 64 thousand elements, packing takes less time than waking a second thread.
    const int num_pack_threads = panel_size < (1 << 16) ? 1 : args.num_threads;
    host::parallel_for(static_cast<int64_t>(blocks.size()), num_pack_threads, [&](int64_t i) {
        const RowBlock& block = blocks[i];
        const T* block_rows[host::kMaxTileRows];
        for (int m = 0; m < block.num_rows; ++m) {
            const int64_t row = block.first_row + m;
            block_rows[m] = rows + (args.row_index ? args.row_index[row] : row) * args.depth;
        }
        form.pack(block_rows, block.num_rows, args.depth, panels.get() + block.panel_row * args.depth);
    });

    std::vector<size_t> first_block;  // of each expert hit, and the end
    for (size_t i = 0; i < blocks.size(); ++i) {
        if (i == 0 || blocks[i].expert != blocks[i - 1].expert) first_block.push_back(i);
    }
    const auto num_hit = static_cast<int64_t>(first_block.size());
    first_block.push_back(blocks.size());
    const int64_t tasks_per_expert = (args.num_outs + form.outs_per_task - 1) / form.outs_per_task;
    host::parallel_for(num_hit * tasks_per_expert, args.num_threads, [&](int64_t task) {
        const int64_t hit = task / tasks_per_expert;
        const int64_t first_out = task % tasks_per_expert * form.outs_per_task;
        const int64_t end_out = std::min(first_out + form.outs_per_task, args.num_outs);
        for (int64_t n = first_out; n < end_out; n += form.outs_per_pass) {
            for (size_t i = first_block[hit]; i < first_block[hit + 1]; ++i) {
                const RowBlock& block = blocks[i];
                form.outs[block.num_rows - 1](
                    panels.get() + block.panel_row * args.depth,
                    weight + block.expert * args.expert_stride + n * args.out_stride, form.row_stride, args.depth,
                    std::min(form.outs_per_pass, end_out - n), out + block.first_row * args.num_outs + n, args.num_outs);
            }
        }
    });
}

template <typename T>
void run_linear(const LinearArgs& args, const std::string& instruction_set) {
    const host::Kernels<T>& kernels = host::kernels<T>(instruction_set);
    if (args.depth_stride == 1) {
        run_form<T, T>(args, {kernels.dot_outs, kernels.dot_pack, 64, 4, args.out_stride});
    } else {
        run_form<float, T>(args, {kernels.outer_outs, kernels.outer_pack, 256, 256, args.depth_stride});
    }
}

void few_rows_linear(
    uintptr_t rows, uintptr_t row_index, uintptr_t weight, uintptr_t out, const std::string& dtype, uintptr_t offsets,
    int64_t num_experts, int64_t max_rows, int64_t depth, int64_t num_outs, int64_t expert_stride, int64_t out_stride,
    int64_t depth_stride, int num_threads, const std::string& instruction_set) {
    PERSEUS_CHECK(
        depth > 0 && num_outs > 0 && num_experts >= 0, "depth and num_outs must be positive, got depth=", depth,
        ", num_outs=", num_outs, ", num_experts=", num_experts, "; skip the call for an empty weight");
    PERSEUS_CHECK(
        depth_stride == 1 || out_stride == 1, "the weight must be contiguous along depth or outputs, got depth_stride=",
        depth_stride, ", out_stride=", out_stride, "; use a GEMM per expert for others");
    PERSEUS_CHECK(num_threads >= 1, "num_threads must be at least 1, got ", num_threads, "; pass torch.get_num_threads()");
    const LinearArgs args{
        .rows = rows,
        .weight = weight,
        .out = out,
        .row_index = reinterpret_cast<const int64_t*>(row_index),
        .offsets = reinterpret_cast<const int64_t*>(offsets),
        .num_experts = num_experts,
        .max_rows = max_rows,
        .depth = depth,
        .num_outs = num_outs,
        .expert_stride = expert_stride,
        .out_stride = out_stride,
        .depth_stride = depth_stride,
        .num_threads = num_threads,
    };
    py::gil_scoped_release release;
    if (dtype == "float32") {
        run_linear<float>(args, instruction_set);
    } else if (dtype == "bfloat16") {
        run_linear<BFloat16>(args, instruction_set);
    } else {
        host::fail("dtype must be float32 or bfloat16, got ", dtype, "; use a GEMM per expert for others");
    }
}

struct CombineArgs {
    uintptr_t rows, weights, out;
    const int64_t* slots;
    int64_t num_tokens, num_choices, width;
    int num_threads;
};

template <typename T, typename Weight>
void run_combine(const CombineArgs& args, const std::string& instruction_set) {
    const auto combine_token = host::kernels<T>(instruction_set).combine_token;
    const auto* rows = reinterpret_cast<const T*>(args.rows);
    const auto* weights = reinterpret_cast<const Weight*>(args.weights);
    auto* out = reinterpret_cast<T*>(args.out);
    constexpr int64_t kTokensPerTask = 16;
    host::parallel_for((args.num_tokens + kTokensPerTask - 1) / kTokensPerTask, args.num_threads, [&](int64_t task) {
        std::vector<float> token_weights(args.num_choices);
        const int64_t end = std::min(args.num_tokens, (task + 1) * kTokensPerTask);
        for (int64_t token = task * kTokensPerTask; token < end; ++token) {
            const int64_t first = token * args.num_choices;
            for (int64_t k = 0; k < args.num_choices; ++k) token_weights[k] = host::widen(weights[first + k]);
            combine_token(
                rows, args.slots + first, token_weights.data(), args.num_choices, args.width, out + token * args.width);
        }
    });
}

void combine(
    uintptr_t rows, uintptr_t slots, uintptr_t weights, uintptr_t out, const std::string& dtype,
    const std::string& weights_dtype, int64_t num_tokens, int64_t num_choices, int64_t width, int num_threads,
    const std::string& instruction_set) {
    PERSEUS_CHECK(num_threads >= 1, "num_threads must be at least 1, got ", num_threads, "; pass torch.get_num_threads()");
    const CombineArgs args{
        .rows = rows,
        .weights = weights,
        .out = out,
        .slots = reinterpret_cast<const int64_t*>(slots),
        .num_tokens = num_tokens,
        .num_choices = num_choices,
        .width = width,
        .num_threads = num_threads,
    };
    py::gil_scoped_release release;
    if (dtype == "float32" && weights_dtype == "float32") {
        run_combine<float, float>(args, instruction_set);
    } else if (dtype == "bfloat16" && weights_dtype == "float32") {
        run_combine<BFloat16, float>(args, instruction_set);
    } else if (dtype == "bfloat16" && weights_dtype == "bfloat16") {
        run_combine<BFloat16, BFloat16>(args, instruction_set);
    } else {
        host::fail(
            "rows must be float32 or bfloat16 and weights float32 or of the rows' dtype, got rows ", dtype, " and weights ",
            weights_dtype, "; cast the weights to float32, sum other rows in torch");
    }
}

py::list instruction_sets() {
    py::list names;
    for (const auto& table : host::usable_kernels<float>()) names.append(table.name);
    return names;
}

}  // namespace

void register_experts(py::module_& m) {
    m.def("instruction_sets", &instruction_sets, "The instruction sets that this CPU runs, best first.");
    m.def(
        "few_rows_linear", &few_rows_linear, py::kw_only{}, py::arg("rows"), py::arg("row_index"), py::arg("weight"),
        py::arg("out"), py::arg("dtype"), py::arg("offsets"), py::arg("num_experts"), py::arg("max_rows"), py::arg("depth"),
        py::arg("num_outs"), py::arg("expert_stride"), py::arg("out_stride"), py::arg("depth_stride"),
        py::arg("num_threads"), py::arg("instruction_set") = "",
        "out[r] = rows[row_index[r]] @ weight[e].T for the rows r of every expert e that has at most max_rows of them.\n\n"
        "rows [., depth] and out [R, num_outs] are dense; row_index int64 [R], or 0 for rows[r]; the R rows are ordered by\n"
        "expert and offsets int64 [num_experts + 1] are the segments; weight [num_experts, num_outs, depth] has its strides in elements and is contiguous along depth\n"
        "or outputs. Sums are in float32, the same bits for any number of threads.");
    m.def(
        "combine", &combine, py::kw_only{}, py::arg("rows"), py::arg("slots"), py::arg("weights"), py::arg("out"),
        py::arg("dtype"), py::arg("weights_dtype"), py::arg("num_tokens"), py::arg("num_choices"), py::arg("width"),
        py::arg("num_threads"), py::arg("instruction_set") = "",
        "out[t] = sum over k, in order and in float32, of weights[t, k] * rows[slots[t, k]]; negative slots are skipped.\n\n"
        "rows [R, width] and out [num_tokens, width] are dense; slots int64 and weights [num_tokens, num_choices].");
}

}  // namespace perseus::api
