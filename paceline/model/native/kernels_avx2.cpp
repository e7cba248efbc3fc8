// AVX2 with fused multiply-add: every x86 processor of the last decade. bfloat16 is widened to float32.
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

}  // namespace
}  // namespace pn

#include "lanes8.inl"

namespace pn {

const Kernels* avx2_kernels(int dtype) { return dtype == PN_F32 ? table<float>("avx2") : table<bfloat>("avx2"); }

}  // namespace pn

#else
#error "compile this file with -mavx2 -mfma -mf16c, or leave it out"
#endif
