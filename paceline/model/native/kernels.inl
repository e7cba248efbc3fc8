// The kernels, written once over the vector type of the including translation unit, which defines before this, in pn's anonymous
// namespace: kWidth, vf and vi (vectors of kWidth floats and int32), bfloat, fma, widen, narrow, and for both element types
//   template <int Rows> void tile(weights, row_stride, block_stride, num_blocks, x, ldx, float (*sums)[kGroup]);
//       sums[row][lane] = x[row] . weights[lane]; kMaxTile is the most rows that the registers hold
//   void expand_q4(matrix, group, out), expand_q8(matrix, group, out);     a group's codes as elements [block][4][32]
// Everything is in an anonymous namespace: code compiled for one instruction set must never be linked into another.

namespace pn {
namespace {

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

inline float max_of(vf value) {
    float best = value[0];
    for (int lane = 1; lane < kWidth; ++lane) best = value[lane] > best ? value[lane] : best;
    return best;
}

inline vf larger(vf a, vf b) { return a > b ? a : b; }
inline vf smaller(vf a, vf b) { return a < b ? a : b; }

// e^x: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] (Cephes' coefficients); exactly 0 below -87.
inline vf exp_of(vf x) {
    const vf clamped = smaller(larger(x, splat(-87.0f)), splat(88.0f));
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const vf n = fma(clamped, splat(1.44269504088896341f), magic) - magic;
    const vf r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), clamped));
    vf p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r + splat(1.0f));
    const vi scale = (__builtin_convertvector(n, vi) + 127) << 23;
    vf power;
    __builtin_memcpy(&power, &scale, sizeof power);
    return x < splat(-87.0f) ? splat(0.0f) : p * power;
}

inline void put(float* out, int index, float value) { out[index] = value; }
inline void put(bfloat* out, int index, float value) { out[index] = float_to_bfloat(value); }
inline float get(const float* from, int index) { return from[index]; }
inline float get(const bfloat* from, int index) { return bfloat_to_float(from[index]); }
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

// ---- matrix products ----

inline int element_format(const float*) { return PN_F32; }
inline int element_format(const bfloat*) { return PN_BF16; }

// A dense matrix of the other type: bfloat16 weights for float32 products. (float32 weights are rounded when packed.)
template <class T>
void expand_dense(const PnMatrix& matrix, const uint8_t* group, T* out) {
    const bfloat* from = reinterpret_cast<const bfloat*>(group);
    const int count = matrix.num_blocks * kGroup * kBlock;
    for (int at = 0; at < count; at += kWidth) put_vector(out + at, get_vector(from + at));
}

// Codes of one group as elements [block][4][32] of the type that is multiplied; dense groups of that type are used where they are.
template <class T>
const T* elements(const PnMatrix& matrix, int index, T* scratch) {
    const uint8_t* group = matrix.group(index);
    if (matrix.format == element_format(scratch)) return reinterpret_cast<const T*>(group);
    if (matrix.format == PN_Q4_1) expand_q4(matrix, group, scratch);
    else if (matrix.format == PN_Q8_0) expand_q8(matrix, group, scratch);
    else expand_dense(matrix, group, scratch);
    return scratch;
}

struct Output {
    float* y;
    int64_t ldy;
    int column, num_columns;
    bool accumulate;
    const float* bias;

    void write(int row, const float* sums) const {
        float* to = y + row * ldy;
        const int count = num_columns - column < kGroup ? num_columns - column : kGroup;
        for (int lane = 0; lane < count; ++lane) {
            const float value = bias ? sums[lane] + bias[column + lane] : sums[lane];
            to[lane] = accumulate ? to[lane] + value : value;
        }
    }
};

template <class T, int Rows>
inline void rows_of(const T* weights, const Product& product, int row, const Output& output) {
    float sums[Rows][kGroup];
    const T* x = static_cast<const T*>(product.x) + row * product.ldx;
    tile<Rows>(weights, kBlock, kGroup * kBlock, product.matrix->num_blocks, x, product.ldx, sums);
    for (int index = 0; index < Rows; ++index) output.write(row + index, sums[index]);
}

template <class T>
void multiply(const Product& product, void* scratch) {
    for (int group = product.first_group; group < product.last_group; ++group) {
        const int column = (group - product.base_group) * kGroup;
        const T* weights = elements(*product.matrix, group, static_cast<T*>(scratch));
        const Output output = {product.y + column, product.ldy, column, product.num_columns, product.accumulate, product.bias};
        int row = 0;
        for (int left; (left = product.num_rows - row) > 0;) {
            // Even tiles: seven rows are four and three rather than six and one.
            const int tiles = (left + kMaxTile - 1) / kMaxTile, size = (left + tiles - 1) / tiles;
            if (size == 1) rows_of<T, 1>(weights, product, row, output);
            if (size == 2) rows_of<T, 2>(weights, product, row, output);
            if constexpr (kMaxTile > 2) {
                if (size == 3) rows_of<T, 3>(weights, product, row, output);
                if (size == 4) rows_of<T, 4>(weights, product, row, output);
                if (size == 5) rows_of<T, 5>(weights, product, row, output);
                if (size == 6) rows_of<T, 6>(weights, product, row, output);
            }
            row += size;
        }
    }
}

// ---- attention ----

template <class T, int Rows>
inline void score_rows(const Attention& a, const T* query, int begin, int end, int64_t ldscores, float* scores) {
    const T* keys = static_cast<const T*>(a.keys);
    const int blocks = a.padded_head_dim / kBlock;
    float sums[Rows][kGroup];
    for (int key = begin; key < end; key += kGroup) {
        // The last keys are taken together with the ones before: a key's products do not depend on its neighbours.
        const int from = key + kGroup <= end ? key : end - kGroup;
        tile<Rows>(keys + int64_t(from) * a.padded_head_dim, a.padded_head_dim, kBlock, blocks, query, a.query_stride, sums);
        for (int row = 0; row < Rows; ++row)
            for (int lane = 0; lane < kGroup; ++lane) scores[row * ldscores + from + lane] = sums[row][lane] * a.scale;
    }
}

template <class T>
void score(const Attention& a, int begin, int64_t ldscores) {
    const T* query = static_cast<const T*>(a.query);
    int end = a.end;
    if (end - begin < kGroup) begin = end > kGroup ? end - kGroup : 0;
    if (end < kGroup) {  // too short for a tile: one by one, through a padded copy of the keys
        alignas(64) T keys[kGroup * 1024] = {};
        Attention short_one = a;
        __builtin_memcpy(keys, a.keys, size_t(end) * size_t(a.padded_head_dim) * sizeof(T));
        short_one.keys = keys, short_one.end = kGroup;
        score<T>(short_one, 0, ldscores);
        return;
    }
    int row = 0;
    for (int left; (left = a.num_queries - row) > 0;) {
        const int tiles = (left + kMaxTile - 1) / kMaxTile, size = (left + tiles - 1) / tiles;
        const T* from = query + row * a.query_stride;
        float* to = a.scores + row * ldscores;
        if (size == 1) score_rows<T, 1>(a, from, begin, end, ldscores, to);
        if (size == 2) score_rows<T, 2>(a, from, begin, end, ldscores, to);
        if constexpr (kMaxTile > 2) {
            if (size == 3) score_rows<T, 3>(a, from, begin, end, ldscores, to);
            if (size == 4) score_rows<T, 4>(a, from, begin, end, ldscores, to);
            if (size == 5) score_rows<T, 5>(a, from, begin, end, ldscores, to);
            if (size == 6) score_rows<T, 6>(a, from, begin, end, ldscores, to);
        }
        row += size;
    }
}

// Scores of one query to weights that sum to one; keys outside [first, end) weigh nothing. Positions keep their lanes, whatever
// `first` is, so that the sum is the same in any company.
inline void softmax(float* scores, int first, int end, int padded_end) {
    const int begin = first / kWidth * kWidth;
    const float none = -__builtin_inff();
    for (int key = begin; key < first; ++key) scores[key] = none;
    for (int key = end; key < padded_end; ++key) scores[key] = none;
    const int last = (end + kWidth - 1) / kWidth * kWidth;
    vf top = splat(none);
    for (int key = begin; key < last; key += kWidth) top = larger(top, load(scores + key));
    const vf shift = splat(max_of(top));
    vf sum = splat(0.0f);
    for (int key = begin; key < last; key += kWidth) {
        const vf weight = exp_of(load(scores + key) - shift);
        store(scores + key, weight);
        sum += weight;
    }
    const vf share = splat(1.0f / sum_of(sum));
    for (int key = begin; key < last; key += kWidth) store(scores + key, load(scores + key) * share);
}

// out[row] += sum over keys [begin, end) of weight * value, keys in order; `Parts` vectors of a head at a time.
template <class T, int Rows, int Parts>
inline void weigh(const T* values, int64_t stride, const float* weights, int64_t ldw, int begin, int end, vf (*sums)[Parts]) {
    vf acc[Rows][Parts];
    for (int row = 0; row < Rows; ++row)
        for (int part = 0; part < Parts; ++part) acc[row][part] = sums[row][part];
    for (int key = begin; key < end; ++key) {
        vf value[Parts];
        for (int part = 0; part < Parts; ++part) value[part] = get_vector(values + key * stride + part * kWidth);
        for (int row = 0; row < Rows; ++row) {
            const vf weight = splat(weights[row * ldw + key]);
            for (int part = 0; part < Parts; ++part) acc[row][part] = fma(weight, value[part], acc[row][part]);
        }
    }
    for (int row = 0; row < Rows; ++row)
        for (int part = 0; part < Parts; ++part) sums[row][part] = acc[row][part];
}

// First and last key that query i sees.
inline int first_key(const Attention& a, int query) {
    const int first = a.position + query - a.window + 1;
    return a.window && first > 0 ? first : 0;
}
inline int end_key(const Attention& a, int query) {
    int end = a.is_causal ? a.position + query + 1 : a.end;
    if (a.window && end > a.position + query + a.window) end = a.position + query + a.window;
    return end;
}

template <class T, int Rows>
inline void weigh_rows(const Attention& a, int row, int64_t ldscores) {
    constexpr int kParts = 2;
    const T* values = static_cast<const T*>(a.values);
    const float* weights = a.scores + row * ldscores;
    // Keys that all rows see go together, the others row by row, each row's in order.
    int low = 0, high = a.end;
    for (int index = row; index < row + Rows; ++index) {
        low = first_key(a, index) > low ? first_key(a, index) : low;
        high = end_key(a, index) < high ? end_key(a, index) : high;
    }
    if (high < low) high = low;
    for (int column = 0; column < a.padded_head_dim; column += kParts * kWidth) {
        vf sums[Rows][kParts] = {};
        for (int index = 0; index < Rows; ++index) {
            const int until = end_key(a, row + index) < low ? end_key(a, row + index) : low;
            weigh<T, 1, kParts>(values + column, a.padded_head_dim, weights + index * ldscores, 0, first_key(a, row + index), until, sums + index);
        }
        weigh<T, Rows, kParts>(values + column, a.padded_head_dim, weights, ldscores, low, high, sums);
        for (int index = 0; index < Rows; ++index) {
            const int from = first_key(a, row + index) > high ? first_key(a, row + index) : high;
            weigh<T, 1, kParts>(values + column, a.padded_head_dim, weights + index * ldscores, 0, from, end_key(a, row + index), sums + index);
            T* out = static_cast<T*>(a.out) + (row + index) * a.out_stride;
            for (int part = 0; part < kParts; ++part) {
                const int at = column + part * kWidth;
                if (at < a.head_dim) put_upto(out + at, sums[index][part], a.head_dim - at);
            }
        }
    }
}

template <class T>
void attend(const Attention& a) {
    const int64_t ldscores = int64_t(round_up(size_t(a.end), 64));
    int begin = first_key(a, 0);
    score<T>(a, begin, ldscores);
    for (int query = 0; query < a.num_queries; ++query)
        softmax(a.scores + query * ldscores, first_key(a, query), end_key(a, query), int(ldscores));
    int row = 0;
    for (; row + 4 <= a.num_queries; row += 4) weigh_rows<T, 4>(a, row, ldscores);
    for (; row < a.num_queries; ++row) weigh_rows<T, 1>(a, row, ldscores);
}

// ---- the small operations ----

template <class T>
void norm(const float* x, const float* weight, int size, int padded, float eps, void* out) {
    T* to = static_cast<T*>(out);
    vf squares = splat(0.0f);
    for (int at = 0; at < size; at += kWidth) {
        const vf value = get_upto(x + at, size - at);
        squares = fma(value, value, squares);
    }
    const vf scale = splat(1.0f / __builtin_sqrtf(sum_of(squares) / float(size) + eps));
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

template <class T>
void gate(const float* gate, const float* up, int size, void* out) {
    T* to = static_cast<T*>(out);
    for (int at = 0; at < size; at += kWidth) {
        const vf value = get_upto(gate + at, size - at);
        const vf silu = value / (splat(1.0f) + exp_of(-value));
        put_upto(to + at, silu * get_upto(up + at, size - at), size - at);
    }
}

template <class T>
void head(const float* x, const float* weight, float eps, const float* cos, const float* sin, int head_dim, int padded, void* out) {
    T* to = static_cast<T*>(out);
    float values[1024];
    if (weight) norm<float>(x, weight, head_dim, head_dim, eps, values);
    else __builtin_memcpy(values, x, size_t(head_dim) * sizeof(float));
    const int half = head_dim / 2;
    for (int at = 0; at < half; ++at) {
        const float low = values[at], high = values[at + half];
        put(to, at, cos ? low * cos[at] - high * sin[at] : low);
        put(to, at + half, cos ? high * cos[at + half] + low * sin[at + half] : high);
    }
    for (int at = head_dim; at < padded; ++at) put(to, at, 0.0f);
}

inline int argmax(const float* x, int size, float* best) {
    const float none = -__builtin_inff();
    vf top = splat(none);
    int at = 0;
    for (; at + kWidth <= size; at += kWidth) top = larger(load(x + at), top);
    float value = max_of(top);
    for (int rest = at; rest < size; ++rest) value = x[rest] > value ? x[rest] : value;
    *best = value;
    for (int index = 0; index < size; ++index)
        if (x[index] == value) return index;
    return 0;  // nothing but NaN
}

inline float half_at(const uint8_t* scales, int index) {
    uint16_t half;
    __builtin_memcpy(&half, scales + index * 2, 2);
    return half_to_float(half);
}

template <class T>
void row(const PnMatrix& matrix, int row, float* out) {
    const uint8_t* group = matrix.group(row / kGroup);
    const uint8_t* scales = group + matrix.codes_bytes;
    const int lane = row % kGroup;
    for (int col = 0; col < matrix.cols; ++col) {
        const int block = col / kBlock, at = (block * kGroup + lane) * kBlock + col % kBlock;
        float value;
        if (matrix.format == PN_F32) value = reinterpret_cast<const float*>(group)[at];
        else if (matrix.format == PN_BF16) value = bfloat_to_float(reinterpret_cast<const bfloat*>(group)[at]);
        else if (matrix.format == PN_Q8_0) value = half_at(scales, block * kGroup + lane) * float(reinterpret_cast<const int8_t*>(group)[at]);
        else {
            const int code = reinterpret_cast<const uint16_t*>(group)[block * kBlock + col % kBlock] >> 4 * lane & 15;
            value = half_at(scales, block * 2 * kGroup + lane) * float(code) + half_at(scales, (block * 2 + 1) * kGroup + lane);
        }
        T rounded;
        put(&rounded, 0, value);
        out[col] = get(&rounded, 0);
    }
}

template <class T>
const Kernels* table(const char* name) {
    static const Kernels kernels = {name, multiply<T>, attend<T>, norm<T>, convert<T>, gate<T>, head<T>, argmax, row<T>};
    return &kernels;
}

}  // namespace
}  // namespace pn
