// Which inner loops does this CPU run? One table per instruction set and element type; the best is chosen at run time.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "host/check.hpp"

namespace perseus::host {

struct BFloat16 {
    uint16_t bits;  // the upper half of a float
};

inline float widen(float value) { return value; }
inline float widen(BFloat16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof(wide));
    return wide;
}

// Rounds to nearest, ties to even; a NaN stays a NaN.
inline void narrow(float* to, float value) { *to = value; }
inline void narrow(BFloat16* to, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to->bits = is_nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

constexpr int kMaxTileRows = 8;

enum class Activation { kSilu, kGelu, kGeluTanh, kClampedSwiglu };
constexpr int kNumActivations = 4;

// out[m][n] = sum over depth of row m times weight n: (panel, weight, ldw, depth, num_outs, out, ldo).
template <typename Panel, typename T>
using OutsFn = void (*)(const Panel*, const T*, int64_t, int64_t, int64_t, T*, int64_t);
// (one pointer per row, num_rows, depth, panel)
template <typename Panel, typename T>
using PackFn = void (*)(const T* const*, int64_t, int64_t, Panel*);

template <typename T>
struct Kernels {
    const char* name;
    OutsFn<T, T> dot_outs[kMaxTileRows];  // [rows - 1]
    PackFn<T, T> dot_pack;
    OutsFn<float, T> outer_outs[kMaxTileRows];  // [rows - 1]
    PackFn<float, T> outer_pack;
    // [activation][interleaved]: (hidden, width, alpha, limit, active)
    void (*activate_row[kNumActivations][2])(const T*, int64_t, float, float, T*);
    // (rows, slots, weights, num_choices, width, out)
    void (*combine_token)(const T*, const int64_t*, const float*, int64_t, int64_t, T*);
};

#define PERSEUS_TARGET
#define PERSEUS_LANES 4
#define PERSEUS_BF16_DOT 0
namespace baseline {
#include "host/isa_kernels.hpp"
}  // namespace baseline
#undef PERSEUS_TARGET
#undef PERSEUS_LANES

#if defined(__x86_64__)
#define PERSEUS_TARGET __attribute__((target("avx2,fma")))
#define PERSEUS_LANES 8
namespace avx2 {
#include "host/isa_kernels.hpp"
}  // namespace avx2
#undef PERSEUS_TARGET
#undef PERSEUS_LANES

#define PERSEUS_TARGET __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))
#define PERSEUS_LANES 16
namespace avx512 {
#include "host/isa_kernels.hpp"
}  // namespace avx512
#undef PERSEUS_TARGET
#undef PERSEUS_BF16_DOT

#define PERSEUS_TARGET __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define PERSEUS_BF16_DOT 1
namespace avx512_bf16 {
#include "host/isa_kernels.hpp"
}  // namespace avx512_bf16
#undef PERSEUS_TARGET
#undef PERSEUS_LANES
#endif
#undef PERSEUS_BF16_DOT

// The tables that this CPU can run, best first.
template <typename T>
const std::vector<Kernels<T>>& usable_kernels() {
    static const std::vector<Kernels<T>> tables = [] {
        std::vector<Kernels<T>> usable;
#if defined(__x86_64__)
        const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
        if (has_avx512 && __builtin_cpu_supports("avx512bf16")) {
            usable.push_back(avx512_bf16::make_kernels<T>("avx512_bf16"));
        }
        if (has_avx512) usable.push_back(avx512::make_kernels<T>("avx512"));
        if (has_avx2) usable.push_back(avx2::make_kernels<T>("avx2"));
#endif
        usable.push_back(baseline::make_kernels<T>("baseline"));
        return usable;
    }();
    return tables;
}

// The table of that name; an empty name is the best one.
template <typename T>
const Kernels<T>& kernels(const std::string& name) {
    const std::vector<Kernels<T>>& tables = usable_kernels<T>();
    if (name.empty()) return tables.front();
    std::string names;
    for (const Kernels<T>& table : tables) {
        if (name == table.name) return table;
        names += (names.empty() ? "" : ", ") + std::string(table.name);
    }
    fail("instruction_set must be one that this CPU runs (", names, "), got ", name, "; pass '' for the best one");
}

}  // namespace perseus::host
