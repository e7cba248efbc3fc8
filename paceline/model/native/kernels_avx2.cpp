// AVX2: every x86 processor of the last decade. Quantised matrices are multiplied in whole numbers of sixteen bits; and,
// to be tested, as with AVX-VNNI.
#include "kernels_avx2.inl"

namespace pn {

const Kernels* avx2_kernels(int dtype) {
    return dtype == PN_F32 ? table<float>("avx2") : table<bfloat, Wide8<WordDots>, planes_of<WordDots>>("avx2");
}

}  // namespace pn

#ifdef PN_EMULATED

namespace pn {
namespace {

// Four products of unsigned and signed bytes, added to each sum: by those of sixteen bits. AVX2's own products of bytes saturate.
struct EmulatedBytes {
    static vi dot(vi sums, vi weights, vi inputs) {
        const vi even = inputs << 8, odd = inputs;  // in the upper half of sixteen bits
        const vi even_inputs = (vi)_mm256_srai_epi16((__m256i)even, 8),
                 odd_inputs = (vi)_mm256_srai_epi16((__m256i)odd, 8);
        return add_madd(add_madd(sums, weights & 0x00ff00ff, even_inputs), (vi)((Pairs)weights >> 8), odd_inputs);
    }
};
typedef ByteDots<EmulatedBytes> EmulatedDots;

}  // namespace

const Kernels* emulated_avxvnni_kernels(int dtype) {
    constexpr const char* name = "emulated-avxvnni";
    static const Kernels floats = named(name, *avx2_kernels(PN_F32));
    return dtype == PN_F32 ? &floats : table<bfloat, Wide8<EmulatedDots>, planes_of<EmulatedDots>>(name);
}

}  // namespace pn

#endif
