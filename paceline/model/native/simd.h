// Vectors of floats by the compiler's own extension, which every instruction set has: 16 lanes, or 8 of narrower ones.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace pn {
namespace {

// How far ahead of their use weights are asked for, in bytes. Between two groups the processor computes for longer than its own
// prefetcher remembers a stream: without this a pass of eight rows takes twice the time.
constexpr int kAhead = 8192;

// Elements of neighbouring positions, or of one head, that are multiplied together: two bfloat16.
template <class T>
constexpr int kTogether = sizeof(T) == 2 ? 2 : 1;

template <int Width>
struct Lanes {
    typedef float Floats __attribute__((vector_size(Width * 4)));
    typedef int32_t Ints __attribute__((vector_size(Width * 4)));
    typedef uint32_t Words __attribute__((vector_size(Width * 4)));
    typedef uint16_t Halves __attribute__((vector_size(Width * 2)));
};

}  // namespace
}  // namespace pn
