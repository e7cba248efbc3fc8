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

// Scores of one query become weights that sum to one, as T, in place; keys outside [first, end) weigh nothing. A position keeps its
// lane whatever `begin` is, so that the sum is the same in any company.
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
    T* weights = reinterpret_cast<T*>(scores);  // never ahead of what is still to be read
    for (int key = begin; key < padded_end; key += kWidth) put_vector(weights + key, load(scores + key) * share);
}

template <class T, int Rows>
inline void attend_rows(const Attention& a, int row) {
    const int64_t ldscores = int64_t(round_up(size_t(a.end), 64));
    const int padded_end = (a.end + kKeys - 1) / kKeys * kKeys;
    const int begin = first_key(a, row) / kKeys * kKeys;
    const T* query = static_cast<const T*>(a.query) + row * a.query_stride;
    float* scores = a.scores + row * ldscores;
    for (int key = begin; key < padded_end; key += kKeys) {
        const T* block = static_cast<const T*>(a.values) + int64_t(key) * a.padded_head_dim;
        const int bytes = kKeys * a.padded_head_dim * int(sizeof(T));  // needed next: asked for now
        for (int at = 0; at < bytes; at += 64) __builtin_prefetch(reinterpret_cast<const uint8_t*>(block) + at);
        score_keys<Rows>(static_cast<const T*>(a.keys) + int64_t(key) * a.padded_head_dim, query, a.query_stride,
                         a.padded_head_dim, a.scale, scores + key, ldscores);
    }
    for (int index = 0; index < Rows; ++index)
        softmax<T>(scores + index * ldscores, begin, first_key(a, row + index), end_key(a, row + index), padded_end);
    const T* weights = reinterpret_cast<const T*>(scores);
    const int64_t ldweights = ldscores * int64_t(sizeof(float) / sizeof(T));
    const int end = (a.end + kTogether<T> - 1) / kTogether<T> * kTogether<T>;
    for (int column = 0; column < a.padded_head_dim; column += kBlock) {
        vf sums[Rows][kBlock / kWidth];
        weigh_values<Rows>(static_cast<const T*>(a.values), a.padded_head_dim, column, weights, ldweights, begin, end, sums);
        for (int index = 0; index < Rows; ++index) {
            T* out = static_cast<T*>(a.out) + (row + index) * a.out_stride;
            for (int part = 0; part < kBlock / kWidth; ++part) {
                const int at = column + part * kWidth;
                if (at < a.head_dim) put_upto(out + at, sums[index][part], a.head_dim - at);
            }
        }
    }
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
