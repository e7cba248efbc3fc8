// AArch64 with products of matrices of bytes: Apple's M2, Graviton 3 and later ones.
#include "kernels_neon.inl"

namespace pn {

const Kernels* i8mm_kernels(int dtype) { return dtype == PN_F32 ? table<float>("i8mm") : table<bfloat>("i8mm"); }

}  // namespace pn
