// How does host code reach the CUDA driver? Its library is opened when it is first asked for; no CUDA header is needed.
#pragma once

#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/check.hpp"

namespace perseus::host {

// A call of the driver that failed; the text says what was tried. LaunchError in Python.
class DriverError : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

// CUtensorMap
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

// Sizes, strides and box of a BF16 tensor map, innermost axis first.
struct TensorMapShape {
    std::vector<uint64_t> sizes;          // elements per axis
    std::vector<uint64_t> strides_bytes;  // of all axes but the innermost, multiples of 16
    std::vector<uint32_t> box;            // elements per axis that one load brings
};

// CUlaunchConfig
struct LaunchConfig {
    std::array<uint32_t, 3> grid, block;
    uint32_t shared_bytes;
    void* stream;
    void* attributes;
    uint32_t num_attributes;
};

class Driver {
public:
    explicit Driver(const std::string& library) : handle_(dlopen(library.c_str(), RTLD_NOW)) {
        if (!handle_) {
            throw DriverError(
                "the CUDA driver library " + library + " must be loadable, got " + dlerror() +
                "; install a driver or run on CPU");
        }
        find("cuGetErrorString", error_string_);
        find("cuCtxGetCurrent", get_context_);
        find("cuCtxSetCurrent", set_context_);
        find("cuStreamGetCaptureInfo_v2", capture_info_);
        find("cuTensorMapEncodeTiled", encode_tensor_map_);
        find("cuLaunchKernelEx", launch_);
    }

    // The one of a library, kept until the process ends.
    static const Driver& of(const std::string& library) {
        static std::mutex mutex;
        static auto& drivers = *new std::map<std::string, Driver>;  // never destroyed: other threads may be launching
        const std::lock_guard lock(mutex);
        return drivers.try_emplace(library, library).first->second;
    }

    // A thread that has not used the device yet has no current context.
    void use_context(void* context) const {
        void* current = nullptr;
        check(get_context_(&current), "asking for the current context");
        if (!current) check(set_context_(context), "making the context of a kernel current");
    }

    // Number of the graph capture that a stream is in, unique in the process; 0: it is in none.
    uint64_t capture_id(void* stream) const {
        constexpr int kActive = 1;  // CU_STREAM_CAPTURE_STATUS_ACTIVE
        int status = 0;
        uint64_t id = 0;
        check(
            capture_info_(stream, &status, &id, nullptr, nullptr, nullptr),
            "asking whether a stream is being captured");
        return status == kActive ? id : 0;
    }

    // Map of a tensor at an address that is a multiple of 16: 128-byte swizzle, zeros outside.
    TensorMap encode(const TensorMapShape& shape, uintptr_t address) const {
        constexpr int kBF16 = 9;         // CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
        constexpr int kSwizzle128B = 3;  // CU_TENSOR_MAP_SWIZZLE_128B
        constexpr int kPromote128B = 2;  // 256 cost 2-3 % of the read rate of streamed weights (docs/measured.md)
        const std::vector<uint32_t> element_strides(shape.sizes.size(), 1);
        TensorMap map{};
        const int result = encode_tensor_map_(
            &map, kBF16, static_cast<uint32_t>(shape.sizes.size()), reinterpret_cast<void*>(address),
            shape.sizes.data(), shape.strides_bytes.data(), shape.box.data(), element_strides.data(), 0, kSwizzle128B,
            kPromote128B, 0);
        check(
            result, "encoding a tensor map with sizes=", list(shape.sizes), ", strides=", list(shape.strides_bytes),
            ", box=", list(shape.box));
        return map;
    }

    void launch(const LaunchConfig& config, void* function, void** arguments) const {
        check(
            launch_(&config, function, arguments, nullptr), "launching ", config.grid[0], " CTAs of ", config.block[0],
            " threads with ", config.shared_bytes, " bytes of shared memory");
    }

private:
    template <typename Function>
    void find(const char* name, Function*& function) {
        function = reinterpret_cast<Function*>(dlsym(handle_, name));
        if (!function) {
            throw DriverError(
                std::string("the CUDA driver must have ") + name + ", got a library without it; " +
                "install the NVIDIA driver of CUDA 12 or later");
        }
    }

    template <typename... Parts>
    void check(int result, const Parts&... what) const {
        if (result == 0) return;
        const char* reason = nullptr;
        error_string_(result, &reason);
        throw DriverError(
            (text_of(what) + ...) + " must succeed, got CUDA error " + text_of(result) + " (" +
            (reason ? reason : "unknown error") +
            "); look for the first CUDA error of this process: CUDA_LAUNCH_BLOCKING=1 names the call it comes from");
    }

    template <typename Number>
    static std::string list(const std::vector<Number>& numbers) {
        std::string text;
        for (const Number number : numbers) text += (text.empty() ? "[" : ", ") + text_of(number);
        return text + "]";
    }

    void* handle_;
    int (*error_string_)(int result, const char** text);
    int (*get_context_)(void** context);
    int (*set_context_)(void* context);
    int (*capture_info_)(
        void* stream, int* status, uint64_t* id, void** graph, const void*** dependencies, size_t* num_dependencies);
    int (*encode_tensor_map_)(
        TensorMap* map, int dtype, uint32_t rank, void* address, const uint64_t* sizes, const uint64_t* strides,
        const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle, int l2_promotion, int fill);
    int (*launch_)(const LaunchConfig* config, void* function, void** arguments, void** extra);
};

}  // namespace perseus::host
