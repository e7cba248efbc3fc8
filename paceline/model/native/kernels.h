// What every instruction set provides; one table per translation unit (kernels_*.cpp), chosen at run time.
//
// A row's result does not depend on the number of rows in the batch: every output is one accumulator that runs through the
// columns in order, and sums across lanes have one fixed tree. Speculation is token-identical in bfloat16 because of this.
#pragma once
#include <cstddef>
#include <cstdint>

#include "matrix.h"

namespace pn {

// True if weights are prefetched into the second-level cache, twice as far ahead. Zen 4 has few requests of the nearest cache under
// way, and a tile that computes for long waits for them: memory and arithmetic took turns. Older ones were not measured and are
// taken for alike. For Zen 5 the nearest cache is as fast or faster; of others it is not known.
extern const bool asks_far;

// Where a product with a part goes: y[row][column] for the columns of groups [first_group, last_group).
struct Product {
    const PnPart* part;
    int first_group, last_group;
    const void*
        x;  // rows in the model's dtype, zero from cols to padded_cols; of quantised matrices planes, where there are any
    int64_t row_bytes;  // from one row of x to the next
    int num_rows;
    float* y;  // [num_rows, ldy]: the column of group g is group_rows (g - base_group)
    int64_t ldy;
    int base_group;     // whose first column is y's
    int num_columns;    // nothing is written at or behind this column of y
    bool accumulate;    // add to y, a residual
    const float* bias;  // by column of y, or null
    int chunk_rows;  // 0, or planes are in chunks of this many rows, each chunk_rows * row_bytes after the previous one
};

// A row of inputs in sixteen-bit fixed point, one scale for each block of 32: integer products with codes are exact, and bfloat16
// loses nothing but what is 2^-8 of the largest beside it and below. For each block 64 bytes, as the instruction set multiplies
// them: planes of high and of low bytes, or whole numbers; behind all blocks, as floats, their scales, the sums of their elements,
// and those of their halves. Every instruction set has the same numbers, so all make the same text.
inline int64_t plane_bytes(int padded_cols) {
    return int64_t(round_up(size_t(padded_cols / kBlock) * (2 * kBlock + 16), 64));
}
constexpr int kSpareRows = 16;                // that may be read behind the planes of all rows, whatever they hold
constexpr int kPlaneRange = 127 * 256 + 127;  // of an element, either way: its high byte is rounded

// What a query of a tree sees of its pass: itself and its ancestors, oldest first, counted from `position`.
struct TreePath {
    const int* slots;
    int size;
};

// Queries of one head and one row of the cache: query i is at position `position + i` and attends to [first_i, end_i). In a tree it
// is at `position + paths[i].size - 1`, and attends to everything before `position` and to its path.
struct Attention {
    const void* query;  // [num_queries, query_stride], head_dim padded
    int64_t query_stride;
    int num_queries;
    const void*
        keys;  // of this row and head: [positions / 16][padded / together][16][together], together 2 for bfloat16
    const void* values;  // [positions / together][padded][together]
    int head_dim, padded_head_dim;
    int position;
    int end;     // positions [0, end) are written; a causal query sees up to itself
    int window;  // 0: everything
    bool is_causal;
    float scale;
    float cap;      // 0: scores are not capped
    float sink;     // score of a key that is always seen and has no value; -infinity: there is none
    float* scores;  // scratch: num_queries x round_up(end, 64)
    void* out;      // [num_queries, out_stride] in the model's dtype
    int64_t out_stride;
    const TreePath* paths;  // of every query, or null
};

// Four rows of a panel as floats, a quantised group's codes as bytes with two scales and minima a block, or those of two groups
// without: 32 bytes for a column.
inline size_t scratch_bytes(int padded_cols) { return size_t(padded_cols) * 32 + 64; }

constexpr int kMaxQueries = 16;    // of one Attention
constexpr int kKeys = 16;          // positions of the cache that are scored together
constexpr int kSummed = 256;       // weights of a distribution that are summed together
constexpr int kMaxTaps = 64;       // of a convolution
constexpr int kMaxHeadDim = 1024;  // one head is kept on the stack

// One head of one token: normed when there is a weight, then its first rotary_dim numbers rotated.
struct HeadInput {
    const float* x;
    const float* weight;
    float eps;
    const float* cos;
    const float* sin;
    int head_dim, rotary_dim;
};

// Elements of several inputs of a convolution, from `first` on.
struct Convolution {
    const float* const* rows;  // [num_taps]
    const float* kernel;       // [num_taps, kernel_stride]
    int64_t kernel_stride;
    int num_taps, first, size;
};

// What comes of the two halves of an MLP: PnActivation and its numbers.
struct Gating {
    int activation;
    float alpha, limit;
};

// A token of a block mixed with those before it, `row_stride` elements apart: tap t of column c counts base[t][c] +
// added[t][c / kWide].
struct Mix {
    const void* x;
    int64_t row_stride;
    const float* base;   // [num_taps, size]
    const float* added;  // [num_taps, size / kWide]
    int num_taps;        // that do not reach beyond the block's first token
    int size;
};

// Scores of `count` candidates behind each of `num_rows` tokens.
struct Scoring {
    const float* before;  // [num_rows, rank]
    const float*
        behind;  // [rank, padded_count], side by side, so that all sums are made in the order of the rank at once
    const float* logs;  // [padded_count]
    int num_rows, rank, count;
    float* out;  // [num_rows, count]
};

// All pointers to activations are of the dtype the table was asked for.
struct Kernels {
    const char* name;
    // scratch: scratch_bytes(padded_cols)
    void (*multiply)(const Product& product, void* scratch);
    void (*attend)(const Attention& attention);
    // out = x / sqrt(mean(x^2) + eps) * weight, zeros from size to padded
    void (*norm)(const float* x, const float* weight, int size, int padded, float eps, void* out);
    void (*convert)(const float* x, int size, int padded, void* out);
    // A row of inputs as planes, or null where quantised matrices take rows in the model's dtype
    void (*planes)(const void* x, int padded_cols, void* out);
    // Of matrix tiles, else null: how many rows stand in a chunk when there are so many in all; 0: rows stay by themselves
    int (*chunk_rows)(int format, int num_rows);
    // Row `index` of a chunk
    void (*chunk_planes)(const void* x, int padded_cols, int chunk_rows, int index, void* chunk);
    // The same as floats, without zeros; `out` may be x
    void (*norm_floats)(const float* x, const float* weight, int size, float eps, float* out);
    // out[i] += x[i] * scale
    void (*add_scaled)(const float* x, int size, float scale, float* out);
    // x[i] = cap * tanh(x[i] * scale / cap), or x[i] * scale where the cap is 0
    void (*scale_and_cap)(float* x, int size, float scale, float cap);
    // out[i] = silu(the sum of kernel[tap][first + i] * rows[tap][first + i] over taps)
    void (*convolve)(const Convolution& in, float* out);
    // out[i] = rows[i] . x, of `count` rows `stride` apart
    void (*dots)(const float* rows, int64_t stride, int count, const float* x, int size, float* out);
    // out += the sum of weights[i] * rows[i] in the order of i
    void (*combine)(const float* rows, int64_t stride, const float* weights, int count, int size, float* out);
    // x[i] *= sigmoid(gate[i])
    void (*gate_out)(const float* gate, int size, void* x);
    // out[i] = activation(gate[i]) * up[i]
    void (*gate)(const float* gate, const float* up, int size, const Gating& gating, void* out);
    // x in the model's dtype to a row of inputs, zeros from size to padded
    void (*mix)(const Mix& mix, int padded, void* out);
    // x as floats, added to `out`
    void (*add_mixed)(const Mix& mix, float* out);
    // A query: zeros behind head_dim
    void (*query)(const HeadInput& in, int padded, void* out);
    // Into the cache of one row and head. clear_next: nothing of this pass stands at the next position, which shares a pair
    void (*key)(const HeadInput& in, int padded, void* keys, int position);
    void (*value)(const float* x, int head_dim, int padded, void* values, int position, bool clear_next);
    // The largest of x[0..size), NaN where any of them is, goes to `best`; its first index, or -1 where it is not above `least`
    int (*argmax)(const float* x, int size, float least, float* best);
    // out[i] = e^((x[i] - most) * inverse); of every kSummed of them the sum and the largest
    void (*exponentials)(const float* x, int size, float most, float inverse, float* out, float* sums, float* largest);
    // out[row][i] = logs[i] + the sum of before[row][at] * behind[at][i] in the order of `at`, products rounded before they are added
    void (*score)(const Scoring& scoring);
    // One position of one head becomes another's, in the layout of `keys` and `values` of Attention
    void (*move)(void* keys, void* values, int padded, int from, int to);
    // One row of a part as floats [cols], rounded as the weights of a product are
    void (*row)(const PnPart& part, int row, float* out);
};

namespace {

// The same kernels under the name of a newer instruction set that adds nothing to them: float32 has no use for bfloat16's
// instructions or for products of bytes, and to compile it once more for each of them took a quarter of the build.
inline Kernels named(const char* name, const Kernels& kernels) {
    Kernels copy = kernels;
    copy.name = name;
    return copy;
}

}  // namespace

// Null when the build or the processor lacks the instruction set. dtype: PN_F32 or PN_BF16.
const Kernels* amx_kernels(int dtype);
const Kernels* avx512bf16_kernels(int dtype);
const Kernels* avx512_kernels(int dtype);
const Kernels* avxvnni_kernels(int dtype);
const Kernels* avx2_kernels(int dtype);
const Kernels* i8mm_kernels(int dtype);
const Kernels* dotprod_kernels(int dtype);
const Kernels* neon_kernels(int dtype);
const Kernels* portable_kernels(int dtype);
// Where PN_EMULATED is defined (build.py --emulated):
const Kernels* emulated_tiles_kernels(int dtype);    // avx512, with tiles in plain C++: slow, to be tested
const Kernels* emulated_avxvnni_kernels(int dtype);  // avx2, with byte dot products by other instructions: to be tested

// Of an ARM processor; false on others.
bool has_dotprod();
bool has_i8mm();

}  // namespace pn
