// AVX2 with fused multiply-add, compiled without and with AVX-VNNI's byte dot products. bfloat16 is widened to float32.
#include "simd.h"

#include <immintrin.h>

namespace pn {
namespace {

constexpr int kWidth = 8;
typedef uint16_t bfloat;
typedef Lanes<8>::Floats vf;
typedef Lanes<8>::Ints vi;
constexpr int kUnpackedRows = 6;  // 12 sums, 2 vectors of weights, one of inputs, one product: of 16 registers

inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf halves_at(const uint8_t* from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }
inline vf factors_at(const uint8_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
}
inline vi rounded(vf value) {
    return (vi)_mm256_max_epi32(_mm256_cvtps_epi32(value), _mm256_set1_epi32(-32768));  // no number is the least one
}
inline vi madd(vi a, vi b) { return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
// The sum stays one: GCC would add up all products of a block in an order of its own, and have them in memory until then.
inline vi add_madd(vi sums, vi a, vi b) {
    sums += madd(a, b);
    asm("" : "+x"(sums));
    return sums;
}

}  // namespace
}  // namespace pn

#include "lanes8.inl"
#include "unpack.inl"

namespace pn {
namespace {

inline Bytes look_up(Bytes codes) {
    const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)kTable));
    return (Bytes)_mm256_shuffle_epi8(values, (__m256i)codes);
}

// wide8.inl multiplies quantised matrices.
template <class T>
constexpr int kMaxWide = 0;
template <class T>
constexpr void (*kPlanes)(const void*, int, void*) = nullptr;
template <int Rows, int Format>
inline void wide_tile(const PnPanel&, const uint8_t*, const uint8_t*, int64_t, int, float (*)[kWide], bool) {}

}  // namespace
}  // namespace pn

#include "kernels.inl"
#include "wide8.inl"
