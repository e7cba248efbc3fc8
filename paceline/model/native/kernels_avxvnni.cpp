// AVX2 with AVX-VNNI, byte dot products on vectors of 256 bits: laptops since Alder Lake, and Zen 5.
#include "kernels_avx2.inl"

namespace pn {
namespace {

struct ProcessorBytes {
    static vi dot(vi sums, vi weights, vi inputs) {
        return (vi)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)inputs);
    }
};
typedef ByteDots<ProcessorBytes> Dots;

}  // namespace

const Kernels* avxvnni_kernels(int dtype) {
    static const Kernels floats = named("avxvnni", *avx2_kernels(PN_F32));
    return dtype == PN_F32 ? &floats : table<bfloat, Wide8<Dots>, planes_of<Dots>>("avxvnni");
}

}  // namespace pn
