// AArch64 without dot products: what every processor has.
#include "kernels_neon.inl"

namespace pn {

const Kernels* neon_kernels(int dtype) { return dtype == PN_F32 ? table<float>("neon") : table<bfloat>("neon"); }

}  // namespace pn
