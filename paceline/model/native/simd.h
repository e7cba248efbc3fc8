// Vectors of floats by the compiler's own extension, which every instruction set has: 16 lanes, or 8 of narrower ones.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace pn {
namespace {

template <int Width>
struct Lanes {
    typedef float Floats __attribute__((vector_size(Width * 4)));
    typedef int32_t Ints __attribute__((vector_size(Width * 4)));
    typedef uint32_t Words __attribute__((vector_size(Width * 4)));
    typedef uint16_t Halves __attribute__((vector_size(Width * 2)));
};

}  // namespace
}  // namespace pn
