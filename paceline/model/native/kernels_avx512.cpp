// AVX-512 with bfloat16 dot products (Zen 4, Cooper Lake, Sapphire Rapids and later).
#include "simd.h"

#ifdef __AVX512BF16__

#include <immintrin.h>

namespace pn {
namespace {

constexpr int kWidth = 16;
constexpr int kMaxTile = 6;  // 24 sums, 4 weights, 1 activation: of 32 registers
typedef uint16_t bfloat;
typedef Lanes<16>::Floats vf;
typedef Lanes<16>::Ints vi;

inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf widen(const bfloat* from) {
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
}
inline void narrow(bfloat* to, vf value) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(value)); }

// The sums of four vectors, by one fixed tree.
inline __m128 sums_of(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

template <int Rows>
inline void tile(const bfloat* weights, int64_t row_stride, int64_t block_stride, int num_blocks, const bfloat* x, int64_t ldx,
                 float (*sums)[kGroup]) {
    __m512 acc[Rows][kGroup];
    for (int row = 0; row < Rows; ++row)
        for (int lane = 0; lane < kGroup; ++lane) acc[row][lane] = _mm512_setzero_ps();
    for (int block = 0; block < num_blocks; ++block, weights += block_stride, x += kBlock) {
        __m512bh weight[kGroup];
        for (int lane = 0; lane < kGroup; ++lane) weight[lane] = (__m512bh)_mm512_loadu_si512(weights + lane * row_stride);
        for (int row = 0; row < Rows; ++row) {
            const __m512bh value = (__m512bh)_mm512_loadu_si512(x + row * ldx);
            for (int lane = 0; lane < kGroup; ++lane) acc[row][lane] = _mm512_dpbf16_ps(acc[row][lane], value, weight[lane]);
        }
    }
    for (int row = 0; row < Rows; ++row) _mm_storeu_ps(sums[row], sums_of(acc[row][0], acc[row][1], acc[row][2], acc[row][3]));
}

template <int Rows>
inline void tile(const float* weights, int64_t row_stride, int64_t block_stride, int num_blocks, const float* x, int64_t ldx,
                 float (*sums)[kGroup]) {
    __m512 acc[Rows][kGroup];
    for (int row = 0; row < Rows; ++row)
        for (int lane = 0; lane < kGroup; ++lane) acc[row][lane] = _mm512_setzero_ps();
    for (int block = 0; block < num_blocks; ++block, weights += block_stride, x += kBlock)
        for (int half = 0; half < kBlock; half += kWidth) {
            __m512 weight[kGroup];
            for (int lane = 0; lane < kGroup; ++lane) weight[lane] = _mm512_loadu_ps(weights + lane * row_stride + half);
            for (int row = 0; row < Rows; ++row) {
                const __m512 value = _mm512_loadu_ps(x + row * ldx + half);
                for (int lane = 0; lane < kGroup; ++lane) acc[row][lane] = _mm512_fmadd_ps(value, weight[lane], acc[row][lane]);
            }
        }
    for (int row = 0; row < Rows; ++row) _mm_storeu_ps(sums[row], sums_of(acc[row][0], acc[row][1], acc[row][2], acc[row][3]));
}

// The sixteen values a block of four-bit codes can have: scale * code + minimum, the product exact, rounded as a float once.
inline __m512 q4_values(float scale, float minimum) {
    const __m512 codes = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_fmadd_ps(codes, _mm512_set1_ps(scale), _mm512_set1_ps(minimum));
}

// A shuffle looks the codes up; it reads five bits of each, so the table stands there twice.
inline void expand_q4(const PnMatrix& matrix, const uint8_t* group, bfloat* out) {
    const uint8_t* scales = group + matrix.codes_bytes;
    for (int block = 0; block < matrix.num_blocks; ++block, out += kGroup * kBlock) {
        alignas(32) float scale[2 * kGroup];
        _mm256_store_ps(scale, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)scales + block)));
        const __m512i codes = _mm512_loadu_si512(group + size_t(block) * kBlock * 2);
        for (int lane = 0; lane < kGroup; ++lane) {
            const __m512i table = _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(q4_values(scale[lane], scale[kGroup + lane])));
            _mm512_storeu_si512(out + lane * kBlock, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, unsigned(4 * lane)), table));
        }
    }
}

inline void expand_q4(const PnMatrix& matrix, const uint8_t* group, float* out) {
    const uint8_t* scales = group + matrix.codes_bytes;
    for (int block = 0; block < matrix.num_blocks; ++block, out += kGroup * kBlock) {
        alignas(32) float scale[2 * kGroup];
        _mm256_store_ps(scale, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)scales + block)));
        const __m256i* codes = (const __m256i*)(group + size_t(block) * kBlock * 2);
        const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(codes)), high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(codes + 1));
        for (int lane = 0; lane < kGroup; ++lane) {
            const __m512 table = q4_values(scale[lane], scale[kGroup + lane]);
            const unsigned shift = unsigned(4 * lane);
            _mm512_storeu_ps(out + lane * kBlock, _mm512_permutexvar_ps(_mm512_srli_epi32(low, shift), table));
            _mm512_storeu_ps(out + lane * kBlock + kWidth, _mm512_permutexvar_ps(_mm512_srli_epi32(high, shift), table));
        }
    }
}

inline __m512 q8_values(const int8_t* codes, float scale) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)codes))), _mm512_set1_ps(scale));
}
inline void put_q8(const int8_t* codes, float scale, float* out) {
    _mm512_storeu_ps(out, q8_values(codes, scale)), _mm512_storeu_ps(out + kWidth, q8_values(codes + kWidth, scale));
}
inline void put_q8(const int8_t* codes, float scale, bfloat* out) {
    _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(q8_values(codes + kWidth, scale), q8_values(codes, scale)));
}

template <class T>
inline void expand_q8(const PnMatrix& matrix, const uint8_t* group, T* out) {
    const int8_t* codes = reinterpret_cast<const int8_t*>(group);
    const uint8_t* scales = group + matrix.codes_bytes;
    for (int block = 0; block < matrix.num_blocks; ++block) {
        alignas(16) float scale[kGroup];
        _mm_store_ps(scale, _mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)(scales + block * kGroup * 2))));
        for (int lane = 0; lane < kGroup; ++lane, codes += kBlock, out += kBlock) put_q8(codes, scale[lane], out);
    }
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
