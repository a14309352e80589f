// Which inner loops does this CPU run? One table per instruction set and element type, chosen once at run time.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

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

inline void narrow(float* to, float value) { *to = value; }
inline void narrow(BFloat16* to, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to->bits = is_nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

constexpr int kMaxTileRows = 8;

template <typename T>
struct Kernels {
    // [rows - 1]: (panel, weight, ldw, depth, num_outs, out, ldo)
    void (*tile[kMaxTileRows])(const T*, const T*, int64_t, int64_t, int64_t, T*, int64_t);
    // (rows, num_rows, depth, panel)
    void (*pack_rows)(const T*, int64_t, int64_t, T*);
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

template <typename T>
const Kernels<T>& best_kernels() {
#if defined(__x86_64__)
    static const Kernels<T> kernels = [] {
        const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
        if (has_avx512 && __builtin_cpu_supports("avx512bf16")) return avx512_bf16::make_kernels<T>();
        if (has_avx512) return avx512::make_kernels<T>();
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::make_kernels<T>();
        return baseline::make_kernels<T>();
    }();
#else
    static const Kernels<T> kernels = baseline::make_kernels<T>();
#endif
    return kernels;
}

}  // namespace perseus::host
