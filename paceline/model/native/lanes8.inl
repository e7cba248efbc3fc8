// Products over vectors of eight lanes, or of four that have the bits of eight, by the compiler's vector extension; the including
// unit defines `vf fma(vf, vf, vf)`.

namespace pn {
namespace {

constexpr int kMaxTile = 2;  // 8 sums, 4 weights, 1 activation: of 16 registers, or twice as many of half the width
constexpr int kParts = 8 / kWidth;  // vectors of a sum

inline vf widen(const bfloat* from) {
    Lanes<kWidth>::Halves halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    const Lanes<kWidth>::Words words = __builtin_convertvector(halves, Lanes<kWidth>::Words) << 16;
    vf value;
    __builtin_memcpy(&value, &words, sizeof value);
    return value;
}

inline void narrow(bfloat* to, vf value) { narrow_lanes<kWidth>(to, value); }

inline vf fetch(const float* from) {
    vf value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}
inline vf fetch(const bfloat* from) { return widen(from); }

inline float total(const vf (&sum)[kParts]) {
    float lanes[8];
    __builtin_memcpy(lanes, sum, sizeof lanes);
    // The tree of sum_of.
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

template <int Rows, class T>
inline void tile(const T* weights, int64_t row_stride, int64_t block_stride, int num_blocks, const T* x, int64_t ldx,
                 float (*sums)[kGroup], unsigned ahead) {
    vf acc[Rows][kGroup][kParts];
    each<Rows>([&](auto row) {
        each<kGroup>([&](auto lane) { each<kParts>([&](auto part) { acc[row][lane][part] = vf{}; }); });
    });
    for (int block = 0; block < num_blocks; ++block, weights += block_stride, x += kBlock)
        for (int first = 0; first < kBlock; first += 8)
            each<kParts>([&](auto part) {
                const int at = first + part * kWidth;
                vf weight[kGroup];
                each<kGroup>([&](auto lane) {
                    weight[lane] = fetch(weights + lane * row_stride + at);
                    if (ahead >> lane & 1) ask_for_weights(weights + lane * row_stride + at);
                });
                each<Rows>([&](auto row) {
                    const vf value = fetch(x + row * ldx + at);
                    each<kGroup>(
                        [&](auto lane) { acc[row][lane][part] = fma(value, weight[lane], acc[row][lane][part]); });
                });
            });
    each<Rows>([&](auto row) { each<kGroup>([&](auto lane) { sums[row][lane] = total(acc[row][lane]); }); });
}

// Both elements of neighbouring pairs of bfloat16.
inline vf first_of(const bfloat* pairs) {
    Lanes<kWidth>::Words words;
    __builtin_memcpy(&words, pairs, sizeof words);
    words <<= 16;
    vf value;
    __builtin_memcpy(&value, &words, sizeof value);
    return value;
}
inline vf second_of(const bfloat* pairs) {
    Lanes<kWidth>::Words words;
    __builtin_memcpy(&words, pairs, sizeof words);
    words &= 0xffff0000u;
    vf value;
    __builtin_memcpy(&value, &words, sizeof value);
    return value;
}

inline vf add_pairs(vf sum, const bfloat* pairs, const float* factors) {
    return fma(second_of(pairs), vf{} + factors[1], fma(first_of(pairs), vf{} + factors[0], sum));
}
inline vf add_pairs(vf sum, const float* values, const float* factor) {
    return fma(fetch(values), vf{} + *factor, sum);
}

template <int Rows, int Blocks, class T>
inline void score_keys(const T* keys, const float* queries, int padded, float scale, float* out, int64_t ldout) {
    constexpr int together = kTogether<T>, kVectors = kKeys / kWidth;
    for (int block = 0; block < Blocks; ++block, out += kKeys, keys += kKeys * padded) {
        vf sums[Rows][kVectors];
        each<Rows>([&](auto row) { each<kVectors>([&](auto part) { sums[row][part] = vf{}; }); });
        const T* from = keys;
        for (int at = 0; at < padded; at += together, from += kKeys * together)
            each<Rows>([&](auto row) {
                each<kVectors>([&](auto part) {
                    sums[row][part] =
                        add_pairs(sums[row][part], from + part * kWidth * together, queries + row * padded + at);
                });
            });
        each<Rows>([&](auto row) {
            each<kVectors>([&](auto part) {
                const vf scaled = sums[row][part] * scale;
                __builtin_memcpy(out + row * ldout + part * kWidth, &scaled, sizeof scaled);
            });
        });
    }
}

template <int Rows, int Blocks, class T>
inline void weigh_values(const T* values, int padded, int column, const float* weights, int64_t ldweights, int begin,
                         int end, vf (*sums)[Blocks * kBlock / kWidth]) {
    constexpr int together = kTogether<T>, kVectors = Blocks * kBlock / kWidth;
    vf acc[Rows][kVectors];
    each<Rows>([&](auto row) { each<kVectors>([&](auto part) { acc[row][part] = sums[row][part]; }); });
    for (int key = begin; key < end; key += together)
        each<kVectors>([&](auto part) {
            const T* from = values + int64_t(key) * padded + (column + part * kWidth) * together;
            each<Rows>(
                [&](auto row) { acc[row][part] = add_pairs(acc[row][part], from, weights + row * ldweights + key); });
        });
    each<Rows>([&](auto row) { each<kVectors>([&](auto part) { sums[row][part] = acc[row][part]; }); });
}

}  // namespace
}  // namespace pn
