// AArch64 with dot products of signed bytes: the processors since 2018, Apple's M1 and Graviton 2 among them.
#include "kernels_neon.inl"

namespace pn {

const Kernels* dotprod_kernels(int dtype) {
    static const Kernels floats = named("dotprod", *neon_kernels(PN_F32));
    return dtype == PN_F32 ? &floats : table<bfloat>("dotprod");
}

}  // namespace pn
