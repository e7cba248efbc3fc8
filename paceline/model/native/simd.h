// Vectors of floats by the compiler's own extension, which every instruction set has: 16 lanes, or 8 of narrower ones.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels.h"

#define PN_INLINE __attribute__((always_inline))  // of what would keep its sums in memory when it is called

namespace pn {
namespace {

// How far ahead of their use weights are asked for, in bytes. Between two groups the processor computes for longer than its own
// prefetcher remembers a stream: without this a pass of eight rows takes twice the time.
constexpr int kAhead = 8192;
// Asks for weights that tiles need soon; `is_far` as asks_far in kernels.h.
inline void ask_for_weights(const void* at, bool is_far = asks_far) {
    const uint8_t* from = static_cast<const uint8_t*>(at);
    if (is_far) __builtin_prefetch(from + 2 * kAhead, 0, 2);
    else __builtin_prefetch(from + kAhead);
    asm volatile("");  // the compiler takes a function that only prefetches for one that does nothing
}

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

// To bfloat16: to the nearest, ties to even; a NaN stays one, and what is below the normal numbers is zero, as instructions
// for bfloat16 have it.
template <int Width>
inline void narrow_lanes(uint16_t* to, typename Lanes<Width>::Floats value) {
    typedef typename Lanes<Width>::Words Words;
    Words words;
    __builtin_memcpy(&words, &value, sizeof words);
    const Words size = words & 0x7fffffffu, sign = words >> 16 & 0x8000u;
    const Words rounded = (words + 0x7fffu + (words >> 16 & 1u)) >> 16;
    const Words known = size > 0x7f800000u ? words >> 16 | 0x40u : rounded;
    const Words all = size < 0x00800000u ? sign : known;
    const typename Lanes<Width>::Halves halves = __builtin_convertvector(all, typename Lanes<Width>::Halves);
    __builtin_memcpy(to, &halves, sizeof halves);
}

// Blocks whose largest element is below this are zero: the reciprocal of their scale would overflow.
constexpr float kLeastElement = 1e-30f;

}  // namespace
}  // namespace pn
