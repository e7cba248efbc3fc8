// AVX-512 with byte dot products, without instructions for bfloat16; and the same with matrix tiles in plain C++.
#include "kernels_avx512.inl"
#ifdef PN_EMULATED
#include "tiled.inl"
#endif

namespace pn {

const Kernels* avx512_kernels(int dtype) { return dtype == PN_F32 ? table<float>("avx512") : table<bfloat>("avx512"); }

#ifdef PN_EMULATED
const Kernels* emulated_tiles_kernels(int dtype) {
    static const Kernels floats = named("emulated-tiles", *avx512_kernels(PN_F32));
    return dtype == PN_F32 ? &floats : table<bfloat, Tiled<EmulatedTiles>>("emulated-tiles");
}
#endif

}  // namespace pn
