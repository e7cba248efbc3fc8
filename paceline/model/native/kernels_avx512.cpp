// AVX-512 with byte dot products, without instructions for bfloat16; and the same with matrix tiles in plain C++.
#include "kernels_avx512.inl"
#include "tiled.inl"

namespace pn {

const Kernels* avx512_kernels(int dtype) { return dtype == PN_F32 ? table<float>("avx512") : table<bfloat>("avx512"); }

const Kernels* emulated_tiles_kernels(int dtype) {
    return dtype == PN_F32 ? table<float>("emulated-tiles") : table<bfloat, Tiled<EmulatedTiles>>("emulated-tiles");
}

}  // namespace pn
