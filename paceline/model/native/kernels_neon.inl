// AArch64's vectors of four floats, with what the including unit was compiled for: __ARM_FEATURE_MATMUL_INT8 (usmmla),
// __ARM_FEATURE_DOTPROD (sdot), or neither, which every processor has. Sums of integers are exact, so all three have the same bits;
// floats are added in the eight lanes of AVX2. Instructions for bfloat16 would round otherwise and are not used.
#include "simd.h"

#include <arm_neon.h>

namespace pn {
namespace {

constexpr int kWidth = 4;
typedef uint16_t bfloat;
typedef Lanes<4>::Floats vf;
typedef Lanes<4>::Ints vi;

inline vf fma(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
inline vf halves_at(const uint8_t* from) { return (vf)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from))); }
inline vf factors_at(const uint8_t* from) {
    int32_t four;
    __builtin_memcpy(&four, from, sizeof four);
    return (vf)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(uint32_t(four))))));
}

}  // namespace
}  // namespace pn

#include "lanes8.inl"
#include "unpack.inl"

namespace pn {
namespace {

// ---- quantised matrices ----

inline Bytes look_up(Bytes codes) { return (Bytes)vqtbl1q_u8(vld1q_u8(kTable), (uint8x16_t)codes); }

// The weights of a step are eight neighbouring columns of eight rows: of four rows each, two quarters of a block. A row's inputs
// for them are sixteen bytes. Sums are whole numbers for eight rows, which `totals` makes four by four.
constexpr int kHalf = 8;

#if defined(__ARM_FEATURE_DOTPROD) || defined(__ARM_FEATURE_MATMUL_INT8)

// Inputs of a step: eight high bytes, then eight low ones, both signed: together the sixteen-bit numbers.
inline void put_inputs(int16x8_t words, void* to) {
    const int8x8_t high = vmovn_s16(vshrq_n_s16(vaddq_s16(words, vdupq_n_s16(128)), 8));
    vst1q_s8(static_cast<int8_t*>(to), vcombine_s8(high, vmovn_s16(words)));
}

#endif

#if defined(__ARM_FEATURE_MATMUL_INT8)

template <class T>
constexpr int kMaxWide =
    sizeof(T) == 2 ? 4 : 0;  // 16 sums of integers, 8 of floats, 4 vectors of weights, one of inputs

// Two rows of weights times both bytes of the inputs at once.
template <int Format>
struct Step {
    uint8x16_t weights[4];  // of two rows each
    PN_INLINE Step(const uint8x16_t (&first)[2], const uint8x16_t (&second)[2]) {
        each<2>([&](auto four) {
            const uint32x4_t a = vreinterpretq_u32_u8(first[four]), b = vreinterpretq_u32_u8(second[four]);
            weights[2 * four] = vreinterpretq_u8_u32(vzip1q_u32(a, b));
            weights[2 * four + 1] = vreinterpretq_u8_u32(vzip2q_u32(a, b));
        });
    }
};
template <int Format>
struct Sums {
    int32x4_t pairs[4] = {};  // of two rows each: high, low, high, low
    PN_INLINE void add(const Step<Format>& step, const uint8_t* inputs) {
        const int8x16_t x = vreinterpretq_s8_u8(vld1q_u8(inputs));
        each<4>([&](auto two) { pairs[two] = vusmmlaq_s32(pairs[two], step.weights[two], x); });
    }
    PN_INLINE int32x4_t total(int four) const {
        const int32x4_t high = vuzp1q_s32(pairs[2 * four], pairs[2 * four + 1]);
        return vaddq_s32(vshlq_n_s32(high, 8), vuzp2q_s32(pairs[2 * four], pairs[2 * four + 1]));
    }
};

#elif defined(__ARM_FEATURE_DOTPROD)

template <class T>
constexpr int kMaxWide = sizeof(T) == 2 ? 4 : 0;  // 16 sums of integers, 4 vectors of weights, one of inputs

// Codes above 127 are multiplied less 128, and the inputs' own sums 128 times make up for it.
template <int Format>
constexpr bool kIsShifted = form_of(Format).bits == 8 || form_of(Format).has_table;

template <int Format>
struct Step {
    int8x16_t weights[2][2];  // four rows, quarter
    PN_INLINE Step(const uint8x16_t (&first)[2], const uint8x16_t (&second)[2]) {
        const uint8x16_t shift = vdupq_n_u8(kIsShifted<Format> ? 128 : 0);
        each<2>([&](auto four) {
            weights[four][0] = vreinterpretq_s8_u8(veorq_u8(first[four], shift));
            weights[four][1] = vreinterpretq_s8_u8(veorq_u8(second[four], shift));
        });
    }
};
template <int Format>
struct Sums {
    int32x4_t high[2] = {}, low[2] = {};
    int32x4_t inputs_alone = {};  // two sums of high bytes, two of low ones
    PN_INLINE void add(const Step<Format>& step, const uint8_t* inputs) {
        const int8x16_t x = vreinterpretq_s8_u8(vld1q_u8(inputs));
        each<2>([&](auto four) {
            high[four] = vdotq_laneq_s32(high[four], step.weights[four][0], x, 0);
            high[four] = vdotq_laneq_s32(high[four], step.weights[four][1], x, 1);
            low[four] = vdotq_laneq_s32(low[four], step.weights[four][0], x, 2);
            low[four] = vdotq_laneq_s32(low[four], step.weights[four][1], x, 3);
        });
        if constexpr (kIsShifted<Format>) inputs_alone = vdotq_s32(inputs_alone, vdupq_n_s8(1), x);
    }
    PN_INLINE int32x4_t total(int four) const {
        const int32x4_t sum = vaddq_s32(vshlq_n_s32(high[four], 8), low[four]);
        if constexpr (!kIsShifted<Format>) return sum;
        const int32x2_t both = vpadd_s32(vget_low_s32(inputs_alone), vget_high_s32(inputs_alone));
        return vaddq_s32(sum, vdupq_n_s32(((vget_lane_s32(both, 0) << 8) + vget_lane_s32(both, 1)) << 7));
    }
};

#else

template <class T>
constexpr int kMaxWide = sizeof(T) == 2 ? 4 : 0;  // 16 sums of integers, 8 vectors of weights, some of inputs

// Inputs of a step: sixteen-bit numbers in the order 0, 2, 1, 3 of each quarter's columns: the even bytes of weights, widened, meet
// the first two, the odd ones the others.
inline void put_inputs(int16x8_t words, void* to) {
    const uint8_t order[16] = {0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15};
    vst1q_u8(static_cast<uint8_t*>(to), vqtbl1q_u8(vreinterpretq_u8_s16(words), vld1q_u8(order)));
}

template <int Format>
struct Step {
    int16x8_t weights[2][4];  // four rows; even and odd columns of both quarters
    PN_INLINE Step(const uint8x16_t (&first)[2], const uint8x16_t (&second)[2]) {
        each<2>([&](auto four) {
            const uint16x8_t a = vreinterpretq_u16_u8(first[four]), b = vreinterpretq_u16_u8(second[four]);
            weights[four][0] = vreinterpretq_s16_u16(vandq_u16(a, vdupq_n_u16(255)));
            weights[four][1] = vreinterpretq_s16_u16(vshrq_n_u16(a, 8));
            weights[four][2] = vreinterpretq_s16_u16(vandq_u16(b, vdupq_n_u16(255)));
            weights[four][3] = vreinterpretq_s16_u16(vshrq_n_u16(b, 8));
        });
    }
};
template <int Format>
struct Sums {
    int32x4_t upper[2] = {}, lower[2] = {};  // two rows each: two sums side by side
    PN_INLINE void add(const Step<Format>& step, const uint8_t* inputs) {
        const int32x4_t pairs = vreinterpretq_s32_u8(vld1q_u8(inputs));
        each<4>([&](auto at) {
            const int16x8_t x = vreinterpretq_s16_s32(vdupq_laneq_s32(pairs, at));
            each<2>([&](auto four) {
                upper[four] = vmlal_s16(upper[four], vget_low_s16(step.weights[four][at]), vget_low_s16(x));
                lower[four] = vmlal_high_s16(lower[four], step.weights[four][at], x);
            });
        });
    }
    PN_INLINE int32x4_t total(int four) const { return vpaddq_s32(upper[four], lower[four]); }
};

#endif

// Half of the sixteen rows of a group, from `first` on: 32 of the 64 bytes of each of its vectors.
template <int Rows, int Format>
inline void half_tile(const PnPanel& panel, const uint8_t* group, int first, const uint8_t* x, int64_t row_bytes,
                      int num_blocks, float (*sums)[kWide], bool asks_ahead) {
    constexpr Form form = form_of(Format);
    constexpr int kSteps = 4 / form.halves;  // that share a scale
    vf acc[Rows][2];
    each<Rows>([&](auto row) { acc[row][0] = acc[row][1] = vf{}; });
    const uint8_t* codes = group + first * 4;
    const uint8_t* scales = group + panel.codes_bytes;
    const uint8_t* inputs = x + panel.first_block * 2 * kBlock;
    const uint8_t* floats = x + num_blocks * 2 * kBlock;
    for (int block = 0; block < panel.num_blocks; ++block, inputs += 2 * kBlock, codes += form.code_bytes()) {
        if (asks_ahead) each<form.bits>([&](auto vector) { __builtin_prefetch(codes + vector * 64 + kAhead); });
        const Scales<Format> weight[2] = {scales_of<Format>(panel, scales, block, first),
                                          scales_of<Format>(panel, scales, block, first + kWidth)};
        each<form.halves>([&](auto half) {
            Sums<Format> whole[Rows];
            each<kSteps>([&](auto index) {
                constexpr int at = decltype(half)::value * kSteps + decltype(index)::value;
                uint8x16_t quarters[2][2];
                each<2>([&](auto four) {
                    quarters[0][four] = (uint8x16_t)quarter_of<Format, 2 * at>(codes + four * 16);
                    quarters[1][four] = (uint8x16_t)quarter_of<Format, 2 * at + 1>(codes + four * 16);
                });
                const Step<Format> step(quarters[0], quarters[1]);
                each<Rows>([&](auto row) { whole[row].add(step, inputs + row * row_bytes + at * 16); });
            });
            each<Rows>([&](auto row) {
                const RowFloats own = {reinterpret_cast<const Number*>(floats + row * row_bytes), num_blocks};
                const int at_block = panel.first_block + block;
                const vf factor = (vf)vdupq_n_f32(own.scale(at_block));
                const vf sum = (vf)vdupq_n_f32(own.template sum<form_of(Format).halves>(at_block, half));
                each<2>([&](auto four) {
                    const vf exact = (vf)vcvtq_f32_s32(whole[row].total(four));
                    acc[row][four] = fma(exact, weight[four].scale[half] * factor, acc[row][four]);
                    acc[row][four] = fma(weight[four].minimum[half], sum, acc[row][four]);
                });
            });
        });
    }
    each<Rows>([&](auto row) { __builtin_memcpy(sums[row] + first, acc[row], sizeof acc[row]); });
}

template <int Rows, int Format>
inline void wide_tile(const PnPanel& panel, const uint8_t* group, const uint8_t* x, int64_t row_bytes, int num_blocks,
                      float (*sums)[kWide], bool asks_ahead) {
    half_tile<Rows, Format>(panel, group, 0, x, row_bytes, num_blocks, sums, asks_ahead);
    half_tile<Rows, Format>(panel, group, kHalf, x, row_bytes, num_blocks, sums, false);
}

// The bits of the largest magnitude of 32 bfloat16: they are ordered as their values, NaNs behind infinity.
inline uint16_t most_of(const bfloat* from) {
    uint16x8_t most = {};
    for (int at = 0; at < kBlock; at += 8) most = vmaxq_u16(most, vandq_u16(vld1q_u16(from + at), vdupq_n_u16(0x7fff)));
    return vmaxvq_u16(most);
}

// To the nearest, ties to even; what is no number is the least one, as x86 has it.
inline int16x4_t whole_of(vf value) {
    const float32x4_t given = (float32x4_t)value;
    const int32x4_t rounded = vbslq_s32(vceqq_f32(given, given), vcvtnq_s32_f32(given), vdupq_n_s32(INT32_MIN));
    return vqmovn_s32(rounded);
}

inline void planes_of(const void* x, int padded_cols, void* out) {
    const bfloat* from = static_cast<const bfloat*>(x);
    const int num_blocks = padded_cols / kBlock;
    uint8_t* bytes = static_cast<uint8_t*>(out);
    float* scales = reinterpret_cast<float*>(bytes + num_blocks * 2 * kBlock);
    for (int block = 0; block < num_blocks; ++block, from += kBlock, bytes += 2 * kBlock) {
        const float most =
            bfloat_to_float(most_of(from));  // of NaNs one of them: the scale and all that follows are NaN
        const bool is_zero = most < kLeastElement;
        const vf inverse = (vf)vdupq_n_f32(is_zero ? 0.0f : float(kPlaneRange) / most);
        int32_t totals[2] = {};
        for (int at = 0; at < kBlock; at += 8) {
            const int16x8_t words =
                vcombine_s16(whole_of(widen(from + at) * inverse), whole_of(widen(from + at + kWidth) * inverse));
            put_inputs(words, bytes + at * 2);
            totals[at / 16] += vaddlvq_s16(words);
        }
        scales[block] = is_zero ? 0.0f : most / float(kPlaneRange);
        scales[num_blocks + block] = scales[block] * float(totals[0] + totals[1]);
        for (int half = 0; half < 2; ++half)
            scales[2 * (num_blocks + block) + half] = scales[block] * float(totals[half]);
    }
}

template <class T>
constexpr void (*kPlanes)(const void*, int, void*) = sizeof(T) == 2 ? planes_of : nullptr;

}  // namespace
}  // namespace pn

#include "kernels.inl"
