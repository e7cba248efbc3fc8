// Vectors of floats by the compiler's own extension, which every instruction set has: 16 lanes, or 8 of narrower ones.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels.h"

namespace pn {
namespace {

// How far ahead of their use weights are asked for, in bytes. Between two groups the processor computes for longer than its own
// prefetcher remembers a stream: without this a pass of eight rows takes twice the time.
constexpr int kAhead = 8192;

// Elements of neighbouring positions, or of one head, that are multiplied together: two bfloat16.
template <class T>
constexpr int kTogether = sizeof(T) == 2 ? 2 : 1;

// f(0), f(1), ... with indices that are constants: sums in arrays indexed by a loop variable are written to memory each time
// round, however short the loop.
template <class Function, int... Index>
__attribute__((always_inline)) inline void each_of(Function f, std::integer_sequence<int, Index...>) {
    (f(std::integral_constant<int, Index>{}), ...);
}
template <int Count, class Function>
__attribute__((always_inline)) inline void each(Function f) {
    each_of(f, std::make_integer_sequence<int, Count>{});
}

template <int Width>
struct Lanes {
    typedef float Floats __attribute__((vector_size(Width * 4)));
    typedef int32_t Ints __attribute__((vector_size(Width * 4)));
    typedef uint32_t Words __attribute__((vector_size(Width * 4)));
    typedef uint16_t Halves __attribute__((vector_size(Width * 2)));
};

}  // namespace
}  // namespace pn
