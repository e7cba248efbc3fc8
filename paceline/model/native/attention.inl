// Attention of one head's queries over the cache of one row; included by kernels.inl, whose vectors it uses.

namespace pn {
namespace {

// First key that query i sees, and the one behind the last.
inline int first_key(const Attention& a, int query) {
    const int first = a.position + query - a.window + 1;
    return a.window && first > 0 ? first : 0;
}
inline int end_key(const Attention& a, int query) {
    int end = a.is_causal ? a.position + query + 1 : a.end;
    if (a.window && end > a.position + query + a.window) end = a.position + query + a.window;
    return end;
}

// Scores of one query become weights that sum to one, rounded to T, in place; keys outside [first, end) weigh nothing. A position
// keeps its lane whatever `begin` is, so that the sum is the same in any company.
template <class T>
inline void softmax(float* scores, int begin, int first, int end, int padded_end) {
    const float none = -__builtin_inff();
    for (int key = begin; key < first; ++key) scores[key] = none;
    for (int key = end; key < padded_end; ++key) scores[key] = none;
    vf top = splat(none);
    for (int key = begin; key < padded_end; key += kWidth) top = larger(top, load(scores + key));
    const vf shift = splat(max_of(top));
    LaneSum sum;
    for (int key = begin; key < padded_end; key += kWidth) {
        const vf weight = exp_of(load(scores + key) - shift);
        store(scores + key, weight);
        sum.at(key) += weight;
    }
    const vf share = splat(1.0f / sum.total());
    for (int key = begin; key < padded_end; key += kWidth) {
        T rounded[kWidth];
        put_vector(rounded, load(scores + key) * share);
        store(scores + key, get_vector(rounded));
    }
}

// Blocks of kKeys keys, and of kBlock columns, that are gone through side by side: each sum is a chain of products, and the fewer
// queries there are, the more chains are needed to keep the processor busy.
template <int Rows>
constexpr int kSideBySide = Rows >= 8   ? 1
                            : Rows >= 4 ? 2
                                        : 4;

template <class T, int Rows, int Blocks>
inline void score_blocks(const Attention& a, const float* queries, int key, float* scores, int64_t ldscores) {
    const int64_t block_bytes = int64_t(kKeys) * a.padded_head_dim * int64_t(sizeof(T)), at = key / kKeys * block_bytes;
    for (int64_t byte = at; byte < at + Blocks * block_bytes; byte += 64)  // values are needed next: asked for now
        __builtin_prefetch(static_cast<const uint8_t*>(a.values) + byte);
    score_keys<Rows, Blocks>(static_cast<const T*>(a.keys) + int64_t(key) * a.padded_head_dim, queries, a.padded_head_dim,
                             a.scale, scores + key, ldscores);
}

// `Blocks` blocks of columns from `column` on.
template <class T, int Rows, int Blocks>
inline void weigh_blocks(const Attention& a, int row, int column, const float* weights, int64_t ldweights, int begin, int end) {
    vf sums[Rows][Blocks * kBlock / kWidth];
    weigh_values<Rows, Blocks>(static_cast<const T*>(a.values), a.padded_head_dim, column, weights, ldweights, begin, end,
                               sums);
    for (int index = 0; index < Rows; ++index) {
        T* out = static_cast<T*>(a.out) + (row + index) * a.out_stride;
        for (int part = 0; part < Blocks * kBlock / kWidth; ++part) {
            const int at = column + part * kWidth;
            if (at < a.head_dim) put_upto(out + at, sums[index][part], a.head_dim - at);
        }
    }
}

template <class T, int Rows>
inline void attend_rows(const Attention& a, int row) {
    constexpr int blocks = kSideBySide<Rows>, column_blocks = Rows >= 4 ? 1 : 2;
    const int64_t ldscores = int64_t(round_up(size_t(a.end), 64));
    const int padded_end = (a.end + kKeys - 1) / kKeys * kKeys;
    const int begin = first_key(a, row) / kKeys * kKeys;
    const T* query = static_cast<const T*>(a.query) + row * a.query_stride;
    float queries[Rows * kMaxHeadDim];  // padded_head_dim apart
    for (int index = 0; index < Rows; ++index)
        for (int at = 0; at < a.padded_head_dim; at += kWidth)
            store(queries + index * a.padded_head_dim + at, get_vector(query + index * a.query_stride + at));
    float* scores = a.scores + row * ldscores;
    int key = begin;
    for (; key + blocks * kKeys <= padded_end; key += blocks * kKeys)
        score_blocks<T, Rows, blocks>(a, queries, key, scores, ldscores);
    for (; key < padded_end; key += kKeys) score_blocks<T, Rows, 1>(a, queries, key, scores, ldscores);
    for (int index = 0; index < Rows; ++index)
        softmax<T>(scores + index * ldscores, begin, first_key(a, row + index), end_key(a, row + index), padded_end);
    const int end = (a.end + kTogether<T> - 1) / kTogether<T> * kTogether<T>;
    int column = 0;
    for (; column + column_blocks * kBlock <= a.padded_head_dim; column += column_blocks * kBlock)
        weigh_blocks<T, Rows, column_blocks>(a, row, column, scores, ldscores, begin, end);
    for (; column < a.padded_head_dim; column += kBlock) weigh_blocks<T, Rows, 1>(a, row, column, scores, ldscores, begin, end);
}

template <class T>
void attend(const Attention& a) {
    int row = 0;
    if constexpr (kMaxTile > 2) {
        for (; row + 8 <= a.num_queries; row += 8) attend_rows<T, 8>(a, row);
        for (; row + 4 <= a.num_queries; row += 4) attend_rows<T, 4>(a, row);
    }
    for (; row + 2 <= a.num_queries; row += 2) attend_rows<T, 2>(a, row);
    for (; row < a.num_queries; ++row) attend_rows<T, 1>(a, row);
}

}  // namespace
}  // namespace pn
