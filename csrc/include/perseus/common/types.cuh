// Which integer names and function qualifiers does every other header use? Compiles with NVRTC, nvcc and a host
// compiler alike, and therefore includes no system header.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define PERSEUS_HD __host__ __device__ __forceinline__
#define PERSEUS_D __device__ __forceinline__
#else
#define PERSEUS_HD inline
#endif

namespace perseus {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
using i64 = long long;

static_assert(sizeof(u32) == 4 && sizeof(u64) == 8, "perseus headers assume LP64 or LLP64 integer sizes");

template <typename T>
PERSEUS_HD constexpr T ceil_div(T value, T divisor) {
    return (value + divisor - 1) / divisor;
}

template <typename T>
PERSEUS_HD constexpr T round_up(T value, T multiple) {
    return ceil_div(value, multiple) * multiple;
}

template <typename T>
PERSEUS_HD constexpr T smaller(T a, T b) {
    return a < b ? a : b;
}

template <typename T>
PERSEUS_HD constexpr T larger(T a, T b) {
    return a > b ? a : b;
}

}  // namespace perseus
