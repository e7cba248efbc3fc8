// AVX-512 with bfloat16 dot products (Zen 4, Cooper Lake, Sapphire Rapids and later).
#include "simd.h"

#ifdef __AVX512BF16__

#include <immintrin.h>

namespace pn {
namespace {

constexpr int kWidth = 16;
constexpr int kMaxTile = 6;   // 24 sums, 4 weights, 1 activation: of 32 registers
constexpr int kMaxFused = 4;  // rows up to which codes are not worth storing as weights first
typedef uint16_t bfloat;
typedef Lanes<16>::Floats vf;
typedef Lanes<16>::Ints vi;

inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf widen(const bfloat* from) {
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
}
inline void narrow(bfloat* to, vf value) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(value)); }

// As an instruction of its own: the compiler takes a function that only prefetches for one that does nothing.
inline void ask_for(const void* at) { asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(at))); }

// The sums of four vectors, by one fixed tree.
inline __m128 sums_of(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// What is multiplied at once: 32 bfloat16, a whole block, or 16 floats, half of one.
template <class T>
struct Step;

template <>
struct Step<bfloat> {
    typedef __m512bh Vector;
    static constexpr int kPerBlock = 1;
    static Vector load(const bfloat* from) { return (__m512bh)_mm512_loadu_si512(from); }
    static void store(bfloat* to, Vector value) { _mm512_storeu_si512(to, (__m512i)value); }
    static __m512 multiply(__m512 sum, Vector a, Vector b) { return _mm512_dpbf16_ps(sum, a, b); }
};

template <>
struct Step<float> {
    typedef __m512 Vector;
    static constexpr int kPerBlock = 2;
    static Vector load(const float* from) { return _mm512_loadu_ps(from); }
    static void store(float* to, Vector value) { _mm512_storeu_ps(to, value); }
    static __m512 multiply(__m512 sum, Vector a, Vector b) { return _mm512_fmadd_ps(a, b, sum); }
};

// Four rows of weights, step by step; `row_stride` apart, blocks `block_stride` apart.
template <class T>
struct Dense {
    const T* weights;
    int64_t row_stride, block_stride;
    unsigned lanes_ahead;
    void get(int block, int part, typename Step<T>::Vector (&out)[kGroup]) const {
        const T* at = weights + block * block_stride + part * kWidth;
        each<kGroup>([&](auto lane) {
            out[lane] = Step<T>::load(at + lane * row_stride);
            if (lanes_ahead >> lane & 1) ask_for(reinterpret_cast<const uint8_t*>(at + lane * row_stride) + kAhead);
        });
    }
};

// Scales of a whole group are widened ahead of their use: a vector that is stored and read back at once, number by number,
// costs more than all the rest.
inline const float* widened(const uint8_t* halves, int count, float* out) {
    for (int at = 0; at < count; at += kWidth)  // a group's memory ends on a multiple of 64 bytes, `out` too
        _mm512_storeu_ps(out + at, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(halves + at * 2))));
    return out;
}

// The sixteen values that a block of four-bit codes can have: scale * code + minimum, rounded as a float once.
inline __m512 q4_values(const float* scales, int lane) {
    const __m512 codes = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_fmadd_ps(codes, _mm512_set1_ps(scales[lane]), _mm512_set1_ps(scales[kGroup + lane]));
}

template <class T>
struct Q4 {
    const uint8_t* codes;
    const uint8_t* behind;  // the codes: scales and minima
    const float* scales;
    Q4(const PnPanel& panel, const uint8_t* group, float* room)
        : codes(group), behind(group + panel.codes_bytes), scales(widened(group + panel.codes_bytes, panel.num_blocks * 2 * kGroup, room)) {}

    void ahead(int block) const {
        ask_for(codes + size_t(block) * kBlock * 2 + kAhead);
        if (block % 4 == 0) ask_for(behind + block * 2 * kGroup * 2 + kAhead);
    }
    // Two rows share a table of 32: bit 4 of an index chooses the row.
    void get(int block, int, __m512bh (&out)[kGroup]) const {
        const __m512i words = _mm512_loadu_si512(codes + size_t(block) * kBlock * 2);
        const __m512i code = _mm512_set1_epi16(15), second = _mm512_set1_epi16(16);
        const float* own = scales + block * 2 * kGroup;
        ahead(block);
        each<kGroup / 2>([&](auto pair) {
            const int lane = 2 * pair;
            const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(q4_values(own, lane + 1), q4_values(own, lane));
            const __m512i low = _mm512_srli_epi16(words, unsigned(4 * lane)), high = _mm512_srli_epi16(words, unsigned(4 * lane + 4));
            out[lane] = (__m512bh)_mm512_permutexvar_epi16(_mm512_and_si512(low, code), table);
            out[lane + 1] = (__m512bh)_mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(high, code, second, 0xea), table);  // and, or
        });
    }
    void get(int block, int part, __m512 (&out)[kGroup]) const {
        const uint8_t* at = codes + (size_t(block) * kBlock + size_t(part) * kWidth) * 2;
        const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at));
        if (part == 0) ahead(block);
        each<kGroup>([&](auto lane) {  // the shuffle reads the lowest four bits of each index
            const __m512i index = _mm512_srli_epi32(words, unsigned(4 * lane));
            out[lane] = _mm512_permutexvar_ps(index, q4_values(scales + block * 2 * kGroup, lane));
        });
    }
};

template <class T>
struct Q8 {
    const int8_t* codes;
    const uint8_t* behind;
    const float* scales;
    Q8(const PnPanel& panel, const uint8_t* group, float* room)
        : codes(reinterpret_cast<const int8_t*>(group)), behind(group + panel.codes_bytes), scales(widened(group + panel.codes_bytes, panel.num_blocks * kGroup, room)) {}

    __m512 values(int block, int lane, int part) const {
        const int8_t* at = codes + (block * kGroup + lane) * kBlock + part * kWidth;
        const __m512 whole = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)));
        return _mm512_mul_ps(whole, _mm512_set1_ps(scales[block * kGroup + lane]));
    }
    void ahead(int block) const {
        for (int line = 0; line < kGroup * kBlock; line += 64) ask_for(codes + block * kGroup * kBlock + line + kAhead);
        if (block % 8 == 0) ask_for(behind + block * kGroup * 2 + kAhead);
    }
    void get(int block, int, __m512bh (&out)[kGroup]) const {
        ahead(block);
        each<kGroup>([&](auto lane) { out[lane] = _mm512_cvtne2ps_pbh(values(block, lane, 1), values(block, lane, 0)); });
    }
    void get(int block, int part, __m512 (&out)[kGroup]) const {
        if (part == 0) ahead(block);
        each<kGroup>([&](auto lane) { out[lane] = values(block, lane, part); });
    }
};

// Products of `Rows` rows of x with a group.
template <int Rows, class T, class Source>
inline void run_tile(const Source& source, int num_blocks, const T* x, int64_t ldx, float (*sums)[kGroup]) {
    __m512 acc[Rows][kGroup];
    each<Rows>([&](auto row) { each<kGroup>([&](auto lane) { acc[row][lane] = _mm512_setzero_ps(); }); });
    for (int block = 0; block < num_blocks; ++block)
        for (int part = 0; part < Step<T>::kPerBlock; ++part) {
            typename Step<T>::Vector weights[kGroup];
            source.get(block, part, weights);
            each<Rows>([&](auto row) {
                const auto value = Step<T>::load(x + row * ldx + block * kBlock + part * kWidth);
                each<kGroup>([&](auto lane) { acc[row][lane] = Step<T>::multiply(acc[row][lane], value, weights[lane]); });
            });
        }
    each<Rows>([&](auto row) { _mm_storeu_ps(sums[row], sums_of(acc[row][0], acc[row][1], acc[row][2], acc[row][3])); });
}

template <int Rows, class T>
inline void tile(const T* weights, int64_t row_stride, int64_t block_stride, int num_blocks, const T* x, int64_t ldx,
                 float (*sums)[kGroup], unsigned ahead) {
    run_tile<Rows>(Dense<T>{weights, row_stride, block_stride, ahead}, num_blocks, x, ldx, sums);
}

inline __m512i pair_at(const bfloat* from) {
    int32_t both;
    __builtin_memcpy(&both, from, sizeof both);
    return _mm512_set1_epi32(both);
}

inline __m512 add_product(__m512 sum, const bfloat* pairs, const bfloat* factors) {
    return _mm512_dpbf16_ps(sum, Step<bfloat>::load(pairs), (__m512bh)pair_at(factors));
}
inline __m512 add_product(__m512 sum, const float* values, const float* factor) {
    return _mm512_fmadd_ps(_mm512_loadu_ps(values), _mm512_set1_ps(*factor), sum);
}

template <int Rows, class T>
inline void score_keys(const T* keys, const T* query, int64_t stride, int padded, float scale, float* out, int64_t ldout) {
    __m512 acc[Rows];
    each<Rows>([&](auto row) { acc[row] = _mm512_setzero_ps(); });
    for (int at = 0; at < padded; at += kTogether<T>)
        each<Rows>([&](auto row) { acc[row] = add_product(acc[row], keys + at * kKeys, query + row * stride + at); });
    each<Rows>([&](auto row) { _mm512_storeu_ps(out + row * ldout, _mm512_mul_ps(acc[row], _mm512_set1_ps(scale))); });
}

template <int Rows, class T>
inline void weigh_values(const T* values, int padded, int column, const T* weights, int64_t ldweights, int begin, int end,
                         vf (*sums)[kBlock / kWidth]) {
    __m512 low[Rows], high[Rows];
    each<Rows>([&](auto row) { low[row] = high[row] = _mm512_setzero_ps(); });
    for (int key = begin; key < end; key += kTogether<T>) {
        const T* from = values + int64_t(key) * padded + column * kTogether<T>;
        each<Rows>([&](auto row) {
            const T* factor = weights + row * ldweights + key;
            low[row] = add_product(low[row], from, factor);
            high[row] = add_product(high[row], from + kWidth * kTogether<T>, factor);
        });
    }
    each<Rows>([&](auto row) { sums[row][0] = low[row], sums[row][1] = high[row]; });
}

// Few rows: codes become weights in registers and are used at once. Returns false for a dense panel.
template <int Rows, class T>
inline bool tile_of_codes(int format, const PnPanel& panel, const uint8_t* group, float* room, const T* x, int64_t ldx, float (*sums)[kGroup]) {
    if (format == PN_Q4_1) run_tile<Rows>(Q4<T>(panel, group, room), panel.num_blocks, x, ldx, sums);
    else if (format == PN_Q8_0) run_tile<Rows>(Q8<T>(panel, group, room), panel.num_blocks, x, ldx, sums);
    else return false;
    return true;
}

template <class T, class Source>
inline void expand(const PnPanel& panel, const Source& source, T* out) {
    for (int block = 0; block < panel.num_blocks; ++block)
        for (int part = 0; part < Step<T>::kPerBlock; ++part) {
            typename Step<T>::Vector weights[kGroup];
            source.get(block, part, weights);
            for (int lane = 0; lane < kGroup; ++lane)
                Step<T>::store(out + (block * kGroup + lane) * kBlock + part * kWidth, weights[lane]);
        }
}
template <class T>
inline void expand_q4(const PnPanel& panel, const uint8_t* group, T* out, float* room) {
    expand(panel, Q4<T>(panel, group, room), out);
}
template <class T>
inline void expand_q8(const PnPanel& panel, const uint8_t* group, T* out, float* room) {
    expand(panel, Q8<T>(panel, group, room), out);
}

}  // namespace
}  // namespace pn

#include "kernels.inl"

namespace pn {

const Kernels* avx512_kernels(int dtype) { return dtype == PN_F32 ? table<float>("avx512") : table<bfloat>("avx512"); }

}  // namespace pn

#else
#error "compile this file with -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mfma -mf16c, or leave it out"
#endif
