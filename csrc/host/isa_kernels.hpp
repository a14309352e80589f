// The inner loops of the CPU path for one instruction set: linear maps of few rows, and the weighted combine.
//
// No include guard: host/dispatch.hpp includes this file once per instruction set, each time inside another namespace,
// and picks one of the resulting tables at run time. It sets
//   PERSEUS_TARGET    the attribute that lets a function use the instruction set; every function here carries it,
//   PERSEUS_LANES     floats per vector register,
//   PERSEUS_BF16_DOT  1 where pairs of bfloat16 are multiplied and added in one instruction.
//
// Vectors are compiler extensions of g++ and clang++. A bfloat16 is the upper half of a float, so one 32-bit word of
// two bfloat16 becomes two floats by a shift and a mask.

#define PERSEUS_INLINE PERSEUS_TARGET inline __attribute__((always_inline))

constexpr int kLanes = PERSEUS_LANES;

typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));
typedef float Quad __attribute__((vector_size(4 * sizeof(float))));
typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));

PERSEUS_INLINE float sum_lanes(Floats value) {
    Quad quads[kLanes / 4];
    std::memcpy(quads, &value, sizeof(value));
    Quad sum = quads[0];
#pragma GCC unroll 4
    for (int i = 1; i < kLanes / 4; ++i) sum += quads[i];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// Rounds to bfloat16, ties to even; a NaN stays a NaN. The result is in the upper half of each word.
PERSEUS_INLINE Words round_to_upper_half(Floats value) {
    const Words bits = (Words)value;
    const Words rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const Words is_nan = (Words)((bits & 0x7fffffffu) > 0x7f800000u);
    return ((rounded & ~is_nan) | (is_nan & 0x7fc00000u)) & 0xffff0000u;
}

// One register of elements, as floats.
template <typename T>
struct Pack;

template <>
struct Pack<float> {
    static constexpr int kCount = kLanes;
    Floats all;

    PERSEUS_INLINE void load(const float* from) { std::memcpy(&all, from, sizeof(all)); }
    PERSEUS_INLINE void store(float* to) const { std::memcpy(to, &all, sizeof(all)); }
    PERSEUS_INLINE void clear() { all = Floats{}; }
    PERSEUS_INLINE void add_scaled(const Pack& other, float scale) { all += other.all * scale; }
    PERSEUS_INLINE static void dot(Floats& sum, const Pack& a, const Pack& b) { sum += a.all * b.all; }
};

template <>
struct Pack<BFloat16> {
    static constexpr int kCount = 2 * kLanes;
    Floats even, odd;

    PERSEUS_INLINE void load(const BFloat16* from) {
        Words words;
        std::memcpy(&words, from, sizeof(words));
        even = (Floats)(words << 16);
        odd = (Floats)(words & 0xffff0000u);
    }
    PERSEUS_INLINE void store(BFloat16* to) const {
        const Words words = (round_to_upper_half(even) >> 16) | round_to_upper_half(odd);
        std::memcpy(to, &words, sizeof(words));
    }
    PERSEUS_INLINE void clear() { even = odd = Floats{}; }
    PERSEUS_INLINE void add_scaled(const Pack& other, float scale) {
        even += other.even * scale;
        odd += other.odd * scale;
    }
    PERSEUS_INLINE static void dot(Floats& sum, const Pack& a, const Pack& b) {
        sum += a.even * b.even;
        sum += a.odd * b.odd;
    }
};

// What dot products load.
template <typename T>
struct DotPack {
    using Type = Pack<T>;
};
#if PERSEUS_BF16_DOT
struct Bf16Pairs {
    static constexpr int kCount = 2 * kLanes;
    __m512bh all;

    PERSEUS_INLINE void load(const BFloat16* from) { std::memcpy(&all, from, sizeof(all)); }
    PERSEUS_INLINE static void dot(Floats& sum, const Bf16Pairs& a, const Bf16Pairs& b) {
        sum = _mm512_dpbf16_ps(sum, a.all, b.all);
    }
};
template <>
struct DotPack<BFloat16> {
    using Type = Bf16Pairs;
};
#endif
template <typename T>
using Dot = typename DotPack<T>::Type;

// ---- Weights contiguous along depth: every output is a dot product -------------------------------------------------

// The rows are packed into a panel that a tile reads front to back: [depth / step][row][step], then [row][rest].
// Rows a power of two apart would otherwise fall into the same few cache sets.
template <typename T>
PERSEUS_INLINE int64_t dot_panel_index(int64_t num_rows, int64_t depth, int64_t row, int64_t k) {
    const int64_t first = k / Dot<T>::kCount * Dot<T>::kCount;
    const int64_t count = depth - first < Dot<T>::kCount ? depth - first : Dot<T>::kCount;
    return first * num_rows + row * count + (k - first);
}

template <typename T>
PERSEUS_TARGET void dot_pack(const T* const* rows, int64_t num_rows, int64_t depth, T* panel) {
    for (int64_t k = 0; k < depth; k += Dot<T>::kCount) {
        const int64_t count = depth - k < Dot<T>::kCount ? depth - k : Dot<T>::kCount;
        for (int64_t m = 0; m < num_rows; ++m) {
            std::memcpy(panel + dot_panel_index<T>(num_rows, depth, m, k), rows[m] + k, count * sizeof(T));
        }
    }
}

// One step along depth of a tile: kRows rows times kOuts weight rows.
template <typename T, int kRows, int kOuts>
PERSEUS_INLINE void dot_step(const T* panel_step, const T* weight_step, int64_t ldw, Floats (&sums)[kRows][kOuts]) {
    // About one memory latency at full bandwidth.
    constexpr int kPrefetchBytes = 8192;
    Dot<T> weights[kOuts];
#pragma GCC unroll 2
    for (int n = 0; n < kOuts; ++n) {
        weights[n].load(weight_step + n * ldw);
        __builtin_prefetch(reinterpret_cast<const char*>(weight_step + n * ldw) + kPrefetchBytes);
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
        Dot<T> row;
        row.load(panel_step + m * Dot<T>::kCount);
#pragma GCC unroll 2
        for (int n = 0; n < kOuts; ++n) Dot<T>::dot(sums[m][n], row, weights[n]);
    }
}

// kRows rows times kOuts weight rows. kChains independent sums per output hide the latency of the adds.
//   weight: [kOuts, depth], row stride ldw.  out: [kRows, kOuts], row stride ldo.
template <typename T, int kRows, int kOuts, int kChains>
PERSEUS_INLINE void dot_tile(const T* panel, const T* weight, int64_t ldw, int64_t depth, T* out, int64_t ldo) {
    constexpr int kStep = Dot<T>::kCount;
    Floats sums[kChains][kRows][kOuts] = {};
    int64_t k = 0;
    while (k + kStep * kChains <= depth) {
#pragma GCC unroll 2
        for (int chain = 0; chain < kChains; ++chain, k += kStep) {
            dot_step<T, kRows, kOuts>(panel + k * kRows, weight + k, ldw, sums[chain]);
        }
    }
    for (; k + kStep <= depth; k += kStep) {
        dot_step<T, kRows, kOuts>(panel + k * kRows, weight + k, ldw, sums[0]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 2
        for (int n = 0; n < kOuts; ++n) {
            Floats total = sums[0][m][n];
            for (int chain = 1; chain < kChains; ++chain) total += sums[chain][m][n];
            float sum = sum_lanes(total);
            for (int64_t i = k; i < depth; ++i) {
                sum += widen(panel[dot_panel_index<T>(kRows, depth, m, i)]) * widen(weight[n * ldw + i]);
            }
            narrow(out + m * ldo + n, sum);
        }
    }
}

template <typename T, int kRows>
PERSEUS_TARGET void dot_outs(
    const T* panel, const T* weight, int64_t ldw, int64_t depth, int64_t num_outs, T* out, int64_t ldo) {
    // One weight row at a time keeps the weights one sequential stream, which runs at 85-100 % of a plain read up to
    // 6 rows; from there on the panel is read too often and two weight rows share it. (bfloat16 and float32, depths 512
    // and 1024, EPYC 9005 with AVX-512, one core, measured 2026-11-30)
    constexpr int kOuts = kRows <= 6 ? 1 : 2;
    constexpr int kChains = kRows == 1 ? 2 : 1;
    int64_t n = 0;
    for (; n + kOuts <= num_outs; n += kOuts) {
        dot_tile<T, kRows, kOuts, kChains>(panel, weight + n * ldw, ldw, depth, out + n, ldo);
    }
    for (; n < num_outs; ++n) dot_tile<T, kRows, 1, 1>(panel, weight + n * ldw, ldw, depth, out + n, ldo);
}

// ---- Weights contiguous along the outputs: the outputs are a sum of outer products ---------------------------------

// The rows as floats, transposed: [depth][row].
template <typename T>
PERSEUS_TARGET void outer_pack(const T* const* rows, int64_t num_rows, int64_t depth, float* panel) {
    for (int64_t k = 0; k < depth; ++k) {
        for (int64_t m = 0; m < num_rows; ++m) panel[k * num_rows + m] = widen(rows[m][k]);
    }
}

// kRows rows times kPacks registers of neighbouring outputs.
//   weight: [depth, outputs], row stride ldw.  out: [kRows, outputs], row stride ldo.
template <typename T, int kRows, int kPacks>
PERSEUS_INLINE void outer_tile(const float* panel, const T* weight, int64_t ldw, int64_t depth, T* out, int64_t ldo) {
    constexpr int kPrefetchDepths = 32;
    Pack<T> sums[kRows][kPacks];
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
        for (int n = 0; n < kPacks; ++n) sums[m][n].clear();
    }
    for (int64_t k = 0; k < depth; ++k) {
        Pack<T> weights[kPacks];
#pragma GCC unroll 8
        for (int n = 0; n < kPacks; ++n) {
            weights[n].load(weight + k * ldw + n * Pack<T>::kCount);
            __builtin_prefetch(weight + (k + kPrefetchDepths) * ldw + n * Pack<T>::kCount);
        }
#pragma GCC unroll 8
        for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
            for (int n = 0; n < kPacks; ++n) sums[m][n].add_scaled(weights[n], panel[k * kRows + m]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
        for (int n = 0; n < kPacks; ++n) sums[m][n].store(out + m * ldo + n * Pack<T>::kCount);
    }
}

template <typename T, int kRows>
PERSEUS_TARGET void outer_outs(
    const float* panel, const T* weight, int64_t ldw, int64_t depth, int64_t num_outs, T* out, int64_t ldo) {
    // As many outputs as the registers hold sums of (at most 24 of 32), so that each weight row is read in long runs.
    constexpr int kSumsPerPack = kRows * sizeof(Pack<T>) / sizeof(Floats);
    constexpr int kPacks = kSumsPerPack <= 2 ? 8 : kSumsPerPack <= 5 ? 4 : kSumsPerPack <= 11 ? 2 : 1;
    constexpr int64_t kWide = kPacks * Pack<T>::kCount;
    int64_t n = 0;
    for (; n + kWide <= num_outs; n += kWide) {
        outer_tile<T, kRows, kPacks>(panel, weight + n, ldw, depth, out + n, ldo);
    }
    for (; n + Pack<T>::kCount <= num_outs; n += Pack<T>::kCount) {
        outer_tile<T, kRows, 1>(panel, weight + n, ldw, depth, out + n, ldo);
    }
    for (; n < num_outs; ++n) {
        for (int m = 0; m < kRows; ++m) {
            float sum = 0;
            for (int64_t k = 0; k < depth; ++k) sum += panel[k * kRows + m] * widen(weight[k * ldw + n]);
            narrow(out + m * ldo + n, sum);
        }
    }
}

// ---- Between the two linear maps -----------------------------------------------------------------------------------

// To 2 units in the last place; overflows to infinity, and below -87.3 stays at the smallest normal number.
PERSEUS_INLINE Floats exponential(Floats x) {
    constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
    x = x > 88.8f ? Floats{} + 88.8f : x;
    x = x < -87.3f ? Floats{} - 87.3f : x;
    const Floats shifted = x * kLog2E + kRound;
    const Floats power = shifted - kRound;
    const Floats rest = (x - power * kLn2High) - power * kLn2Low;
    // Cephes, expf.
    Floats sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    return sum * (Floats)(((Words)shifted << 23) + 0x3f800000u);  // times 2^power
}

PERSEUS_INLINE Floats times_sigmoid(Floats x, Floats of) { return x / (exponential(-of) + 1.0f); }

// Abramowitz and Stegun 7.1.26, within 1.5e-7, for x >= 0.
PERSEUS_INLINE Floats error_function(Floats x) {
    const Floats t = 1.0f / (x * 0.3275911f + 1.0f);
    Floats sum = t * 1.061405429f - 1.453152027f;
    sum = sum * t + 1.421413741f;
    sum = sum * t - 0.284496736f;
    sum = sum * t + 0.254829592f;
    return 1.0f - sum * t * exponential(-x * x);
}

template <Activation kActivation>
PERSEUS_INLINE Floats gated(Floats gate, Floats up, float alpha, float limit) {
    if constexpr (kActivation == Activation::kSilu) {
        return times_sigmoid(gate, gate) * up;
    } else if constexpr (kActivation == Activation::kGelu) {
        const Floats magnitude = (Floats)((Words)gate & 0x7fffffffu) * 0.70710678f;
        const Floats erf = error_function(magnitude);
        return gate * 0.5f * (gate < 0.0f ? 1.0f - erf : 1.0f + erf) * up;
    } else if constexpr (kActivation == Activation::kGeluTanh) {
        // 0.5 * (1 + tanh(u)) is sigmoid(2u).
        const Floats twice = (gate + gate * gate * gate * 0.044715f) * 1.59576912f;
        return times_sigmoid(gate, twice) * up;
    } else {
        gate = gate > limit ? Floats{} + limit : gate;
        up = up > limit ? Floats{} + limit : up;
        up = up < -limit ? Floats{} - limit : up;
        return times_sigmoid(gate, gate * alpha) * (up + 1.0f);
    }
}

// One row: active[f] from the gate and up halves of hidden, rounded once.
template <typename T, Activation kActivation, bool kInterleaved>
PERSEUS_TARGET void activate_row(const T* hidden, int64_t width, float alpha, float limit, T* active) {
    constexpr int kStride = kInterleaved ? 2 : 1;
    const T* const up_half = hidden + (kInterleaved ? 1 : width);
    for (int64_t f = 0; f < width; f += kLanes) {
        float gates[kLanes] = {}, ups[kLanes] = {}, results[kLanes];
        const int64_t count = width - f < kLanes ? width - f : kLanes;
        if (count == kLanes) {
            for (int i = 0; i < kLanes; ++i) gates[i] = widen(hidden[(f + i) * kStride]);
            for (int i = 0; i < kLanes; ++i) ups[i] = widen(up_half[(f + i) * kStride]);
        } else {
            for (int i = 0; i < count; ++i) gates[i] = widen(hidden[(f + i) * kStride]);
            for (int i = 0; i < count; ++i) ups[i] = widen(up_half[(f + i) * kStride]);
        }
        Floats gate, up;
        std::memcpy(&gate, gates, sizeof(gate));
        std::memcpy(&up, ups, sizeof(up));
        const Floats result = gated<kActivation>(gate, up, alpha, limit);
        std::memcpy(results, &result, sizeof(result));
        if (count == kLanes) {
            for (int i = 0; i < kLanes; ++i) narrow(active + f + i, results[i]);
        } else {
            for (int i = 0; i < count; ++i) narrow(active + f + i, results[i]);
        }
    }
}

// ---- Combine -------------------------------------------------------------------------------------------------------

// One token: out = sum over choices, in order, of weights[choice] * rows[slots[choice]]; foreign choices are skipped.
template <typename T>
PERSEUS_TARGET void combine_token(
    const T* rows, const int64_t* slots, const float* weights, int64_t num_choices, int64_t width, T* out) {
    constexpr int kPacks = 4;
    constexpr int64_t kWide = kPacks * Pack<T>::kCount;
    int64_t d = 0;
    for (; d + kWide <= width; d += kWide) {
        Pack<T> sums[kPacks];
        for (int i = 0; i < kPacks; ++i) sums[i].clear();
        for (int64_t choice = 0; choice < num_choices; ++choice) {
            if (slots[choice] < 0) continue;
            const T* row = rows + slots[choice] * width + d;
            for (int i = 0; i < kPacks; ++i) {
                Pack<T> value;
                value.load(row + i * Pack<T>::kCount);
                sums[i].add_scaled(value, weights[choice]);
            }
        }
        for (int i = 0; i < kPacks; ++i) sums[i].store(out + d + i * Pack<T>::kCount);
    }
    for (; d < width; ++d) {
        float sum = 0;
        for (int64_t choice = 0; choice < num_choices; ++choice) {
            if (slots[choice] >= 0) sum += widen(rows[slots[choice] * width + d]) * weights[choice];
        }
        narrow(out + d, sum);
    }
}

template <typename T>
constexpr Kernels<T> make_kernels(const char* name) {
    return {
        name,
        {dot_outs<T, 1>, dot_outs<T, 2>, dot_outs<T, 3>, dot_outs<T, 4>, dot_outs<T, 5>, dot_outs<T, 6>, dot_outs<T, 7>,
         dot_outs<T, 8>},
        dot_pack<T>,
        {outer_outs<T, 1>, outer_outs<T, 2>, outer_outs<T, 3>, outer_outs<T, 4>, outer_outs<T, 5>, outer_outs<T, 6>,
         outer_outs<T, 7>, outer_outs<T, 8>},
        outer_pack<T>,
        {{activate_row<T, Activation::kSilu, false>, activate_row<T, Activation::kSilu, true>},
         {activate_row<T, Activation::kGelu, false>, activate_row<T, Activation::kGelu, true>},
         {activate_row<T, Activation::kGeluTanh, false>, activate_row<T, Activation::kGeluTanh, true>},
         {activate_row<T, Activation::kClampedSwiglu, false>, activate_row<T, Activation::kClampedSwiglu, true>}},
        combine_token<T>,
    };
}

#undef PERSEUS_INLINE
