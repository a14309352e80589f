// How does host code use wide registers? Vectors of kLanes floats as a compiler extension: g++ and clang++ map them to
// AVX-512, AVX2 or whatever the target function allows, and split them where a register is narrower.
#pragma once

#include <cstdint>
#include <cstring>

#define PERSEUS_INLINE inline __attribute__((always_inline))

namespace perseus::host {

struct BFloat16 {
    uint16_t bits;
};

template <int kLanes>
struct Simd {
    typedef float Floats __attribute__((vector_size(kLanes * 4)));
    typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
    typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

    static PERSEUS_INLINE Floats load(const float* from) {
        Floats value;
        std::memcpy(&value, from, sizeof(value));
        return value;
    }
    // bfloat16 is the upper half of a float.
    static PERSEUS_INLINE Floats load(const BFloat16* from) {
        Halves halves;
        std::memcpy(&halves, from, sizeof(halves));
        return (Floats)(__builtin_convertvector(halves, Words) << 16);
    }
};

// Sum of all lanes, halves first: the order depends on the lane count only.
template <int kLanes>
PERSEUS_INLINE float sum_lanes(typename Simd<kLanes>::Floats value) {
    if constexpr (kLanes == 1) {
        return value[0];
    } else {
        typename Simd<kLanes / 2>::Floats low, high;
        std::memcpy(&low, &value, sizeof(low));
        std::memcpy(&high, reinterpret_cast<const char*>(&value) + sizeof(low), sizeof(high));
        return sum_lanes<kLanes / 2>(low + high);
    }
}

PERSEUS_INLINE void store(float* to, float value) { *to = value; }

// Rounds to nearest, ties to even; a NaN stays a NaN.
PERSEUS_INLINE void store(BFloat16* to, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to->bits = is_nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

PERSEUS_INLINE float widen(float value) { return value; }
PERSEUS_INLINE float widen(BFloat16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof(wide));
    return wide;
}

}  // namespace perseus::host
