// Attention of one head's queries over the cache of one row; included by kernels.inl, whose vectors it uses.

namespace pn {
namespace {

inline int position_of(const Attention& a, int query) {
    return a.position + (a.paths ? a.paths[query].size - 1 : query);
}
// First key that query i sees, and the one behind the last.
inline int first_key(const Attention& a, int query) {
    const int first = position_of(a, query) - a.window + 1;
    return a.window && first > 0 ? first : 0;
}
inline int end_key(const Attention& a, int query) {
    int end = a.is_causal ? position_of(a, query) + 1 : a.end;
    if (a.window && end - position_of(a, query) > a.window)
        end = position_of(a, query) + a.window;  // the sum may overflow
    return end;
}
// Of several queries from `query` on, the first key that any of them may see.
inline int first_of_all(const Attention& a, int query) {
    const int first = a.position - a.window + 1;  // the tokens of a tree come in any order, none before a.position
    return !a.paths ? first_key(a, query) : a.window && first > 0 ? first : 0;
}

// Scores of one query become weights that sum to one, rounded to T, in place; keys outside [first, end) weigh nothing. A position
// keeps its lane for any `begin`, so that the sum does not depend on the rest of the batch. `sink`: see Attention.
template <class T>
inline void softmax(float* scores, int begin, int first, int end, int padded_end, float sink) {
    const float none = -__builtin_inff();
    for (int key = begin; key < first; ++key) scores[key] = none;
    for (int key = end; key < padded_end; ++key) scores[key] = none;
    vf top = splat(none);
    for (int key = begin; key < padded_end; key += kWidth) top = larger(top, load(scores + key));
    const float most = max_of(top);
    const vf shift = splat(sink > most ? sink : most);
    LaneSum sum;
    for (int key = begin; key < padded_end; key += kWidth) {
        const vf weight = exp_of(load(scores + key) - shift);
        store(scores + key, weight);
        sum.at(key) += weight;
    }
    const vf share = splat(1.0f / (sum.total() + exp_of(splat(sink) - shift)[0]));
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
    score_keys<Rows, Blocks>(static_cast<const T*>(a.keys) + int64_t(key) * a.padded_head_dim, queries,
                             a.padded_head_dim, a.scale, scores + key, ldscores);
}

// Moves the scores of a query's path from its tokens' cache positions to their text positions: sums along the path then have the
// same bits as for a text of this path alone.
inline void scores_along(const TreePath& path, float* scores) {
    for (int at = 0; at < path.size; ++at) scores[at] = scores[path.slots[at]];  // slots ascend: none is lost
}

// What a query's path adds to its sums, and the position that shares a pair with its first token.
template <class T, int Blocks>
inline void weigh_path(const Attention& a, const TreePath& path, int column, const float* weights, int end,
                       vf (*sums)[Blocks * kBlock / kWidth]) {
    const auto add = [&](int position, float weight) {
        float pair[2] = {0.0f, 0.0f};
        const int lane = position % kTogether<T>;
        pair[lane] = weight;
        const T* values = static_cast<const T*>(a.values) + int64_t(position - lane) * a.padded_head_dim;
        weigh_values<1, Blocks>(values, a.padded_head_dim, column, pair, 0, 0, 1, sums);
    };
    for (int position = end; position < a.position; ++position) add(position, weights[position]);
    for (int at = 0; at < path.size; ++at) add(a.position + path.slots[at], weights[a.position + at]);
}

// `Blocks` blocks of columns from `column` on.
template <class T, int Rows, int Blocks>
inline void weigh_blocks(const Attention& a, int row, int column, const float* weights, int64_t ldweights, int begin,
                         int end) {
    vf sums[Rows][Blocks * kBlock / kWidth] = {};
    weigh_values<Rows, Blocks>(static_cast<const T*>(a.values), a.padded_head_dim, column, weights, ldweights, begin,
                               end, sums);
    if (a.paths)
        for (int index = 0; index < Rows; ++index)
            weigh_path<T, Blocks>(a, a.paths[row + index], column, weights + index * ldweights, end, sums + index);
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
    const int begin = first_of_all(a, row) / kKeys * kKeys;
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
    if (a.cap != 0.0f)
        for (int index = 0; index < Rows; ++index)
            scale_and_cap(scores + index * ldscores + begin, padded_end - begin, 1.0f, a.cap);
    if (a.paths)
        for (int index = 0; index < Rows; ++index)
            scores_along(a.paths[row + index], scores + index * ldscores + a.position);
    for (int index = 0; index < Rows; ++index)
        softmax<T>(scores + index * ldscores, begin, first_key(a, row + index), end_key(a, row + index), padded_end,
                   a.sink);
    // With paths, the pair with a.position is left to weigh_path, which adds positions one by one.
    const int end =
        a.paths ? a.position / kTogether<T> * kTogether<T> : (a.end + kTogether<T> - 1) / kTogether<T> * kTogether<T>;
    int column = 0;
    for (; column + column_blocks * kBlock <= a.padded_head_dim; column += column_blocks * kBlock)
        weigh_blocks<T, Rows, column_blocks>(a, row, column, scores, ldscores, begin, end);
    for (; column < a.padded_head_dim; column += kBlock)
        weigh_blocks<T, Rows, 1>(a, row, column, scores, ldscores, begin, end);
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
