// AArch64 with products of matrices of bytes: Apple's M2, Graviton 3 and later ones.
#include "kernels_neon.inl"

namespace pn {

const Kernels* i8mm_kernels(int dtype) {
    static const Kernels floats = named("i8mm", *neon_kernels(PN_F32));
    return dtype == PN_F32 ? &floats : table<bfloat>("i8mm");
}

}  // namespace pn
