// AVX-512 with byte dot products, compiled with and without instructions for bfloat16 (__AVX512BF16__). What they would round
// otherwise than other instruction sets do is left to them in products with dense bfloat16 matrices only.
#include <immintrin.h>

#include "simd.h"

namespace pn {
namespace {

constexpr int kWidth = 16;
constexpr int kMaxTile = 6;   // 24 sums, 4 weights, 1 activation: of 32 registers
constexpr int kManyRows = 3;  // of a dense tile that waits for memory less than it computes
typedef uint16_t bfloat;
typedef Lanes<16>::Floats vf;
typedef Lanes<16>::Ints vi;

inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf widen(const bfloat* from) {
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
}
#ifdef __AVX512BF16__
inline void narrow(bfloat* to, vf value) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(value)); }
#else
inline void narrow(bfloat* to, vf value) { narrow_lanes<16>(to, value); }
#endif

// Both elements of sixteen neighbouring pairs of bfloat16.
inline __m512 first_of(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline __m512 second_of(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int32_t(0xffff0000u))));
}

// As an instruction of its own: the compiler takes a function that only prefetches for one that does nothing.
#define PN_ASK_TO_WRITE
inline void ask_to_write(const void* at) { asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(at))); }

// The sums of four vectors, by one fixed tree.
inline __m128 sums_of(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// What is multiplied at once: 32 bfloat16, a whole block, or 16 floats, half of one.
template <class T>
struct Step;

template <>
struct Step<bfloat> {
    typedef __m512i Vector;
    static constexpr int kPerBlock = 1;
    static Vector load(const bfloat* from) { return _mm512_loadu_si512(from); }
    static __m512 multiply(__m512 sum, Vector a, Vector b) {
#ifdef __AVX512BF16__
        return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
        return _mm512_fmadd_ps(second_of(a), second_of(b), _mm512_fmadd_ps(first_of(a), first_of(b), sum));
#endif
    }
};

template <>
struct Step<float> {
    typedef __m512 Vector;
    static constexpr int kPerBlock = 2;
    static Vector load(const float* from) { return _mm512_loadu_ps(from); }
    static __m512 multiply(__m512 sum, Vector a, Vector b) { return _mm512_fmadd_ps(a, b, sum); }
};

// Four rows of weights, step by step; `row_stride` apart, blocks `block_stride` apart.
template <class T>
struct Dense {
    const T* weights;
    int64_t row_stride, block_stride;
    unsigned lanes_ahead;
    bool is_far;
    void get(int block, int part, typename Step<T>::Vector (&out)[kGroup]) const {
        const T* at = weights + block * block_stride + part * kWidth;
        each<kGroup>([&](auto lane) {
            out[lane] = Step<T>::load(at + lane * row_stride);
            if (lanes_ahead >> lane & 1) ask_for_weights(at + lane * row_stride, is_far);
        });
    }
};

// Products of `Rows` rows of x with a group.
template <int Rows, class T, class Source>
inline void run_tile(const Source& source, int num_blocks, const T* x, int64_t ldx, float (*sums)[kGroup]) {
    __m512 acc[Rows][kGroup];
    each<Rows>([&](auto row) { each<kGroup>([&](auto lane) { acc[row][lane] = _mm512_setzero_ps(); }); });
    for (int block = 0; block < num_blocks; ++block)
        for (int part = 0; part < Step<T>::kPerBlock; ++part) {
            typename Step<T>::Vector weights[kGroup];
            source.get(block, part, weights);
            each<Rows>([&](auto row) {
                const auto value = Step<T>::load(x + row * ldx + block * kBlock + part * kWidth);
                each<kGroup>(
                    [&](auto lane) { acc[row][lane] = Step<T>::multiply(acc[row][lane], value, weights[lane]); });
            });
        }
    each<Rows>(
        [&](auto row) { _mm_storeu_ps(sums[row], sums_of(acc[row][0], acc[row][1], acc[row][2], acc[row][3])); });
}

template <int Rows, class T>
inline void tile(const T* weights, int64_t row_stride, int64_t block_stride, int num_blocks, const T* x, int64_t ldx,
                 float (*sums)[kGroup], unsigned ahead) {
    const bool is_far = Rows >= kManyRows && asks_far;
    run_tile<Rows>(Dense<T>{weights, row_stride, block_stride, ahead, is_far}, num_blocks, x, ldx, sums);
}

// Neighbouring elements that are multiplied together, times their factors, for every row.
template <int Rows, int Blocks>
PN_INLINE inline void add_products(__m512 (&sums)[Rows][Blocks], const bfloat* pairs, int64_t stride,
                                   const float* factors, int64_t ldfactors) {
    __m512 first[Blocks], second[Blocks];
    each<Blocks>([&](auto block) PN_INLINE {
        const __m512i both = _mm512_loadu_si512(pairs + block * stride);
        first[block] = first_of(both), second[block] = second_of(both);
    });
    each<Rows>([&](auto row) PN_INLINE {
        const __m512 one = _mm512_set1_ps(factors[row * ldfactors]),
                     other = _mm512_set1_ps(factors[row * ldfactors + 1]);
        each<Blocks>([&](auto block) PN_INLINE {
            sums[row][block] =
                _mm512_fmadd_ps(second[block], other, _mm512_fmadd_ps(first[block], one, sums[row][block]));
        });
    });
}
template <int Rows, int Blocks>
PN_INLINE inline void add_products(__m512 (&sums)[Rows][Blocks], const float* values, int64_t stride,
                                   const float* factors, int64_t ldfactors) {
    __m512 value[Blocks];
    each<Blocks>([&](auto block) PN_INLINE { value[block] = _mm512_loadu_ps(values + block * stride); });
    each<Rows>([&](auto row) PN_INLINE {
        const __m512 factor = _mm512_set1_ps(factors[row * ldfactors]);
        each<Blocks>([&](auto block)
                         PN_INLINE { sums[row][block] = _mm512_fmadd_ps(value[block], factor, sums[row][block]); });
    });
}

template <int Rows, int Blocks, class T>
inline void score_keys(const T* keys, const float* queries, int padded, float scale, float* out, int64_t ldout) {
    __m512 sums[Rows][Blocks];
    each<Rows>([&](auto row) { each<Blocks>([&](auto block) { sums[row][block] = _mm512_setzero_ps(); }); });
    for (int at = 0; at < padded; at += kTogether<T>)
        add_products<Rows, Blocks>(sums, keys + at * kKeys, int64_t(padded) * kKeys, queries + at, padded);
    each<Rows>([&](auto row) {
        each<Blocks>([&](auto block) {
            _mm512_storeu_ps(out + row * ldout + block * kKeys, _mm512_mul_ps(sums[row][block], _mm512_set1_ps(scale)));
        });
    });
}

template <int Rows, int Blocks, class T>
inline void weigh_values(const T* values, int padded, int column, const float* weights, int64_t ldweights, int begin,
                         int end, vf (*sums)[Blocks * kBlock / kWidth]) {
    constexpr int kVectors = Blocks * kBlock / kWidth;
    __m512 own[Rows][kVectors];
    each<Rows>([&](auto row) { each<kVectors>([&](auto part) { own[row][part] = sums[row][part]; }); });
    for (int key = begin; key < end; key += kTogether<T>)
        add_products<Rows, kVectors>(own, values + int64_t(key) * padded + column * kTogether<T>, kWidth * kTogether<T>,
                                     weights + key, ldweights);
    each<Rows>([&](auto row) { each<kVectors>([&](auto part) { sums[row][part] = own[row][part]; }); });
}

inline vf halves_at(const uint8_t* from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
inline vf factors_at(const uint8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
}

}  // namespace
}  // namespace pn

#include "unpack.inl"

namespace pn {
namespace {

// ---- quantised matrices ----

template <class T>
constexpr int kMaxWide = sizeof(T) == 2 ? 16 : 0;  // 16 sums, 8 vectors of weights, 2 of scales

inline Bytes look_up(Bytes codes) {
    const __m512i values = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)kTable));
    return (Bytes)_mm512_shuffle_epi8(values, (__m512i)codes);
}

// Read where they stand: a copy would cost an instruction for each product.
typedef int32_t Word __attribute__((may_alias));

template <int Rows, int Format>
inline void wide_tile(const PnPanel& panel, const uint8_t* group, const uint8_t* x, int64_t row_bytes, int num_blocks,
                      float (*sums)[kWide], bool asks_ahead) {
    constexpr Form form = form_of(Format);
    constexpr int kQuarters = 8 / form.halves;  // that share a scale
    __m512 acc[Rows];
    each<Rows>([&](auto row) { acc[row] = _mm512_setzero_ps(); });
    const uint8_t* codes = group;
    const uint8_t* scales = group + panel.codes_bytes;
    const uint8_t* planes = x + panel.first_block * 2 * kBlock;
    const uint8_t* floats = x + num_blocks * 2 * kBlock;
    for (int block = 0; block < panel.num_blocks; ++block, planes += 2 * kBlock, codes += form.code_bytes()) {
        __m512i bytes[8];
        each<8>([&](auto at) { bytes[at] = (__m512i)quarter_of<Format, at>(codes); });
        if (asks_ahead) {
            each<form.bits>([&](auto vector) { ask_for_weights(codes + vector * 64); });
            ask_for_weights(scales + size_t(block) * form.scale_bytes());
        }
        const Scales<Format> weight = scales_of<Format>(panel, scales, block, 0);
        each<Rows>([&](auto row) {
            const Word* inputs = reinterpret_cast<const Word*>(planes + row * row_bytes);
            const RowFloats own = {reinterpret_cast<const Number*>(floats + row * row_bytes), num_blocks};
            const int at_block = panel.first_block + block;
            const __m512 factor = _mm512_set1_ps(own.scale(at_block));
            each<form.halves>([&](auto half) {
                __m512i high = _mm512_setzero_si512(), low = high;
                each<kQuarters>([&](auto index) {
                    constexpr int at = half * kQuarters + index;
                    high = _mm512_dpbusd_epi32(high, bytes[at], _mm512_set1_epi32(inputs[at]));
                    low = _mm512_dpbusd_epi32(low, bytes[at], _mm512_set1_epi32(inputs[8 + at]));
                });
                // The integer is exact, less than 2^28; its conversion rounds, in all instruction sets alike.
                const __m512 exact = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
                const __m512 sum = _mm512_set1_ps(own.sum<form.halves>(at_block, half));
                acc[row] = _mm512_fmadd_ps(exact, _mm512_mul_ps((__m512)weight.scale[half], factor), acc[row]);
                acc[row] = _mm512_fmadd_ps((__m512)weight.minimum[half], sum, acc[row]);
            });
        });
    }
    each<Rows>([&](auto row) { _mm512_storeu_ps(sums[row], acc[row]); });
}

// The bits of the largest magnitude of 32 bfloat16: they are ordered as their values, NaNs behind infinity.
inline uint16_t most_of(__m512i elements) {
    const __m512i size = _mm512_and_si512(elements, _mm512_set1_epi16(0x7fff));
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(size), _mm512_extracti64x4_epi64(size, 1));
    const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return uint16_t(~_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1)))));
}

// Where a row's planes and floats go: those of a block, and from one block to the next.
struct PlanePlaces {
    int8_t* high;
    int8_t* low;
    int64_t block_bytes;
    float* scale;
    float* sum;
    float* half;
    int64_t block_floats, block_halves, next_half;
};

constexpr int kScaled = 16;  // blocks whose floats are made together

// Floats of up to kScaled blocks.
struct BlockFloats {
    uint32_t most[kScaled] = {};                          // bits of the largest element
    float inverse[kScaled], scale[kScaled];               // that make elements whole numbers, and what those are worth
    alignas(64) int32_t halves[kScaled][2] = {};          // sums of the first and of the second sixteen whole numbers
    float sum[kScaled], first[kScaled], second[kScaled];  // the same, times the scale

    void set_scales() {
        // Of NaNs one of them: the scale and all that follows are NaN.
        const __m512 largest = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(most), 16));
        const __mmask16 is_zero = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(kLeastElement), _CMP_LT_OQ);
        const __m512 range = _mm512_set1_ps(float(kPlaneRange));
        _mm512_storeu_ps(inverse, _mm512_mask_mov_ps(_mm512_div_ps(range, largest), is_zero, _mm512_setzero_ps()));
        _mm512_storeu_ps(scale, _mm512_mask_mov_ps(_mm512_div_ps(largest, range), is_zero, _mm512_setzero_ps()));
    }
    void set_sums() {
        const __m512i begin = _mm512_load_si512(halves), end = _mm512_load_si512(halves + kScaled / 2);
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512i one = _mm512_permutex2var_epi32(begin, even, end);
        const __m512i other = _mm512_permutex2var_epi32(begin, _mm512_add_epi32(even, _mm512_set1_epi32(1)), end);
        const __m512 own = _mm512_loadu_ps(scale);
        _mm512_storeu_ps(sum, _mm512_mul_ps(own, _mm512_cvtepi32_ps(_mm512_add_epi32(one, other))));
        _mm512_storeu_ps(first, _mm512_mul_ps(own, _mm512_cvtepi32_ps(one)));
        _mm512_storeu_ps(second, _mm512_mul_ps(own, _mm512_cvtepi32_ps(other)));
    }
};

// 32 elements as whole numbers, of eight neighbours first those at even places, then the others.
inline __m512i whole_numbers(const bfloat* from, __m512 inverse) {
    const __m512i elements = _mm512_loadu_si512(from);
    // Of NaN the conversion makes the least integer, which saturates to -32768: as `rounded` of other units.
    return _mm512_packs_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(first_of(elements), inverse)),
                              _mm512_cvtps_epi32(_mm512_mul_ps(second_of(elements), inverse)));
}

// Their low bytes in order, then their high bytes, which are rounded.
inline __m512i planes_of_numbers(__m512i numbers) {
    const __m512i rounded = _mm512_add_epi16(numbers, _mm512_set1_epi16(128));
    const __m512i bytes = _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaaull, numbers, rounded);
    const __m128i order = _mm_setr_epi8(0, 8, 2, 10, 4, 12, 6, 14, 1, 9, 3, 11, 5, 13, 7, 15);
    const __m512i quarters = _mm512_shuffle_epi8(bytes, _mm512_broadcast_i32x4(order));
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), quarters);
}

// Sums of the first and of the second sixteen of 32 numbers.
inline __m128i half_sums(__m512i numbers) {
    const __m512i pairs = _mm512_madd_epi16(numbers, _mm512_set1_epi16(1));
    const __m256i fours = _mm256_hadd_epi32(_mm512_castsi512_si256(pairs), _mm512_extracti64x4_epi64(pairs, 1));
    const __m256i eights = _mm256_hadd_epi32(fours, fours);
    return _mm_add_epi32(_mm256_castsi256_si128(eights), _mm256_extracti128_si256(eights, 1));
}

inline void write_planes(const void* x, int num_blocks, PlanePlaces to) {
    const bfloat* from = static_cast<const bfloat*>(x);
    for (int begin = 0; begin < num_blocks; begin += kScaled, from += kScaled * kBlock) {
        const int count = num_blocks - begin < kScaled ? num_blocks - begin : kScaled;
        BlockFloats floats;
        for (int block = 0; block < count; ++block)
            floats.most[block] = most_of(_mm512_loadu_si512(from + block * kBlock));
        floats.set_scales();
        for (int block = 0; block < count; ++block) {
            const __m512i numbers = whole_numbers(from + block * kBlock, _mm512_set1_ps(floats.inverse[block]));
            const __m512i bytes = planes_of_numbers(numbers);
            _mm256_storeu_si256((__m256i*)to.low, _mm512_castsi512_si256(bytes));
            _mm256_storeu_si256((__m256i*)to.high, _mm512_extracti64x4_epi64(bytes, 1));
            _mm_storel_epi64((__m128i*)floats.halves[block], half_sums(numbers));
            to.high += to.block_bytes, to.low += to.block_bytes;
        }
        floats.set_sums();
        for (int block = 0; block < count; ++block) {
            *to.scale = floats.scale[block], *to.sum = floats.sum[block];
            to.half[0] = floats.first[block], to.half[to.next_half] = floats.second[block];
            to.scale += to.block_floats, to.sum += to.block_floats, to.half += to.block_halves;
        }
    }
}

// For each block 32 high bytes, then 32 low ones, both signed: together the sixteen-bit number.
inline void planes_of(const void* x, int padded_cols, void* out) {
    const int num_blocks = padded_cols / kBlock;
    int8_t* bytes = static_cast<int8_t*>(out);
    float* floats = reinterpret_cast<float*>(bytes + num_blocks * 2 * kBlock);
    write_planes(x, num_blocks,
                 {bytes, bytes + kBlock, 2 * kBlock, floats, floats + num_blocks, floats + 2 * num_blocks, 1, 2, 1});
}

template <class T>
constexpr void (*kPlanes)(const void*, int, void*) = sizeof(T) == 2 ? planes_of : nullptr;

}  // namespace
}  // namespace pn

#include "kernels.inl"
