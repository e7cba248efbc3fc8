// AVX-512 with byte dot products and bfloat16 (Zen 4, Cooper Lake, Sapphire Rapids and later).
#if !defined(__AVX512VNNI__) || !defined(__AVX512BF16__)
#error "compile this file with the flags of kernels_avx512.cpp and -mavx512bf16, or leave it out"
#endif

#include "kernels_avx512.inl"

namespace pn {

const Kernels* avx512bf16_kernels(int dtype) {
    return dtype == PN_F32 ? table<float>("avx512bf16") : table<bfloat>("avx512bf16");
}

}  // namespace pn
