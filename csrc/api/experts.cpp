// CpuExperts: the stages of a MoE layer on the CPU, one by one or as a whole, from raw addresses.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "api/api.hpp"
#include "host/aligned.hpp"
#include "host/check.hpp"
#include "host/few_rows.hpp"
#include "host/sort_rows.hpp"

namespace py = pybind11;

namespace perseus::api {
namespace {

using host::BFloat16;
using Strides = std::array<int64_t, 3>;  // of a weight: expert, output feature, input feature; in elements

// Everything that does not change from call to call.
struct Config {
    host::Gate gate;
    int64_t first_expert, num_local, max_rows;
    std::string instruction_set;
};

struct LinearArgs {
    uintptr_t rows, row_index, offsets, weight, out;
    Strides strides;
    int64_t num_outs, depth;
};

struct CombineArgs {
    uintptr_t rows, slots, weights, out;
    bool weights_are_float32;  // else of the rows' type
    int64_t num_tokens, num_choices, width;
};

struct ForwardArgs {
    host::Ids ids;
    LinearArgs gate_up, down;  // of rows, row_index, offsets and out only the rows of gate_up are given: x
    uintptr_t gate_up_bias, down_bias;
    CombineArgs combine;  // rows and slots are not given
};

// The element type is behind this interface, so that Python sees one class.
class Stages {
public:
    virtual ~Stages() = default;
    virtual void linear(const LinearArgs& args, int num_threads) const = 0;
    virtual void activate(
        uintptr_t hidden, uintptr_t active, int64_t num_rows, int64_t width, int num_threads) const = 0;
    virtual void combine(const CombineArgs& args, int num_threads) const = 0;
    virtual bool forward(const ForwardArgs& args, int num_threads) const = 0;
};

template <typename T>
class StagesOf final : public Stages {
public:
    explicit StagesOf(const Config& config) : config_(config), kernels_(host::kernels<T>(config.instruction_set)) {}

    void linear(const LinearArgs& args, int num_threads) const override {
        const auto& [expert_stride, out_stride, depth_stride] = args.strides;
        PERSEUS_CHECK(
            depth_stride == 1 || out_stride == 1,
            "a weight must be contiguous along its input or output features, got strides ", out_stride,
            " (output) and ", depth_stride, " (input); use a GEMM per expert");
        const host::Weight<T> weight{
            elements(args.weight), args.num_outs, args.depth, expert_stride, out_stride, depth_stride};
        host::linear(
            kernels_, elements(args.rows), integers(args.row_index), integers(args.offsets), config_.num_local,
            config_.max_rows, weight, elements(args.out), num_threads);
    }

    void activate(uintptr_t hidden, uintptr_t active, int64_t num_rows, int64_t width, int num_threads) const override {
        host::activate(kernels_, config_.gate, elements(hidden), num_rows, width, elements(active), num_threads);
    }

    void combine(const CombineArgs& args, int num_threads) const override {
        const auto run = [&](const auto* weights) {
            host::combine(
                kernels_, elements(args.rows), integers(args.slots), weights, args.num_tokens, args.num_choices,
                args.width, elements(args.out), num_threads);
        };
        if (args.weights_are_float32) {
            run(reinterpret_cast<const float*>(args.weights));
        } else {
            run(elements(args.weights));
        }
    }

    bool forward(const ForwardArgs& args, int num_threads) const override {
        std::vector<int64_t> storage(host::SortTable::size(args.ids, config_.num_local));
        const host::SortTable table(storage.data(), args.ids, config_.num_local);
        host::sort_rows(args.ids, config_.first_expert, config_.num_local, table);
        for (int64_t expert = 0; expert < config_.num_local; ++expert) {
            if (table.offsets[expert + 1] - table.offsets[expert] > config_.max_rows) return false;
        }
        const int64_t num_rows = table.offsets[config_.num_local];
        LinearArgs gate_up = args.gate_up, down = args.down;
        CombineArgs combine_args = args.combine;
        const host::Aligned<T> hidden(num_rows * gate_up.num_outs);
        const host::Aligned<T> active(num_rows * down.depth);
        const host::Aligned<T> y(num_rows * down.num_outs);
        gate_up.row_index = address(table.tokens);
        gate_up.offsets = down.offsets = address(table.offsets);
        gate_up.out = address(hidden.get());
        down.rows = address(active.get());
        down.out = combine_args.rows = address(y.get());
        combine_args.slots = address(table.slots);

        linear(gate_up, num_threads);
        add_bias(args.gate_up_bias, table, gate_up.num_outs, hidden.get());
        activate(gate_up.out, down.rows, num_rows, down.depth, num_threads);
        linear(down, num_threads);
        add_bias(args.down_bias, table, down.num_outs, y.get());
        combine(combine_args, num_threads);
        return true;
    }

private:
    static T* elements(uintptr_t from) { return reinterpret_cast<T*>(from); }
    static const int64_t* integers(uintptr_t from) { return reinterpret_cast<const int64_t*>(from); }
    static uintptr_t address(const void* of) { return reinterpret_cast<uintptr_t>(of); }

    void add_bias(uintptr_t bias, const host::SortTable& table, int64_t width, T* rows) const {
        if (bias) host::add_bias<T>(elements(bias), table.offsets, config_.num_local, width, rows);
    }

    const Config config_;
    const host::Kernels<T>& kernels_;
};

host::Activation activation_of(const std::string& name) {
    if (name == "silu") return host::Activation::kSilu;
    if (name == "gelu") return host::Activation::kGelu;
    if (name == "gelu_tanh") return host::Activation::kGeluTanh;
    if (name == "clamped_swiglu") return host::Activation::kClampedSwiglu;
    host::fail("activation must be silu, gelu, gelu_tanh or clamped_swiglu, got ", name, "; pass one of these words");
}

std::unique_ptr<Stages> make_stages(
    const std::string& dtype, const std::string& activation, bool interleaved, float alpha, float limit,
    int64_t first_expert, int64_t num_local, int64_t max_rows, const std::string& instruction_set) {
    const Config config{
        {activation_of(activation), interleaved, alpha, limit}, first_expert, num_local, max_rows, instruction_set};
    if (dtype == "float32") return std::make_unique<StagesOf<float>>(config);
    if (dtype == "bfloat16") return std::make_unique<StagesOf<BFloat16>>(config);
    host::fail("dtype must be float32 or bfloat16, got ", dtype, "; use a GEMM per expert for other dtypes");
}

void linear(
    const Stages& self, uintptr_t rows, uintptr_t row_index, uintptr_t offsets, uintptr_t weight,
    const Strides& strides, int64_t num_outs, int64_t depth, uintptr_t out, int num_threads) {
    py::gil_scoped_release release;
    self.linear({rows, row_index, offsets, weight, out, strides, num_outs, depth}, num_threads);
}

void activate(
    const Stages& self, uintptr_t hidden, uintptr_t active, int64_t num_rows, int64_t width, int num_threads) {
    py::gil_scoped_release release;
    self.activate(hidden, active, num_rows, width, num_threads);
}

void combine(
    const Stages& self, uintptr_t rows, uintptr_t slots, uintptr_t weights, bool weights_are_float32, uintptr_t out,
    int64_t num_tokens, int64_t num_choices, int64_t width, int num_threads) {
    py::gil_scoped_release release;
    self.combine({rows, slots, weights, out, weights_are_float32, num_tokens, num_choices, width}, num_threads);
}

bool forward(
    const Stages& self, uintptr_t x, uintptr_t ids, int id_bytes, uintptr_t weights, bool weights_are_float32,
    uintptr_t gate_up, const Strides& gate_up_strides, uintptr_t gate_up_bias, uintptr_t down,
    const Strides& down_strides, uintptr_t down_bias, uintptr_t out, int64_t num_tokens, int64_t num_choices,
    int64_t model_width, int64_t expert_width, int num_threads) {
    const ForwardArgs args{
        .ids = {reinterpret_cast<const void*>(ids), id_bytes, num_tokens, num_choices},
        .gate_up = {x, 0, 0, gate_up, 0, gate_up_strides, 2 * expert_width, model_width},
        .down = {0, 0, 0, down, 0, down_strides, model_width, expert_width},
        .gate_up_bias = gate_up_bias,
        .down_bias = down_bias,
        .combine = {0, 0, weights, out, weights_are_float32, num_tokens, num_choices, model_width},
    };
    py::gil_scoped_release release;
    return self.forward(args, num_threads);
}

py::list instruction_sets() {
    py::list names;
    for (const auto& table : host::usable_kernels<float>()) names.append(table.name);
    return names;
}

}  // namespace

void register_experts(py::module_& m) {
    m.def("instruction_sets", &instruction_sets, "The instruction sets that this CPU runs, best first.");
    py::class_<Stages>(
        m, "CpuExperts",
        R"(The stages of a MoE layer on the CPU for experts with at most max_rows rows: linear, activate, combine; or
all of them in one call, forward.

Tensors are dense unless strides are passed, and float32 or bfloat16, the same in one object. Sums are in float32, and
the numbers do not depend on num_threads.)")
        .def(
            py::init(&make_stages), py::kw_only{}, py::arg("dtype"), py::arg("activation"), py::arg("interleaved"),
            py::arg("alpha"), py::arg("limit"), py::arg("first_expert"), py::arg("num_local"), py::arg("max_rows"),
            py::arg("instruction_set") = "", "instruction_set: one of instruction_sets(), or '' for the best.")
        .def(
            "linear", &linear, py::kw_only{}, py::arg("rows"), py::arg("row_index"), py::arg("offsets"),
            py::arg("weight"), py::arg("strides"), py::arg("num_outs"), py::arg("depth"), py::arg("out"),
            py::arg("num_threads"),
            R"(out[r] = rows[row_index[r]] @ weight[e].T for the rows r of every expert e with at most max_rows of them.

rows [., depth] and out [R, num_outs]; row_index int64 [R], or 0 for rows[r]; the R rows are ordered by expert and
offsets int64 [num_local + 1] are the segments; weight [num_local, num_outs, depth] has its strides in elements and is
contiguous along depth or outputs.)")
        .def(
            "activate", &activate, py::kw_only{}, py::arg("hidden"), py::arg("active"), py::arg("num_rows"),
            py::arg("width"), py::arg("num_threads"),
            "active [num_rows, width] from the gate and up halves of hidden [num_rows, 2 * width], rounded once.")
        .def(
            "combine", &combine, py::kw_only{}, py::arg("rows"), py::arg("slots"), py::arg("weights"),
            py::arg("weights_are_float32"), py::arg("out"), py::arg("num_tokens"), py::arg("num_choices"),
            py::arg("width"), py::arg("num_threads"),
            R"(out[t] = sum over k, in order and in float32, of weights[t, k] * rows[slots[t, k]].

Negative slots are skipped. rows [R, width], out [num_tokens, width], slots int64 and weights [num_tokens, num_choices]; weights 0 means all 1.)")
        .def(
            "forward", &forward, py::kw_only{}, py::arg("x"), py::arg("ids"), py::arg("id_bytes"), py::arg("weights"),
            py::arg("weights_are_float32"), py::arg("gate_up"), py::arg("gate_up_strides"), py::arg("gate_up_bias"),
            py::arg("down"), py::arg("down_strides"), py::arg("down_bias"), py::arg("out"), py::arg("num_tokens"),
            py::arg("num_choices"), py::arg("model_width"), py::arg("expert_width"), py::arg("num_threads"),
            R"(The whole layer after its router, with the weights on the output. False, and out is not written, if an
expert has more than max_rows rows. A bias of 0 is none.)");
}

}  // namespace perseus::api
