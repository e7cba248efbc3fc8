// A model's layers and the buffers of one pass.
#pragma once
#include <algorithm>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <vector>

#include "error.h"
#include "kernels.h"
#include "pool.h"

namespace pn {

// Memory that grows and is zero when new; rows keep their place while their length stays the same.
class Buffer {
public:
    Buffer() = default;
    ~Buffer() { release(data_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    // Null when there is no memory.
    void* at_least(size_t bytes);
    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }

private:
    void* data_ = nullptr;
    size_t bytes_ = 0;
};

struct Task {  // one head's queries of one row
    int row_index, head, first_query, num_queries;
};

struct ThreadBuffers {
    Buffer expanded, scores, columns, input, mixed, planes, delta;
};

struct Best {
    float value;
    int index;
};

struct ExpertGroup {  // rows [first, first + count) of those sorted by expert
    int expert, first, count;
};

// Stacked matrices keep their groups apart, whatever their format.
inline int padded_rows(int rows) { return (rows + kWide - 1) / kWide * kWide; }
inline int padded_cols(int cols) { return (cols + kBlock - 1) / kBlock * kBlock; }

// The pool and the instruction set that all models share; `Turn` is one caller's use of them.
class Turn {
public:
    Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

private:
    std::unique_lock<std::mutex> lock_;  // before the pool, which may fail to start its threads

public:
    Pool& pool;
};

// Returns work(pool) of one caller at a time. Exceptions become errors: none may cross the C interface.
template <class Work>
int32_t in_turn(Work work) {
    try {
        Turn turn;
        return work(turn.pool);
    } catch (const std::bad_alloc&) {
        return fail("out of memory");
    } catch (const std::system_error&) {
        return fail(
            "the system does not start as many threads: use fewer (threads, OMP_NUM_THREADS), or raise its limit");
    }
}
const Kernels* kernels_for(int dtype);

// Inputs of a product: in the model's dtype, and as planes for parts that take those.
struct Rows {
    const void* data;
    int64_t row_bytes;
    void* planes = nullptr;
    int64_t plane_bytes = 0;
    int chunk_rows = 0;  // as Product has them
};
inline bool takes_planes(const PnPart& part, const Kernels& kernels) { return kernels.planes && !part.is_dense(); }
inline bool takes_planes(const PnMatrix& matrix, const Kernels& kernels) {
    return std::any_of(matrix.parts.begin(), matrix.parts.end(),
                       [&](const PnPart& part) { return takes_planes(part, kernels); });
}

// `num_rows` rows of x as the matrix takes them; `planes` has room for kSpareRows more, and make_planes fills it.
inline Rows rows_of(const PnMatrix& matrix, const Kernels& kernels, const void* x, int64_t row_bytes, int num_rows,
                    void* planes) {
    Rows rows = {x, row_bytes};
    if (!takes_planes(matrix, kernels)) return rows;
    rows.planes = planes, rows.plane_bytes = plane_bytes(matrix.padded_cols());
    if (!kernels.chunk_rows) return rows;
    for (const PnPart& part : matrix.parts)  // parts share their inputs: one is enough
        if (!part.is_dense()) rows.chunk_rows = std::max(rows.chunk_rows, kernels.chunk_rows(part.format, num_rows));
    return rows;
}
// Row `row` of the planes. Behind the last row what is left of its chunk counts for nothing: its scales and sums are zero, since
// numbers that nobody wrote may be too small for the processor to multiply quickly.
inline void make_planes(const Kernels& kernels, const Rows& rows, int padded_cols, int row, int num_rows) {
    const uint8_t* from = static_cast<const uint8_t*>(rows.data) + row * rows.row_bytes;
    uint8_t* to = static_cast<uint8_t*>(rows.planes);
    if (rows.chunk_rows == 0) return kernels.planes(from, padded_cols, to + row * rows.plane_bytes);
    const int index = row % rows.chunk_rows, num_blocks = padded_cols / kBlock;
    to += (row - index) * rows.plane_bytes;
    kernels.chunk_planes(from, padded_cols, rows.chunk_rows, index, to);
    if (row + 1 < num_rows) return;
    float* floats = reinterpret_cast<float*>(to + int64_t(num_blocks) * 2 * kBlock * rows.chunk_rows);
    for (int kind = 0; kind < 4 * num_blocks; ++kind, floats += rows.chunk_rows)
        std::fill(floats + index + 1, floats + rows.chunk_rows, 0.0f);
}

// Where a product goes: y[row][column], of the columns of pieces from base_piece on.
struct Columns {
    float* y;
    int64_t ldy;
    int base_piece;
    int num_columns;  // nothing is written at or behind this one
    bool accumulate;
    const float* bias;  // by column of y, or null
};

// `num_rows` rows times pieces [begin, end) of a matrix.
inline void multiply_pieces(const Kernels& kernels, const PnMatrix& matrix, int begin, int end, const Rows& x,
                            int num_rows, const Columns& to, void* scratch) {
    for (const PnPart& part : matrix.parts) {
        const int first = std::max(begin, part.first_piece), last = std::min(end, part.first_piece + part.num_pieces());
        if (first >= last) continue;
        const int column = (first - to.base_piece) * kWide, group = part.group_of_piece(first - part.first_piece);
        const bool has_planes = takes_planes(part, kernels);
        kernels.multiply(
            {&part, group, part.group_of_piece(last - part.first_piece), has_planes ? x.planes : x.data,
             has_planes ? x.plane_bytes : x.row_bytes, num_rows, to.y + column, to.ldy, group, to.num_columns - column,
             to.accumulate, to.bias ? to.bias + column : nullptr, has_planes ? x.chunk_rows : 0},
            scratch);
    }
}

}  // namespace pn

struct PnModel {
    PnConfig config;
    std::vector<PnLayer> layers;
    pn::Buffer hidden, embedded, input, qkv, query, attended, gated, logit_input, features, planes;
    pn::Buffer mixed, mix_added;                 // of mixed sublayers: inputs, what is added to taps
    pn::Buffer unmixed;                          // what sublayers put out, where more is done with it than to add it
    std::vector<std::vector<PnExpert>> experts;  // of every layer
    pn::Buffer routed, expert_input,
        expert_out;                           // scores of experts by token; by sorted row what goes in and comes out
    std::vector<int> chosen, place_of;        // [tokens, experts of a token]: experts, and sorted rows
    std::vector<float> expert_weights;        // [tokens, experts of a token]
    std::vector<int> sorted_token, group_of;  // of every sorted row
    std::vector<pn::ExpertGroup> groups;      // of experts that any token chose
    std::vector<int> next_of_expert, group_of_expert;  // while rows are sorted: an expert's next row, and its group
    // Of gated delta nets, floats by token: what leaves the convolution, betas and decays of value heads, what they add to the
    // state, what they find in it; and the inputs of `output`.
    pn::Buffer delta_mixed, delta_betas, delta_decays, delta_changes, delta_found, delta_out;
    std::vector<float> delta_units;  // factors of queries and of keys, behind one another
    std::vector<int>
        cache_layer;  // of every layer its place among those with attention, or among those with a delta net
    std::vector<std::unique_ptr<pn::ThreadBuffers>> threads;
    std::vector<pn::Share> shares;
    std::vector<pn::Task> tasks;
    std::vector<int> token_row, token_position;  // of every token of the pass
    std::vector<int> token_offset;               // among its row's tokens
    std::vector<int> token_slot;                 // where it stands in the cache: its position, but in a tree
    std::vector<pn::TreePath> paths;             // of every token of a tree
    std::vector<int> path_slots;
    std::vector<pn::Best> best;  // [threads, logit rows]

    int element_bytes() const { return config.dtype == PN_F32 ? 4 : 2; }
    int query_rows() const { return padded_rows_of(config.num_heads); }
    int kv_rows() const { return padded_rows_of(config.num_kv_heads); }
    int mix_columns() const {  // of `mix_added`; 0: no layer is mixed
        return layers[0].mix_taps * 2 * (config.hidden_size / kWide);
    }
    int padded_head_dim() const { return pn::padded_cols(config.head_dim); }
    bool has_experts() const {
        return std::any_of(layers.begin(), layers.end(), [](const PnLayer& layer) { return layer.experts != nullptr; });
    }
    int num_delta_layers() const {
        return int(
            std::count_if(layers.begin(), layers.end(), [](const PnLayer& layer) { return layer.delta_kernel; }));
    }
    int delta_keys() const { return config.delta_key_heads * config.delta_key_dim; }
    int delta_values() const { return config.delta_value_heads * config.delta_value_dim; }
    int delta_channels() const { return 2 * delta_keys() + delta_values(); }
    // Columns of a delta net's `qkv`: where its gates, betas and steps begin, and all of them.
    int delta_gate_at() const { return pn::padded_rows(delta_channels()); }
    int delta_beta_at() const { return delta_gate_at() + pn::padded_rows(delta_values()); }
    int delta_step_at() const { return delta_beta_at() + pn::padded_rows(config.delta_value_heads); }
    int delta_columns() const { return delta_step_at() + pn::padded_rows(config.delta_value_heads); }
    // Columns of the `qkv` of layers with attention.
    int qkv_columns() const { return (config.has_output_gate ? 2 : 1) * query_rows() + 2 * kv_rows(); }
    int most_experts() const {  // that any layer has, the shared one with them
        int most = 0;
        for (const std::vector<PnExpert>& own : experts) most = std::max(most, int(own.size()));
        return most;
    }
    int widest_inner() const {
        int widest = config.inner_size;
        for (const std::vector<PnExpert>& own : experts)
            for (const PnExpert& expert : own) widest = std::max(widest, expert.inner_size);
        return widest;
    }
    int experts_per_token() const { return config.experts_per_token + 1; }  // room for a shared one

private:
    int padded_rows_of(int heads) const { return pn::padded_rows(heads * config.head_dim); }
};
