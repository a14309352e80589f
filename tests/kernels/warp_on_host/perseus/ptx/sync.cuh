// What does device code of one warp need to run on a host? 32 threads and a barrier; instead of perseus/ptx/sync.cuh.
#pragma once

#include <barrier>
#include <cmath>
#include <cstring>

#include "perseus/common/types.cuh"

#define PERSEUS_D inline
#define __noinline__
#define __device__

struct ThreadIndex {
    unsigned x;
};
inline thread_local ThreadIndex threadIdx;

namespace perseus::host {

// Values that the lanes show each other; every exchange starts and ends with all 32.
inline std::barrier<> lanes(32);
inline float shown_floats[32];
inline u32 shown_words[32];

template <typename T, typename Read>
T exchange(T (&shown)[32], T value, Read read) {
    shown[threadIdx.x] = value;
    lanes.arrive_and_wait();
    const T result = read();
    lanes.arrive_and_wait();
    return result;
}

}  // namespace perseus::host

inline float __shfl_sync(unsigned, float value, unsigned lane) {
    namespace host = perseus::host;
    return host::exchange(host::shown_floats, value, [&] { return host::shown_floats[lane]; });
}

inline float __shfl_xor_sync(unsigned mask, float value, unsigned distance) {
    return __shfl_sync(mask, value, threadIdx.x ^ distance);
}

inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    namespace host = perseus::host;
    return host::exchange(host::shown_words, value, [] {
        unsigned best = 0;
        for (unsigned other : host::shown_words) best = other > best ? other : best;
        return best;
    });
}

inline unsigned __reduce_min_sync(unsigned mask, unsigned value) { return ~__reduce_max_sync(mask, ~value); }

inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

template <typename T>
T __ldcg(const T* address) {
    return *address;
}

template <typename T>
T __ldg(const T* address) {
    return *address;
}

namespace perseus::ptx {

inline u32 pack_bf16(float low, float) {  // rounds to nearest, ties to even; the low half only
    const u32 bits = __float_as_uint(low);
    return low == low ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fff;
}
inline float bf16_low(u32 packed) { return __uint_as_float(packed << 16); }
inline float bf16_value(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }

}  // namespace perseus::ptx
