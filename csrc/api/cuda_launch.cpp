// KernelLauncher and ControlBlocks: launches of CUDA kernels through the driver, from raw addresses.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "api/api.hpp"
#include "host/cuda_driver.hpp"
#include "host/kernel_launcher.hpp"

namespace py = pybind11;

namespace perseus::api {
namespace {

using PatchTuple = std::tuple<size_t, size_t, uint64_t>;  // byte in the parameters, base, offset
using MapTuple =  // base, offset, sizes, strides in bytes, box
    std::tuple<size_t, uint64_t, std::vector<uint64_t>, std::vector<uint64_t>, std::vector<uint32_t>>;

std::unique_ptr<host::KernelLauncher> make_launcher(
    uintptr_t function, uintptr_t context, const py::bytes& params, const std::vector<PatchTuple>& patches,
    const std::vector<MapTuple>& tensor_maps, size_t num_addresses, uint32_t grid, uint32_t threads,
    uint32_t shared_bytes, std::shared_ptr<host::ControlBlocks> control, const std::string& driver) {
    host::LauncherConfig config{
        .function = reinterpret_cast<void*>(function),
        .context = reinterpret_cast<void*>(context),
        .params = params,
        .patches = {},
        .maps = {},
        .num_addresses = num_addresses,
        .grid = grid,
        .threads = threads,
        .shared_bytes = shared_bytes,
    };
    for (const auto& [at, base, offset] : patches) config.patches.push_back({at, {base, offset}});
    for (const auto& [base, offset, sizes, strides, box] : tensor_maps) {
        config.maps.push_back({{base, offset}, {sizes, strides, box}});
    }
    return std::make_unique<host::KernelLauncher>(std::move(config), std::move(control), driver);
}

bool launch(host::KernelLauncher& self, uintptr_t stream, const py::args& addresses) {
    std::array<uintptr_t, host::KernelLauncher::kMaxAddresses> values;
    const size_t count = addresses.size();
    for (size_t i = 0; i < count && i < values.size(); ++i) values[i] = addresses[i].cast<uintptr_t>();
    py::gil_scoped_release release;  // a launch waits while the stream's queue is full
    return self.launch(stream, std::span(values.data(), count));
}

void translate(std::exception_ptr thrown) {
    try {
        if (thrown) std::rethrow_exception(thrown);
    } catch (const host::DriverError& error) {
        py::set_error(py::module_::import("perseus_compile.errors").attr("LaunchError"), error.what());
    }
}

}  // namespace

void register_cuda_launch(py::module_& m) {
    py::register_local_exception_translator(&translate);
    py::class_<host::ControlBlocks, std::shared_ptr<host::ControlBlocks>>(
        m, "ControlBlocks",
        R"(Which block of control words does a launch use? One per stream, and one per stream and graph capture.

words: device address of `capacity` blocks of zeros, stride_bytes apart. error: host address of a record whose first u32
is not 0 once a kernel has written it. driver: the library of the CUDA driver. Errors of the driver are LaunchError.)")
        .def(
            py::init<uintptr_t, size_t, size_t, uintptr_t, const std::string&>(), py::kw_only{}, py::arg("words"),
            py::arg("stride_bytes"), py::arg("capacity"), py::arg("error"), py::arg("driver"))
        .def_property_readonly("num_used", &host::ControlBlocks::num_used)
        .def_property_readonly("expired", &host::ControlBlocks::expired, "Whether the error record is written.")
        .def(
            "address", &host::ControlBlocks::address, py::arg("stream"), py::call_guard<py::gil_scoped_release>(),
            "Device address of the block for the next launch on a stream.");
    py::class_<host::KernelLauncher>(
        m, "KernelLauncher",
        R"(One call site of a CUDA kernel: launches it with the addresses that change from call to call.

function, context: the driver's handles. params: bytes of the first kernel parameter; tensor maps of BF16 tensors
(128-byte swizzle) are the parameters after it. Addresses are given as (base, offset in bytes): the bases are the
num_addresses addresses of a launch, then the control block of its stream (num_addresses), then zero
(num_addresses + 1).
patches: (byte of params, base, offset); an address is written there at every launch.
tensor_maps: (base, offset, sizes, strides in bytes, box), innermost axis first; encoded again when the address changes.
Threads may launch at the same time. Errors of the driver are LaunchError.)")
        .def(
            py::init(&make_launcher), py::kw_only{}, py::arg("function"), py::arg("context"), py::arg("params"),
            py::arg("patches"), py::arg("tensor_maps"), py::arg("num_addresses"), py::arg("grid"), py::arg("threads"),
            py::arg("shared_bytes"), py::arg("control") = py::none(), py::arg("driver"))
        .def(
            "launch", &launch, py::arg("stream"),
            R"(launch(stream, *addresses) -> whether it was launched.

False: an earlier launch left a record of an expired deadline in the control blocks; nothing was launched.)");
}

}  // namespace perseus::api
