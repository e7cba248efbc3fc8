// The kernels, written once over the vector type of the including translation unit, which defines before this, in pn's anonymous
// namespace: kWidth, vf and vi (vectors of kWidth floats and int32), bfloat, fma, widen, narrow, PN_ASK_TO_WRITE where there is an
// instruction for it (ask_to_write), and for both element types
//   template <int Rows> void tile(weights, row_stride, block_stride, num_blocks, x, ldx, float (*sums)[kGroup], unsigned ahead);
//       sums[row][lane] = x[row] . weights[lane]; kMaxTile is the most rows that the registers hold; bit i of `ahead`: ask for
//       what comes kAhead behind lane i
//   template <int Rows, int Blocks> void score_keys(keys, queries, padded, scale, out, ldout);     Blocks x kKeys scores for each
//       row; queries are floats, `padded` apart
//   template <int Rows, int Blocks> void weigh_values(values, padded, column, weights, ldweights, begin, end, vf (*sums)[...]);
//       Blocks x kBlock columns, added to sums key by key; weights are floats
//   template <class T> constexpr int kMaxWide;     most rows that wide_tile takes; 0: it has none, and kPlanes<T> is null
//   template <int Rows, int Format> void wide_tile(panel, group, x, row_bytes, num_blocks, sums, asks_ahead);     sums[row][16] of
//       planes
// Everything is in an anonymous namespace: code compiled for one instruction set must never be linked into another.

namespace pn {
namespace {

#ifndef PN_ASK_TO_WRITE
inline void ask_to_write(const void* at) { __builtin_prefetch(at, 1); }
#endif
#ifndef PN_FMA_ROUNDS_TWICE  // where `fma` does, the unit has defined this
inline vf fused(vf a, vf b, vf c) { return fma(a, b, c); }
#endif

inline vf load(const float* from) {
    vf value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}
inline void store(float* to, vf value) { __builtin_memcpy(to, &value, sizeof value); }
inline vf splat(float value) { return vf{} + value; }

inline float sum_of(vf value) {  // one fixed tree
    float lanes[kWidth];
    __builtin_memcpy(lanes, &value, sizeof value);
    for (int half = kWidth / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

// A sum over many elements in sixteen lanes, which is the same whatever the width of the vectors.
struct LaneSum {
    vf lanes[kWide / kWidth] = {};
    vf& at(int index) { return lanes[index / kWidth % (kWide / kWidth)]; }
    float total() {
        for (int half = kWide / kWidth / 2; half > 0; half /= 2)
            for (int index = 0; index < half; ++index) lanes[index] += lanes[index + half];
        return sum_of(lanes[0]);
    }
};

inline float max_of(vf value) {
    float best = value[0];
    for (int lane = 1; lane < kWidth; ++lane) best = value[lane] > best ? value[lane] : best;
    return best;
}
inline float max_of_numbers(vf value) {  // sooner, where none is NaN
    float lanes[kWidth];
    __builtin_memcpy(lanes, &value, sizeof value);
    for (int half = kWidth / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane)
            lanes[lane] = lanes[lane + half] > lanes[lane] ? lanes[lane + half] : lanes[lane];
    return lanes[0];
}

inline vf larger(vf a, vf b) { return a > b ? a : b; }
inline vf smaller(vf a, vf b) { return a < b ? a : b; }

// e^x: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] (Cephes' coefficients); exactly 0 below -87.
inline vf exp_of(vf x) {
    const vf clamped = smaller(larger(x, splat(-87.0f)), splat(88.0f));
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const vf n = fused(clamped, splat(1.44269504088896341f), magic) - magic;
    // ln 2 in two parts: n times the first, of few bits, is exact.
    const vf r = fused(n, splat(2.12194440e-4f), fused(n, splat(-0.693359375f), clamped));
    vf p = splat(1.9875691500e-4f);
    p = fused(p, r, splat(1.3981999507e-3f));
    p = fused(p, r, splat(8.3334519073e-3f));
    p = fused(p, r, splat(4.1665795894e-2f));
    p = fused(p, r, splat(1.6666665459e-1f));
    p = fused(p, r, splat(5.0000001201e-1f));
    p = fused(p, r * r, r + splat(1.0f));
    const vi scale = (__builtin_convertvector(n, vi) + 127) << 23;  // 2^n, as exponent bits
    vf power;
    __builtin_memcpy(&power, &scale, sizeof power);
    return x < splat(-87.0f) ? splat(0.0f) : p * power;
}

inline void put(float* out, int index, float value) { out[index] = value; }
inline void put(bfloat* out, int index, float value) { out[index] = float_to_bfloat(value); }
inline float get(const float* from) { return *from; }
inline float get(const bfloat* from) { return bfloat_to_float(*from); }
inline void put_vector(float* out, vf value) { store(out, value); }
inline vf get_vector(const float* from) { return load(from); }
inline vf get_vector(const bfloat* from) { return widen(from); }
inline void put_vector(bfloat* out, vf value) { narrow(out, value); }

// Rows of a buffer whose length is no multiple of the vector: the tail goes through a zero-padded copy, so that every element
// meets the same instructions wherever it stands.
template <class T>
inline vf get_part(const T* from, int count) {
    T lanes[kWidth] = {};
    __builtin_memcpy(lanes, from, size_t(count) * sizeof(T));
    return get_vector(lanes);
}
template <class T>
inline void put_part(T* out, vf value, int count) {
    T lanes[kWidth];
    put_vector(lanes, value);
    __builtin_memcpy(out, lanes, size_t(count) * sizeof(T));
}
template <class T>
inline vf get_upto(const T* from, int left) {
    return left >= kWidth ? get_vector(from) : get_part(from, left);
}
template <class T>
inline void put_upto(T* out, vf value, int left) {
    if (left >= kWidth) put_vector(out, value);
    else put_part(out, value, left);
}

// NaN stays one, which exp_of would hide.
inline vf capped(vf x, float cap) {
    const vf e = exp_of(x * splat(2.0f / cap));
    const vf y = splat(cap) - splat(2.0f * cap) / (e + splat(1.0f));
    return x == x ? y : x;
}

inline void scale_and_cap(float* x, int size, float scale, float cap) {
    for (int at = 0; at < size; at += kWidth) {
        const vf scaled = get_upto(x + at, size - at) * splat(scale);
        put_upto(x + at, cap != 0.0f ? capped(scaled, cap) : scaled, size - at);
    }
}

// ---- matrix products ----

inline int element_format(const float*) { return PN_F32; }
inline int element_format(const bfloat*) { return PN_BF16; }

// A dense part of another type: bfloat16 weights for float32 products, or halves. (float32 weights are rounded when packed.)
template <class T>
void expand_dense(const PnPart& part, const PnPanel& panel, const uint8_t* group, T* out) {
    const uint16_t* from = reinterpret_cast<const uint16_t*>(group);
    const int count = panel.num_blocks * kGroup * kBlock;
    for (int at = 0; at < count; at += kWidth) {
        __builtin_prefetch(group + size_t(at) * 2 + kAhead);
        put_vector(out + at, part.format == PN_F16 ? halves_at(group + size_t(at) * 2) : widen(from + at));
    }
}
inline float half_at(const uint8_t* scales, int index) {
    uint16_t half;
    __builtin_memcpy(&half, scales + index * 2, 2);
    return half_to_float(half);
}

// One row's weights of a block of a quantised panel. Products with whole numbers are exact, or rounded once as ggml's are.
inline void block_weights(const Form& form, const PnPanel& panel, const uint8_t* group, int block, int slot,
                          float* out) {
    const uint8_t* codes = group + size_t(block) * form.code_bytes();
    const uint8_t* scales = group + panel.codes_bytes + size_t(block) * form.scale_bytes();
    const uint8_t* super = group + panel.codes_bytes + size_t(panel.num_blocks) * form.scale_bytes() +
                           size_t(block / kSuper) * form.super_bytes();
    const auto factor = [&](int kind) { return float(int8_t(scales[kind * kWide + slot])); };
    for (int col = 0; col < kBlock; ++col) {
        const int half = form.halves == 2 ? col / (kBlock / 2) : 0, code = code_at(form, codes, slot, col);
        const float scale = form.has_super ? half_at(super, slot) * factor(half) : half_at(scales, slot);
        if (!form.has_minima) out[col] = scale * float(code - form.offset);
        else if (form.has_super) out[col] = float(code) * scale - half_at(super, kWide + slot) * factor(form.halves);
        else out[col] = float(code) * scale + half_at(scales, kWide + slot);
    }
}

// Four rows of a quantised group, from `first` on, as elements [block][4][32] of the type that is multiplied.
template <class T>
void expand_codes(const PnPart& part, const PnPanel& panel, const uint8_t* group, int first, T* out) {
    const Form form = form_of(part.format);
    for (int block = 0; block < panel.num_blocks; ++block)
        for (int slot = first; slot < first + kGroup; ++slot, out += kBlock) {
            float values[kBlock];
            block_weights(form, panel, group, block, slot, values);
            for (int at = 0; at < kBlock; at += kWidth) put_vector(out + at, load(values + at));
        }
}

typedef float Four __attribute__((vector_size(16)));

struct Output {
    float* y;
    int64_t ldy;
    int column, num_columns;
    bool accumulate;
    const float* bias;

    // Another processor has read what stood there: the line is fetched back while the sums are made, else everything waits for it.
    void ask_for_rows(int first, int count, int columns_on = 0) const {
        for (int row = first; row < first + count; ++row) ask_to_write(y + row * ldy + columns_on);
    }

    // Sixteen columns, a vector at a time.
    void write_wide(int row, const float* sums) const {
        float* to = y + row * ldy;
        for (int at = 0; at < kWide; at += kWidth) {
            const int left = num_columns - column - at;
            if (left <= 0) return;
            vf value = load(sums + at);
            if (bias) value += get_upto(bias + column + at, left);
            if (accumulate) value += get_upto(to + at, left);
            put_upto(to + at, value, left);
        }
    }

    void write(int row, const float* sums) const {
        float* to = y + row * ldy;
        if (num_columns - column >= kGroup) {
            Four value, old;
            __builtin_memcpy(&value, sums, sizeof value);
            if (bias) {
                __builtin_memcpy(&old, bias + column, sizeof old);
                value += old;
            }
            if (accumulate) {
                __builtin_memcpy(&old, to, sizeof old);
                value += old;
            }
            __builtin_memcpy(to, &value, sizeof value);
            return;
        }
        for (int lane = 0; lane < num_columns - column; ++lane) {
            const float value = bias ? sums[lane] + bias[column + lane] : sums[lane];
            to[lane] = accumulate ? to[lane] + value : value;
        }
    }
};

// The rows of one panel's inputs.
template <class T>
struct Inputs {
    const T* x;
    int64_t ldx;
    int num_rows;
};

template <class T, int Rows>
inline void rows_of(const T* weights, int num_blocks, const Inputs<T>& in, int row, const Output& output,
                    unsigned ahead) {
    float sums[Rows][kGroup];
    tile<Rows>(weights, kBlock, kGroup * kBlock, num_blocks, in.x + row * in.ldx, in.ldx, sums, ahead);
    for (int index = 0; index < Rows; ++index) output.write(row + index, sums[index]);
}

// Which lanes of a group a tile asks ahead for: the tiles of a group take turns, so that memory is never idle.
inline unsigned lanes_ahead(int tile_index, int num_tiles) {
    unsigned lanes = 0;
    for (int lane = 0; lane < kGroup; ++lane)
        if (lane % num_tiles == tile_index) lanes |= 1u << lane;
    return lanes;
}

// Four rows of weights [block][4][32]; only those in memory are worth asking ahead for.
template <class T>
inline void multiply_group(const T* weights, int blocks, bool in_memory, const Inputs<T>& in, const Output& output) {
    const int num_tiles = (in.num_rows + kMaxTile - 1) / kMaxTile;
    int row = 0;
    for (int index = 0; index < num_tiles; ++index) {
        // Even tiles: seven rows are four and three rather than six and one.
        const int size = (in.num_rows - row + num_tiles - index - 1) / (num_tiles - index);
        const unsigned ahead = in_memory ? lanes_ahead(index, num_tiles < kGroup ? num_tiles : kGroup) : 0;
        if (size == 1) rows_of<T, 1>(weights, blocks, in, row, output, ahead);
        if (size == 2) rows_of<T, 2>(weights, blocks, in, row, output, ahead);
        if constexpr (kMaxTile > 2) {
            if (size == 3) rows_of<T, 3>(weights, blocks, in, row, output, ahead);
            if (size == 4) rows_of<T, 4>(weights, blocks, in, row, output, ahead);
            if (size == 5) rows_of<T, 5>(weights, blocks, in, row, output, ahead);
            if (size == 6) rows_of<T, 6>(weights, blocks, in, row, output, ahead);
        }
        row += size;
    }
}

// One quantised group by planes, `size` rows from `row` on.
struct WideRows {
    const PnPanel& panel;
    const uint8_t* group;
    const uint8_t* x;  // of the part's first block
    int64_t row_bytes;
    int num_blocks;  // of the part
    bool asks_ahead;
};
template <int Rows, int Format>
inline void wide_rows(const WideRows& in, int row, const Output& output) {
    float sums[Rows][kWide];
    wide_tile<Rows, Format>(in.panel, in.group, in.x + row * in.row_bytes, in.row_bytes, in.num_blocks, sums,
                            in.asks_ahead);
    for (int index = 0; index < Rows; ++index) output.write_wide(row + index, sums[index]);
}
template <int Most, int Format>
inline void few_rows(const WideRows& in, int row, int size, const Output& output) {
    if constexpr (Most > 0) {
        if (size == Most) wide_rows<Most, Format>(in, row, output);
        else few_rows<Most - 1, Format>(in, row, size, output);
    }
}

// All rows with one group: as many as the registers hold, then up to eight. Tiles of every size in between would be a lot of code.
template <class T, int Format>
void wide_group(const Product& product, const PnPanel& panel, const uint8_t* group, const Output& output) {
    if constexpr (kMaxWide<T> > 0) {
        constexpr int most = form_of(Format).halves == 2 ? kMaxWide<T> * 3 / 4 : kMaxWide<T>;  // two scales and minima
        constexpr int few = most < 8 ? most : 8;
        for (int row = 0, size; row < product.num_rows; row += size) {
            const WideRows in = {
                panel,   group, static_cast<const uint8_t*>(product.x), product.row_bytes, product.part->num_blocks,
                row == 0};
            const int left = product.num_rows - row;
            size = left >= most ? most : left > few ? (left + 1) / 2 : left;
            output.ask_for_rows(row, size);
            if (size == most) wide_rows<most, Format>(in, row, output);
            else few_rows<few, Format>(in, row, size, output);
        }
    }
}

// visit(format), the format a constant.
template <class Visit>
void with_format(int format, Visit visit) {
    switch (format) {
        case PN_Q4_0:
            return visit(std::integral_constant<int, PN_Q4_0>());
        case PN_Q4_1:
            return visit(std::integral_constant<int, PN_Q4_1>());
        case PN_Q5_0:
            return visit(std::integral_constant<int, PN_Q5_0>());
        case PN_Q5_1:
            return visit(std::integral_constant<int, PN_Q5_1>());
        case PN_Q8_0:
            return visit(std::integral_constant<int, PN_Q8_0>());
        case PN_Q4_K:
            return visit(std::integral_constant<int, PN_Q4_K>());
        case PN_Q5_K:
            return visit(std::integral_constant<int, PN_Q5_K>());
        case PN_Q6_K:
            return visit(std::integral_constant<int, PN_Q6_K>());
        case PN_IQ4_NL:
            return visit(std::integral_constant<int, PN_IQ4_NL>());
        case PN_IQ4_XS:
            return visit(std::integral_constant<int, PN_IQ4_XS>());
    }
}

// Instruction sets without matrix tiles; tiled.inl has the others.
struct NoTiles {
    static constexpr bool is_always = false;  // with any number of rows; else where they stand in chunks
    static constexpr int (*chunk_rows)(int, int) = nullptr;
    static constexpr void (*planes)(const void*, int, int, int, void*) = nullptr;
    static void begin(int, int) {}
    static void end() {}
    template <int Format>
    static int groups(const Product&, const PnPanel&, const uint8_t*, int, void*, const Output&) {
        return 1;
    }
};

template <class T, class Tiled = NoTiles>
void multiply(const Product& product, void* scratch) {
    const PnPart& part = *product.part;
    const bool is_tiled = !part.is_dense() && (Tiled::is_always || product.chunk_rows > 0);
    const bool has_integers = is_tiled || (!part.is_dense() && kMaxWide<T> > 0);
    if (is_tiled) Tiled::begin(part.format, product.chunk_rows);
    for (const PnPanel& panel : part.panels) {
        const bool is_first = panel.first_block == 0;
        const Inputs<T> in = {static_cast<const T*>(product.x) + panel.first_block * kBlock,
                              product.row_bytes / int64_t(sizeof(T)), product.num_rows};
        for (int group = product.first_group, count = 1; group < product.last_group; group += count) {
            const int column = (group - product.base_group) * part.group_rows;
            // Later panels add to what the first one wrote, bias and residual included.
            Output output = {product.y + column,
                             product.ldy,
                             column,
                             product.num_columns,
                             product.accumulate || !is_first,
                             is_first ? product.bias : nullptr};
            const uint8_t* data = panel.group(group);
            if (part.format == element_format(in.x)) {
                multiply_group(reinterpret_cast<const T*>(data), panel.num_blocks, true, in, output);
            } else if (part.is_dense()) {
                expand_dense(part, panel, data, static_cast<T*>(scratch));
                multiply_group(static_cast<const T*>(scratch), panel.num_blocks, false, in, output);
            } else if (has_integers) {
                with_format(part.format, [&](auto format) {
                    if (is_tiled)
                        count = Tiled::template groups<format>(product, panel, data, product.last_group - group,
                                                               scratch, output);
                    else wide_group<T, format>(product, panel, data, output);
                });
            } else {
                for (int first = 0; first < kWide && output.column < product.num_columns; first += kGroup) {
                    expand_codes(part, panel, data, first, static_cast<T*>(scratch));
                    multiply_group(static_cast<const T*>(scratch), panel.num_blocks, false, in, output);
                    output.column += kGroup, output.y += kGroup;
                }
            }
        }
    }
    if (is_tiled) Tiled::end();
}

}  // namespace
}  // namespace pn

#include "attention.inl"

namespace pn {
namespace {

// ---- the small operations ----

template <class T>
void norm(const float* x, const float* weight, int size, int padded, float eps, void* out) {
    T* to = static_cast<T*>(out);
    LaneSum squares;
    for (int at = 0; at < size; at += kWidth) {
        const vf value = get_upto(x + at, size - at);
        squares.at(at) = fused(value, value, squares.at(at));
    }
    const vf scale = splat(1.0f / __builtin_sqrtf(squares.total() / float(size) + eps));
    for (int at = 0; at < size; at += kWidth)
        put_upto(to + at, get_upto(x + at, size - at) * scale * get_upto(weight + at, size - at), size - at);
    for (int at = size; at < padded; ++at) put(to, at, 0.0f);
}

template <class T>
void convert(const float* x, int size, int padded, void* out) {
    T* to = static_cast<T*>(out);
    for (int at = 0; at < size; at += kWidth) put_upto(to + at, get_upto(x + at, size - at), size - at);
    for (int at = size; at < padded; ++at) put(to, at, 0.0f);
}

inline void norm_floats(const float* x, const float* weight, int size, float eps, float* out) {
    norm<float>(x, weight, size, size, eps, out);
}

inline void add_scaled(const float* x, int size, float scale, float* out) {
    for (int at = 0; at < size; at += kWidth)
        put_upto(out + at, fused(get_upto(x + at, size - at), splat(scale), get_upto(out + at, size - at)), size - at);
}

template <class T>
void gate(const float* gate, const float* up, int size, const Gating& gating, void* out) {
    T* to = static_cast<T*>(out);
    const vf one = splat(1.0f);
    for (int at = 0; at < size; at += kWidth) {
        vf value = get_upto(gate + at, size - at), other = get_upto(up + at, size - at), to_sigmoid = value;
        if (gating.activation ==
            PN_GELU_TANH) {  // (1 + tanh(u)) / 2 = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
            to_sigmoid =
                value * fused(value * value, splat(2.0f * 0.7978845608f * 0.044715f), splat(2.0f * 0.7978845608f));
        } else if (gating.activation == PN_CLAMPED_SWIGLU) {
            const vf limit = splat(gating.limit);
            value = value > limit ? limit : value;  // a NaN stays one
            other = other > limit ? limit : other;
            other = (other < -limit ? -limit : other) + one;
            to_sigmoid = value * splat(gating.alpha);
        }
        put_upto(to + at, value / (one + exp_of(-to_sigmoid)) * other, size - at);
    }
}

template <class T>
void gate_out(const float* gate, int size, void* x) {
    T* to = static_cast<T*>(x);
    for (int at = 0; at < size; at += kWidth) {
        const int left = size - at;
        put_upto(to + at, get_upto(to + at, left) / (splat(1.0f) + exp_of(-get_upto(gate + at, left))), left);
    }
}

inline void convolve(const Convolution& in, float* out) {
    for (int at = 0; at < in.size; at += kWidth) {
        const int left = in.size - at, column = in.first + at;
        vf sum = {};
        for (int tap = 0; tap < in.num_taps; ++tap)
            sum = fused(get_upto(in.kernel + tap * in.kernel_stride + column, left),
                        get_upto(in.rows[tap] + column, left), sum);
        put_upto(out + at, sum / (splat(1.0f) + exp_of(-sum)), left);
    }
}

inline void dots(const float* rows, int64_t stride, int count, const float* x, int size, float* out) {
    for (int row = 0; row < count; ++row) {
        const float* from = rows + row * stride;
        LaneSum sum;
        for (int at = 0; at < size; at += kWidth)
            sum.at(at) = fused(get_upto(from + at, size - at), get_upto(x + at, size - at), sum.at(at));
        out[row] = sum.total();
    }
}

inline void combine(const float* rows, int64_t stride, const float* weights, int count, int size, float* out) {
    constexpr int kVectors = 4;
    int at = 0;
    for (; at + kVectors * kWidth <= size; at += kVectors * kWidth) {
        vf sums[kVectors];
        each<kVectors>([&](auto index) { sums[index] = load(out + at + index * kWidth); });
        for (int row = 0; row < count; ++row) {
            const vf weight = splat(weights[row]);
            const float* from = rows + row * stride + at;
            each<kVectors>([&](auto index) { sums[index] = fused(weight, load(from + index * kWidth), sums[index]); });
        }
        each<kVectors>([&](auto index) { store(out + at + index * kWidth, sums[index]); });
    }
    for (; at < size; at += kWidth) {
        vf sum = get_upto(out + at, size - at);
        for (int row = 0; row < count; ++row)
            sum = fused(splat(weights[row]), get_upto(rows + row * stride + at, size - at), sum);
        put_upto(out + at, sum, size - at);
    }
}

template <class X>
vf mixed(const Mix& mix, int at) {
    const X* x = static_cast<const X*>(mix.x) + at;
    vf sum = {};
    for (int tap = 0; tap < mix.num_taps; ++tap) {
        const vf weight = load(mix.base + int64_t(tap) * mix.size + at) +
                          splat(mix.added[int64_t(tap) * (mix.size / kWide) + at / kWide]);
        sum = fused(weight, get_upto(x - tap * mix.row_stride, kWidth), sum);
    }
    return sum;
}

template <class T>
void mix(const Mix& mix, int padded, void* out) {
    T* to = static_cast<T*>(out);
    for (int at = 0; at < mix.size; at += kWidth) put_upto(to + at, mixed<T>(mix, at), kWidth);
    for (int at = mix.size; at < padded; ++at) put(to, at, 0.0f);
}

inline void add_mixed(const Mix& mix, float* out) {
    for (int at = 0; at < mix.size; at += kWidth) store(out + at, load(out + at) + mixed<float>(mix, at));
}

// Normed when there is a weight, and rotated; `values` has room for head_dim floats.
inline void rotated(const HeadInput& in, float* values) {
    const float* from = in.x;
    if (in.weight) {
        norm<float>(in.x, in.weight, in.head_dim, in.head_dim, in.eps, values);
        from = values;
    }
    const int half = in.rotary_dim / 2;
    if (from != values)
        for (int at = in.rotary_dim; at < in.head_dim; ++at) values[at] = from[at];
    for (int at = 0; at < half; at += kWidth) {
        const int left = half - at;
        // Both halves are read before either is written: `from` may be `values`.
        const vf low = get_upto(from + at, left), high = get_upto(from + half + at, left);
        const vf cos_low = get_upto(in.cos + at, left), sin_low = get_upto(in.sin + at, left);
        const vf cos_high = get_upto(in.cos + half + at, left), sin_high = get_upto(in.sin + half + at, left);
        put_upto(values + at, low * cos_low - high * sin_low, left);
        put_upto(values + half + at, high * cos_high + low * sin_high, left);
    }
}

template <class T>
void put_query(const HeadInput& in, int padded, void* out) {
    float values[kMaxHeadDim];
    rotated(in, values);
    convert<T>(values, in.head_dim, padded, out);
}

// What stands behind head_dim in the cache was zero from the beginning.
template <class T>
void put_key(const HeadInput& in, int padded, void* keys, int position) {
    constexpr int pair = kTogether<T>;
    float values[kMaxHeadDim];
    T elements[kMaxHeadDim];
    rotated(in, values);
    convert<T>(values, in.head_dim, in.head_dim, elements);
    T* to = static_cast<T*>(keys) + int64_t(position / kKeys) * kKeys * padded + position % kKeys * pair;
    for (int at = 0; at < in.head_dim; at += pair) __builtin_memcpy(to + at * kKeys, elements + at, pair * sizeof(T));
}

template <class T>
void put_value(const float* x, int head_dim, int padded, void* values, int position, bool clear_next) {
    constexpr int pair = kTogether<T>;
    T elements[kMaxHeadDim];
    convert<T>(x, head_dim, head_dim, elements);
    T* to = static_cast<T*>(values) + int64_t(position / pair) * pair * padded + position % pair;
    for (int at = 0; at < head_dim; ++at) to[at * pair] = elements[at];
    // Pairs are read whole, the next position with weight 0; but 0 times an old NaN there would be NaN.
    if (clear_next && pair == 2 && position % 2 == 0)
        for (int at = 0; at < head_dim; ++at) to[at * pair + 1] = T(0);
}

template <class T>
void move_position(void* keys, void* values, int padded, int from, int to) {
    constexpr int pair = kTogether<T>;
    const auto key = [&](int position) {
        return static_cast<T*>(keys) + int64_t(position / kKeys) * kKeys * padded + position % kKeys * pair;
    };
    const auto value = [&](int position) {
        return static_cast<T*>(values) + int64_t(position / pair) * pair * padded + position % pair;
    };
    for (int at = 0; at < padded; at += pair)
        __builtin_memcpy(key(to) + at * kKeys, key(from) + at * kKeys, pair * sizeof(T));
    for (int at = 0; at < padded; ++at) value(to)[at * pair] = value(from)[at * pair];
}

inline int argmax(const float* x, int size, float least, float* best) {
    const float none = -__builtin_inff();
    constexpr int kChains = 4;  // a single one would wait for each comparison
    vf tops[kChains];
    vi are_nan[kChains] = {};
    each<kChains>([&](auto chain) { tops[chain] = splat(none); });
    int at = 0;
    const auto take = [&](int chain) PN_INLINE {
        const vf each = load(x + at + chain * kWidth);
        tops[chain] = larger(each, tops[chain]);
        are_nan[chain] |= each != each;
    };
    for (; at + kChains * kWidth <= size; at += kChains * kWidth) each<kChains>(take);
    for (; at + kWidth <= size; at += kWidth) take(0);
    const vi is_nan = (are_nan[0] | are_nan[1]) | (are_nan[2] | are_nan[3]);
    float value = max_of_numbers(larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])));
    for (int lane = 0; lane < kWidth; ++lane) value = is_nan[lane] ? __builtin_nanf("") : value;
    for (int rest = at; rest < size; ++rest) value = x[rest] > value || x[rest] != x[rest] ? x[rest] : value;
    *best = value;
    if (value <= least) return -1;
    for (int index = 0; index < size; ++index)
        if (x[index] == value) return index;
    return 0;  // NaN
}

inline void exponentials(const float* x, int size, float most, float inverse, float* out, float* sums, float* largest) {
    for (int begin = 0; begin < size; begin += kSummed) {
        const int end = begin + kSummed < size ? begin + kSummed : size;
        LaneSum sum;
        vf top = {};
        for (int at = begin; at < end; at += kWidth) {
            const int left = end - at;
            // What is behind the end reads as 0, which may be more likely than anything.
            const vf value = left >= kWidth ? load(x + at) : get_part(x + at, left);
            vf weight = exp_of((value - splat(most)) * splat(inverse));
            put_upto(out + at, weight, left);
            if (left < kWidth) weight = get_part(out + at, left);
            sum.at(at) += weight;
            top = larger(weight, top);
        }
        sums[begin / kSummed] = sum.total();
        largest[begin / kSummed] = max_of_numbers(top);
    }
}

inline void score(const Scoring& scoring) {
    constexpr int kRows = 8, kVectors = kWide / kWidth;  // of sums at a time
    const int padded = (scoring.count + kWide - 1) / kWide * kWide;
    for (int column = 0; column < padded; column += kWide)
        for (int first = 0; first < scoring.num_rows; first += kRows / kVectors) {
            const float* before[kRows / kVectors];
            for (int row = 0; row < kRows / kVectors; ++row)
                // Rows too many compute the first again, and are not written.
                before[row] =
                    scoring.before + int64_t(first + row < scoring.num_rows ? first + row : first) * scoring.rank;
            vf sums[kRows / kVectors][kVectors] = {};
            const float* behind = scoring.behind + column;
            for (int at = 0; at < scoring.rank; ++at, behind += padded)
                each<kVectors>([&](auto part) PN_INLINE {
                    const vf values = load(behind + part * kWidth);
                    each<kRows / kVectors>([&](auto row)
                                               PN_INLINE { sums[row][part] += splat(before[row][at]) * values; });
                });
            each<kRows / kVectors>([&](auto row) PN_INLINE {
                each<kVectors>([&](auto part) PN_INLINE {
                    const int to = column + part * kWidth, left = scoring.count - to;
                    if (first + row >= scoring.num_rows || left <= 0) return;
                    put_upto(scoring.out + int64_t(first + row) * scoring.count + to,
                             load(scoring.logs + to) + sums[row][part], left);
                });
            });
        }
}

template <class T>
void row(const PnPart& part, int row, float* out) {
    const int slot = row % part.group_rows;
    for (int number = 0; number < part.num_blocks; ++number) {
        const PnPanel& panel = part.panel_of(number);
        const uint8_t* group = panel.group(row / part.group_rows);
        const int block = number - panel.first_block, first = number * kBlock;
        float values[kBlock];
        if (part.is_dense()) {
            for (int col = 0; col < kBlock; ++col) {
                const int at = (block * kGroup + slot) * kBlock + col;
                if (part.format == PN_F32) values[col] = reinterpret_cast<const float*>(group)[at];
                else if (part.format == PN_F16) values[col] = half_at(group, at);
                else values[col] = bfloat_to_float(reinterpret_cast<const bfloat*>(group)[at]);
            }
        } else {
            block_weights(form_of(part.format), panel, group, block, slot, values);
        }
        for (int col = first; col < first + kBlock && col < part.cols; ++col) {
            T rounded;
            put(&rounded, 0, values[col - first]);
            out[col] = get(&rounded);
        }
    }
}

template <class T, class Tiled = NoTiles, auto Planes = kPlanes<T>>
const Kernels* table(const char* name) {
    static const Kernels kernels = {name,
                                    multiply<T, Tiled>,
                                    attend<T>,
                                    norm<T>,
                                    convert<T>,
                                    Planes,
                                    Tiled::chunk_rows,
                                    Tiled::planes,
                                    norm_floats,
                                    add_scaled,
                                    scale_and_cap,
                                    convolve,
                                    dots,
                                    combine,
                                    gate_out<T>,
                                    gate<T>,
                                    mix<T>,
                                    add_mixed,
                                    put_query<T>,
                                    put_key<T>,
                                    put_value<T>,
                                    argmax,
                                    exponentials,
                                    score,
                                    move_position<T>,
                                    row<T>};
    return &kernels;
}

}  // namespace
}  // namespace pn
