// Any processor: the compiler splits vectors of eight lanes into what it has.
#include "simd.h"

namespace pn {
namespace {

constexpr int kWidth = 8;
typedef uint16_t bfloat;
typedef Lanes<8>::Floats vf;
typedef Lanes<8>::Ints vi;

inline vf fma(vf a, vf b, vf c) { return a * b + c; }
inline vf halves_at(const uint8_t* from) {
    vf value;
    for (int lane = 0; lane < kWidth; ++lane) {
        uint16_t half;
        __builtin_memcpy(&half, from + lane * 2, 2);
        value[lane] = half_to_float(half);
    }
    return value;
}

}  // namespace
}  // namespace pn

#include "lanes8.inl"

namespace pn {
namespace {

// No integer products: codes are expanded.
template <class T>
constexpr int kMaxWide = 0;
template <class T>
constexpr void (*kPlanes)(const void*, int, void*) = nullptr;
template <int Rows, int Format>
inline void wide_tile(const PnPanel&, const uint8_t*, const uint8_t*, int64_t, int, float (*)[kWide], bool) {}

}  // namespace
}  // namespace pn

#include "kernels.inl"

namespace pn {

const Kernels* portable_kernels(int dtype) { return dtype == PN_F32 ? table<float>("portable") : table<bfloat>("portable"); }

}  // namespace pn
