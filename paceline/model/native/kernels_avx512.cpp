// AVX-512 with byte dot products (Cascade Lake, Ice Lake and later).
#if !defined(__AVX512VNNI__) || defined(__AVX512BF16__)
#error "compile this file with -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c, or leave it out"
#endif

#include "kernels_avx512.inl"

namespace pn {

const Kernels* avx512_kernels(int dtype) { return dtype == PN_F32 ? table<float>("avx512") : table<bfloat>("avx512"); }

}  // namespace pn
