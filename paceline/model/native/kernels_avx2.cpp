// AVX2 with fused multiply-add: every x86 processor of the last decade. bfloat16 is widened to float32; quantised matrices are
// multiplied in integers of sixteen bits.
#include "simd.h"

#if defined(__AVX2__) && defined(__FMA__)

#include <immintrin.h>

namespace pn {
namespace {

constexpr int kWidth = 8;
typedef uint16_t bfloat;
typedef Lanes<8>::Floats vf;
typedef Lanes<8>::Ints vi;

inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf halves_at(const uint8_t* from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }
inline vf factors_at(const uint8_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
}

}  // namespace
}  // namespace pn

#include "lanes8.inl"
#include "unpack.inl"

namespace pn {
namespace {

// ---- quantised matrices ----

template <class T>
constexpr int kMaxWide = sizeof(T) == 2 ? 4 : 0;  // 4 sums of integers and 4 of floats, 4 vectors of weights, 2 of inputs

typedef int32_t Word __attribute__((may_alias));

inline Bytes look_up(Bytes codes) {
    const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)kTable));
    return (Bytes)_mm256_shuffle_epi8(values, (__m256i)codes);
}

// Sixteen-bit numbers of a block, four columns at a time in the order 0, 2, 1, 3: the even bytes of eight rows' weights, widened,
// meet the first two, the odd ones the others.
constexpr int kOrder = 0xd8;  // of _mm256_shufflelo_epi16

// Half of the sixteen rows of a group, from `first` on: 32 of the 64 bytes of each of its vectors.
template <int Rows, int Format>
inline void half_tile(const PnPanel& panel, const uint8_t* group, int first, const uint8_t* x, int64_t row_bytes,
                      int num_blocks, float (*sums)[kWide], bool asks_ahead) {
    constexpr Form form = form_of(Format);
    constexpr int kQuarters = 8 / form.halves;  // that share a scale
    __m256 acc[Rows];
    each<Rows>([&](auto row) { acc[row] = _mm256_setzero_ps(); });
    const uint8_t* codes = group + first * 4;
    const uint8_t* scales = group + panel.codes_bytes;
    const uint8_t* words = x + panel.first_block * 2 * kBlock;
    const uint8_t* floats = x + num_blocks * 2 * kBlock;
    for (int block = 0; block < panel.num_blocks; ++block, words += 2 * kBlock, codes += form.code_bytes()) {
        if (asks_ahead) each<form.bits>([&](auto vector) { __builtin_prefetch(codes + vector * 64 + kAhead); });
        const Scales<Format> weight = scales_of<Format>(panel, scales, block, first);
        each<form.halves>([&](auto half) {
            __m256i whole[Rows];
            each<Rows>([&](auto row) { whole[row] = _mm256_setzero_si256(); });
            each<kQuarters>([&](auto index) {
                constexpr int at = half * kQuarters + index;
                const __m256i bytes = (__m256i)quarter_of<Format, at>(codes);
                const __m256i even = _mm256_and_si256(bytes, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(bytes, 8);
                each<Rows>([&](auto row) {
                    const Word* inputs = reinterpret_cast<const Word*>(words + row * row_bytes) + at * 2;
                    whole[row] = _mm256_add_epi32(whole[row], _mm256_madd_epi16(even, _mm256_set1_epi32(inputs[0])));
                    whole[row] = _mm256_add_epi32(whole[row], _mm256_madd_epi16(odd, _mm256_set1_epi32(inputs[1])));
                });
            });
            each<Rows>([&](auto row) {
                const RowFloats own = {reinterpret_cast<const Number*>(floats + row * row_bytes), num_blocks};
                const int at_block = panel.first_block + block;
                const __m256 factor = _mm256_mul_ps((__m256)weight.scale[half], _mm256_set1_ps(own.scale(at_block)));
                const __m256 sum = _mm256_set1_ps(own.template sum<form.halves>(at_block, half));
                acc[row] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole[row]), factor, acc[row]);
                acc[row] = _mm256_fmadd_ps((__m256)weight.minimum[half], sum, acc[row]);
            });
        });
    }
    each<Rows>([&](auto row) { _mm256_storeu_ps(sums[row] + first, acc[row]); });
}

template <int Rows, int Format>
inline void wide_tile(const PnPanel& panel, const uint8_t* group, const uint8_t* x, int64_t row_bytes, int num_blocks,
                      float (*sums)[kWide], bool asks_ahead) {
    half_tile<Rows, Format>(panel, group, 0, x, row_bytes, num_blocks, sums, asks_ahead);
    half_tile<Rows, Format>(panel, group, kWidth, x, row_bytes, num_blocks, sums, false);
}

// The bits of the largest magnitude of 32 bfloat16: they are ordered as their values, NaNs behind infinity.
inline uint16_t most_of(const bfloat* from) {
    const __m256i both =
        _mm256_max_epu16(_mm256_and_si256(_mm256_loadu_si256((const __m256i*)from), _mm256_set1_epi16(0x7fff)),
                         _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(from + 16)), _mm256_set1_epi16(0x7fff)));
    const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    return uint16_t(~_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1)))));
}

inline void planes_of(const void* x, int padded_cols, void* out) {
    const bfloat* from = static_cast<const bfloat*>(x);
    const int num_blocks = padded_cols / kBlock;
    int16_t* words = static_cast<int16_t*>(out);
    float* scales = reinterpret_cast<float*>(words + num_blocks * kBlock);
    for (int block = 0; block < num_blocks; ++block, from += kBlock, words += kBlock) {
        const float most = bfloat_to_float(most_of(from));  // of NaNs one of them: the scale and all that follows are NaN
        const bool is_zero = most < kLeastElement;
        const __m256 inverse = _mm256_set1_ps(is_zero ? 0.0f : float(kPlaneRange) / most);
        int32_t totals[2] = {};
        for (int at = 0; at < kBlock; at += 16) {
            const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps((__m256)widen(from + at), inverse));
            const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps((__m256)widen(from + at + 8), inverse));
            const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
            const __m256i ordered = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(packed, kOrder), kOrder);
            _mm256_storeu_si256((__m256i*)(words + at), ordered);
            const __m256i pairs = _mm256_madd_epi16(packed, _mm256_set1_epi16(1));
            int32_t parts[8];
            _mm256_storeu_si256((__m256i*)parts, pairs);
            for (int part = 0; part < 8; ++part) totals[at / 16] += parts[part];
        }
        scales[block] = is_zero ? 0.0f : most / float(kPlaneRange);
        scales[num_blocks + block] = scales[block] * float(totals[0] + totals[1]);
        for (int half = 0; half < 2; ++half) scales[2 * (num_blocks + block) + half] = scales[block] * float(totals[half]);
    }
}

template <class T>
constexpr void (*kPlanes)(const void*, int, void*) = sizeof(T) == 2 ? planes_of : nullptr;

}  // namespace
}  // namespace pn

#include "kernels.inl"

namespace pn {

const Kernels* avx2_kernels(int dtype) { return dtype == PN_F32 ? table<float>("avx2") : table<bfloat>("avx2"); }

}  // namespace pn

#else
#error "compile this file with -mavx2 -mfma -mf16c, or leave it out"
#endif
