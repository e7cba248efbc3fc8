// Any processor: the compiler splits vectors of eight lanes into what it has.
#include "simd.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define PN_FMA_ROUNDS_TWICE

namespace pn {
namespace {

constexpr int kWidth = 8;
typedef uint16_t bfloat;
typedef Lanes<8>::Floats vf;
typedef Lanes<8>::Ints vi;
constexpr int kUnpackedRows = 3;  // 6 sums of two registers each

// Of dense products and attention. With bfloat16 the product is exact, so that nothing is rounded twice.
inline vf fma(vf a, vf b, vf c) { return a * b + c; }

#ifdef __FP_FAST_FMAF
inline vf fused(vf a, vf b, vf c) {
    for (int lane = 0; lane < kWidth; ++lane) c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
    return c;
}
#else
typedef double Doubles __attribute__((vector_size(kWidth * 8)));
typedef int64_t Longs __attribute__((vector_size(kWidth * 8)));

// Rounds once to float what sums of doubles round twice: rounded to odd, they leave the second rounding right (Boldo and
// Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
__attribute__((noinline)) inline vf rounded_once(Doubles product, Doubles addend) {
    vf out;
    for (int lane = 0; lane < kWidth; ++lane) {
        double sum = product[lane] + addend[lane];
        const double back = sum - product[lane], lost = (product[lane] - (sum - back)) + (addend[lane] - back);
        int64_t bits;
        __builtin_memcpy(&bits, &sum, sizeof bits);
        if (bits % 2 == 0 && (lost > 0.0 || lost < 0.0)) bits += (lost > 0.0) == (sum > 0.0) ? 1 : -1;
        __builtin_memcpy(&sum, &bits, sizeof sum);
        out[lane] = float(sum);
    }
    return out;
}

// Rounded once, as others have it, without an instruction for that. Products of floats are exact as doubles; their sum, rounded to
// 53 bits and then to 24, is wrong only where the first rounding ends half-way between two floats, or among the smallest of them.
inline vf fused(vf a, vf b, vf c) {
    const Doubles product = __builtin_convertvector(a, Doubles) * __builtin_convertvector(b, Doubles);
    const Doubles addend = __builtin_convertvector(c, Doubles), sum = product + addend;
    const vf narrow = __builtin_convertvector(sum, vf);
    const vi low = __builtin_convertvector((Longs)sum, vi), high = __builtin_convertvector((Longs)sum >> 32, vi);
    // Masks by shifts: comparisons of vectors wider than the processor's would be made one by one.
    const vi from_half = (low & 0x1fffffff) - 0x10000000, is_half = ~((from_half | -from_half) >> 31);
    const vi size = low | (high & 0x7fffffff), is_zero = ~((size | -size) >> 31);
    const vi is_rare = is_half | (~is_zero & (((vi)narrow & 0x7fffffff) - 0x00800001) >> 31);
    int64_t rare[kWidth / 2];
    __builtin_memcpy(rare, &is_rare, sizeof rare);
    return rare[0] | rare[1] | rare[2] | rare[3] ? rounded_once(product, addend) : narrow;
}
#endif

inline vf halves_at(const uint8_t* from) {
    Lanes<8>::Halves halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    const vi all = __builtin_convertvector(halves, vi), size = all & 0x7fff;
    const vf tiny = __builtin_convertvector(size, vf) * 5.9604644775390625e-8f;  // 2^-24
    const vi is_tiny = (size - 0x0400) >> 31,
             is_finite = (size - 0x7c00) >> 31;  // wide comparisons would be made one by one
    const vi others = (size << 13) + ((112 << 23 & is_finite) | (224 << 23 & ~is_finite));
    return (vf)(((vi)tiny & is_tiny) | (others & ~is_tiny) | (all & 0x8000) << 16);
}
inline vf factors_at(const uint8_t* from) {
    typedef int8_t SmallBytes __attribute__((vector_size(kWidth)));
    SmallBytes bytes;
    __builtin_memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, vf);
}
inline vi rounded(vf value) {
    const vf known = value == value ? value : vf{} - 32768.0f;
    return __builtin_convertvector((known + 12582912.0f) - 12582912.0f,
                                   vi);  // 1.5 * 2^23: adding it rounds to a whole number
}
inline vi add_madd(vi sums, vi a, vi b) {
#ifdef __SSE2__
    __m128i left[2], right[2];
    __builtin_memcpy(left, &a, sizeof a), __builtin_memcpy(right, &b, sizeof b);
    left[0] = _mm_madd_epi16(left[0], right[0]), left[1] = _mm_madd_epi16(left[1], right[1]);
    __builtin_memcpy(&a, left, sizeof a);
    return sums + a;
#else
    return sums + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

}  // namespace
}  // namespace pn

#include "lanes8.inl"
#include "unpack.inl"

namespace pn {
namespace {

inline Bytes look_up(Bytes codes) {
    for (int byte = 0; byte < kWidth * 4; ++byte) codes[byte] = kTable[codes[byte]];
    return codes;
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

namespace pn {

const Kernels* portable_kernels(int dtype) {
    return dtype == PN_F32 ? table<float>("portable") : table<bfloat, Wide8<WordDots>, planes_of<WordDots>>("portable");
}

}  // namespace pn
