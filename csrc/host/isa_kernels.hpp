// The inner loops of the CPU path for one instruction set: few-row linear maps and the weighted combine.
//
// No include guard: host/dispatch.hpp includes this file once per instruction set, each time inside another namespace,
// and picks one of the resulting tables at run time. It sets
//   PERSEUS_TARGET    the attribute that lets a function use the instruction set; every function here carries it,
//   PERSEUS_LANES     floats per vector register,
//   PERSEUS_BF16_DOT  1 where pairs of bfloat16 are multiplied and added in one instruction.
//
// Vectors are compiler extensions of g++ and clang++. A bfloat16 is the upper half of a float, so one 32-bit word of two
// bfloat16 becomes two floats by a shift and a mask.

#define PERSEUS_INLINE PERSEUS_TARGET inline __attribute__((always_inline))

constexpr int kLanes = PERSEUS_LANES;
// Weights are prefetched so far ahead: about one memory latency at full bandwidth.
constexpr int kPrefetchBytes = 8192;

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

// One register of kCount elements, as floats.
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

// What the dot products of a tile load. With AVX512-BF16 pairs of bfloat16 are multiplied and added in one instruction.
#if PERSEUS_BF16_DOT
struct Pairs {
    static constexpr int kCount = 2 * kLanes;
    __m512bh all;

    PERSEUS_INLINE void load(const BFloat16* from) { std::memcpy(&all, from, sizeof(all)); }
    PERSEUS_INLINE static void dot(Floats& sum, const Pairs& a, const Pairs& b) {
        sum = _mm512_dpbf16_ps(sum, a.all, b.all);
    }
};
template <typename T>
struct DotOf { using Type = Pack<T>; };
template <>
struct DotOf<BFloat16> { using Type = Pairs; };
#else
template <typename T>
struct DotOf { using Type = Pack<T>; };
#endif
template <typename T>
using Dot = typename DotOf<T>::Type;

// Rows are packed into a panel so that a tile reads them front to back: [depth / step][row][step], then [row][rest].
// Rows a power of two apart would otherwise fall into the same few cache sets.
template <typename T>
PERSEUS_INLINE int64_t panel_index(int64_t num_rows, int64_t depth, int64_t row, int64_t k) {
    const int64_t first = k / Dot<T>::kCount * Dot<T>::kCount;
    const int64_t count = depth - first < Dot<T>::kCount ? depth - first : Dot<T>::kCount;
    return first * num_rows + row * count + (k - first);
}

template <typename T>
PERSEUS_TARGET void pack_rows(const T* rows, int64_t num_rows, int64_t depth, T* panel) {
    for (int64_t k = 0; k < depth; k += Dot<T>::kCount) {
        const int64_t count = depth - k < Dot<T>::kCount ? depth - k : Dot<T>::kCount;
        for (int64_t m = 0; m < num_rows; ++m) {
            std::memcpy(panel + panel_index<T>(num_rows, depth, m, k), rows + m * depth + k, count * sizeof(T));
        }
    }
}

// kRows rows times kOuts weight rows, both contiguous along depth. kChains sums per output hide the latency of the adds.
//   panel: the rows as pack_rows leaves them.  weight: [kOuts, depth], row stride ldw.  out: [kRows, kOuts], stride ldo.
template <typename T, int kRows, int kOuts, int kChains>
PERSEUS_INLINE void tile(const T* panel, const T* weight, int64_t ldw, int64_t depth, T* out, int64_t ldo) {
    constexpr int kStep = Dot<T>::kCount;
    Floats sums[kRows][kOuts][kChains] = {};
    int64_t k = 0;
    while (k + kStep * kChains <= depth) {
#pragma GCC unroll 2
        for (int chain = 0; chain < kChains; ++chain, k += kStep) {
            Dot<T> weights[kOuts];
#pragma GCC unroll 2
            for (int n = 0; n < kOuts; ++n) {
                weights[n].load(weight + n * ldw + k);
                __builtin_prefetch(reinterpret_cast<const char*>(weight + n * ldw + k) + kPrefetchBytes);
            }
#pragma GCC unroll 8
            for (int m = 0; m < kRows; ++m) {
                Dot<T> row;
                row.load(panel + k * kRows + m * kStep);
#pragma GCC unroll 2
                for (int n = 0; n < kOuts; ++n) Dot<T>::dot(sums[m][n][chain], row, weights[n]);
            }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 2
        for (int n = 0; n < kOuts; ++n) {
            Floats total = sums[m][n][0];
            for (int chain = 1; chain < kChains; ++chain) total += sums[m][n][chain];
            float sum = sum_lanes(total);
            for (int64_t i = k; i < depth; ++i) {
                sum += widen(panel[panel_index<T>(kRows, depth, m, i)]) * widen(weight[n * ldw + i]);
            }
            narrow(out + m * ldo + n, sum);
        }
    }
}

// num_outs outputs of kRows rows.
template <typename T, int kRows>
PERSEUS_TARGET void tile_outs(
    const T* panel, const T* weight, int64_t ldw, int64_t depth, int64_t num_outs, T* out, int64_t ldo) {
    // One weight row at a time keeps the weights one sequential stream, which runs at 85-100 % of a plain read up to
    // 6 rows; from there on the panel is read too often and two weight rows share it. (bfloat16 and float32, depths 512
    // and 1024, EPYC 9005 with AVX-512, one core, measured 2026-11-30)
    constexpr int kOuts = kRows <= 6 ? 1 : 2;
    constexpr int kChains = kRows <= 2 ? 2 : 1;
    int64_t n = 0;
    for (; n + kOuts <= num_outs; n += kOuts) {
        tile<T, kRows, kOuts, kChains>(panel, weight + n * ldw, ldw, depth, out + n, ldo);
    }
    for (; n < num_outs; ++n) tile<T, kRows, 1, 1>(panel, weight + n * ldw, ldw, depth, out + n, ldo);
}

// One token: out = sum over choices, in choice order, of weights[choice] * rows[slots[choice]]; foreign choices skipped.
template <typename T>
PERSEUS_TARGET void combine_token(const T* rows, const int64_t* slots, const float* weights, int64_t num_choices, int64_t width, T* out) {
    constexpr int kPacks = 4;
    constexpr int64_t kBlock = kPacks * Pack<T>::kCount;
    int64_t d = 0;
    for (; d + kBlock <= width; d += kBlock) {
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
constexpr Kernels<T> make_kernels() {
    return {
        {tile_outs<T, 1>, tile_outs<T, 2>, tile_outs<T, 3>, tile_outs<T, 4>, tile_outs<T, 5>, tile_outs<T, 6>,
         tile_outs<T, 7>, tile_outs<T, 8>},
        pack_rows<T>,
        combine_token<T>,
    };
}

#undef PERSEUS_INLINE
