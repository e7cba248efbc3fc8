// The plain C interface of the native CPU pass. paceline/model/native/library.py declares the same structs for ctypes;
// pn_abi_version guards against the two drifting apart. Nothing here throws: functions return 0, or -1 with pn_last_error set.
//
// A matrix is packed once and belongs to its creator; a model borrows matrices and vectors, which must outlive it.
// One pass runs at a time per pool: the pool's lock makes a second caller wait.
#pragma once
#include <stdint.h>

#define PN_API extern "C" __attribute__((visibility("default")))
#define PN_ABI_VERSION 8

enum PnFormat {
    PN_F32,
    PN_BF16,
    PN_Q8_0,
    PN_Q4_1,
    PN_F16,
    PN_Q4_0,
    PN_Q5_0,
    PN_Q5_1,
    PN_Q4_K,
    PN_Q5_K,
    PN_Q6_K,
    PN_IQ4_NL,
    PN_IQ4_XS,
    PN_NUM_FORMATS
};

enum PnActivation { PN_SILU, PN_GELU_TANH, PN_CLAMPED_SWIGLU };
enum PnRope { PN_ROPE_MAIN, PN_ROPE_LOCAL, PN_ROPE_NONE };

struct PnMatrix;
struct PnModel;

// One of several MLPs of a layer. Matrices and biases as those of PnLayer.
struct PnExpert {
    const PnMatrix* gate_up;
    const PnMatrix* down;
    const float* gate_up_bias;
    const float* down_bias;
    int32_t inner_size;
};

// One decoder layer. Matrices [out, in]; q, k, v stacked, gate and up stacked, each padded to multiples of 16 rows.
struct PnLayer {
    const float* input_norm;  // [hidden], or null: the sublayer's input is not normed
    const float* mlp_norm;
    const float* attention_out_norm;  // [hidden], or null: the sublayer's output is not normed
    const float* mlp_out_norm;
    const float* q_norm;  // [head_dim], [num_heads * head_dim] where heads are normed together, or null
    const float* k_norm;  // the same of key heads
    const float* sinks;   // [num_heads], scores of a key that is always attended to and has no value, or null
    const PnMatrix* qkv;
    const PnMatrix* output;
    const PnMatrix* gate_up;
    const PnMatrix* down;
    const float* qkv_bias;      // in the rows of qkv, or null
    const float* output_bias;   // [hidden] or null
    const float* gate_up_bias;  // in the rows of gate_up, or null
    const float* down_bias;     // [hidden] or null
    int32_t window;             // 0: attends to everything
    int32_t rope;               // PnRope
    int32_t is_causal;          // 0: new tokens of a row attend to each other both ways
    // DFlash 2: what goes into a sublayer, and what comes out, is mixed with the tokens before it in its row of the pass,
    //   out[i][c] = sum over t < mix_taps of (base[side][t][c] + added[i][side][t][c / 16]) * x[i - t][c],
    // side 0 going in and 1 coming out, `added` a product of the sublayer's input. Null otherwise.
    const PnMatrix* attention_mix;  // [2 * mix_taps * hidden / 16, hidden]
    const PnMatrix* mlp_mix;
    const float* attention_base;  // [2, mix_taps, hidden]
    const float* mlp_base;
    int32_t mix_taps;
    // In the place of gate_up and down, which are null then: `experts_per_token` of num_experts for each token, and one more, behind
    // them, for every token where has_shared.
    const PnExpert* experts;  // copied; null: one MLP
    const PnMatrix*
        router;  // [num_experts, hidden], with has_shared one more row behind padding: the shared expert's gate
    const float* router_bias;  // in the rows of router, or null
    int32_t num_experts;
    int32_t has_shared;
    // A gated delta net in the place of attention; null otherwise. Its `qkv` has channels (queries, keys, values), gates, betas and
    // steps below one another, `output` a column for each number of the values.
    const float* delta_kernel;  // [delta_taps, channels], of the convolution, the token itself last
    const float* delta_rate;    // [delta_value_heads], at most 0
    const float* delta_step;    // [delta_value_heads]
    const float* delta_norm;    // [delta_value_dim]
};

struct PnConfig {
    int32_t num_layers, hidden_size, inner_size, num_heads, num_kv_heads, head_dim;
    int32_t dtype;  // PN_F32 or PN_BF16: activations, cache and taps
    float eps;
    const PnLayer* layers;      // copied
    const PnMatrix* embedding;  // may be null when only hidden states are given
    float embedding_scale;
    const PnMatrix* head;     // may be null
    const float* final_norm;  // [hidden]
    const float* cos;         // [max_len, rotary_dim], half-split
    const float* sin;
    const float* local_cos;  // those of layers with PN_ROPE_LOCAL, or null
    const float* local_sin;
    int32_t rotary_dim;     // number of values of each head that are rotated, from the first on
    int32_t is_norm_whole;  // q_norm and k_norm are over all heads of a token together
    float attention_scale;  // of queries times keys
    float attention_cap;    // soft cap of the scores, by tanh; 0: none
    float residual_scale;   // sublayers' outputs are multiplied by it before they are added
    float logit_scale;
    float logit_cap;
    int32_t activation;  // PnActivation
    float swiglu_alpha;  // of PN_CLAMPED_SWIGLU
    float swiglu_limit;
    int32_t experts_per_token;
    int32_t are_experts_normed;  // the weights of a token's experts are divided by their sum
    int32_t has_output_gate;     // after the values `qkv` has gates of the attention's output, by head
    int32_t delta_key_heads, delta_value_heads, delta_key_dim, delta_value_dim, delta_taps;
    // EAGLE-3 drafters: the first layer's attention reads the token's embedding, normed by input_norm, concatenated with the hidden
    // state, normed by this; its qkv is [.., 2 * hidden], and a pass has tokens and hidden states. Null otherwise.
    const float* beside_norm;
    int32_t adds_to_normed;  // attention of that layer adds to the hidden state normed by beside_norm
    // DFlash drafters: features of the target -> keys and values of all layers. Null otherwise.
    const PnMatrix* fc;          // [hidden, features]
    const float* hidden_norm;    // [hidden]
    const PnMatrix* context_kv;  // keys of all layers, then values of all layers, each layer padded to multiples of 16
    const float* context_bias;   // in the rows of context_kv, or null
};

// Memory of a layer with a gated delta net for each row, all floats: the state after the row's committed tokens, and the pending
// updates of the tokens after these.
struct PnMemory {
    float* states;   // [num_rows, delta_value_heads, delta_key_dim, delta_value_dim]
    float* windows;  // [num_rows, delta_taps - 1, channels], inputs of the convolution before the pending tokens
    float* inputs;   // [num_rows, room, channels]
    float* keys;     // [num_rows, room, delta_key_heads, delta_key_dim]
    float* changes;  // [num_rows, room, delta_value_heads, delta_value_dim]
    float* decays;   // [num_rows, room, delta_value_heads], logarithms
};

// Keys and values, of layers with attention; an element is a float or a bfloat16 as the model's dtype says, zero at first. Strides in elements. A head of a
// row has max_len * padded_head_dim elements, max_len a multiple of 16; their order is internal to the library (kernels.h).
struct PnCache {
    void* keys;
    void* values;
    int64_t layer_stride, row_stride, head_stride;
    int32_t max_len;  // positions of a row, slack included
    int32_t num_rows;
    const PnMemory* memories;  // of the layers with gated delta nets, or null
    int32_t room;              // capacity in pending tokens
};

// Tokens of several rows, packed one row after another.
struct PnPass {
    int32_t num_rows;
    const int32_t* rows;
    const int32_t* starts;
    const int32_t* counts;
    const int32_t* tokens;  // [T] or null
    const float* hidden;    // [T, hidden] instead of tokens, or in addition to them
    int32_t num_taps;
    const int32_t* tap_layers;  // ascending slots need not be: slot s holds layer tap_layers[s]
    void* taps;                 // [T, num_taps * hidden] in the model's dtype
    int32_t num_logit_rows;
    const int32_t* logit_rows;  // indices into [0, T)
    float* logits;              // [num_logit_rows, logits_stride], or null if only the argmax is needed
    int64_t logits_stride;
    int32_t*
        argmax;  // [num_logit_rows] or null; of equal logits the lowest index, -1 where the largest is not finite or one is NaN
    float* stage_s;  // PN_NUM_STAGES seconds to add to, or null
    // Trees: for each token [T] the index of its parent among its row's tokens of this pass, -1 for one that follows the
    // cache; parents come first. Token i of a row is in the cache at start + i. Null: every token follows the one before it.
    const int32_t* parents;
    // For models with gated delta nets: the number of pending tokens of each row before the pass, and the commits during it, in the
    // order of rows and tokens: before token settle_before[i] of row settle_rows[i] of the pass, the first settle_counts[i] pending
    // tokens are committed to the state.
    const int32_t* held;
    int32_t num_settles;
    const int32_t* settle_rows;
    const int32_t* settle_before;
    const int32_t* settle_counts;
    float* hidden_out;  // [T, hidden] after the last layer, before the final norm, or null
    int32_t*
        experts_read;  // the number of experts that any token selected, summed over layers, is added to it; or null
};

// DFlash 2's selector: for each of `rows` rows of logits, `slots` per block, the `count` most probable columns (see pn_likeliest),
// and their scores after each possible previous token p,
//   log-probability + <predecessors[p] * gate hidden[row], successors[token]>.
// The previous token is the block's anchor for its first slot, and each candidate of the previous slot for the others. A row whose
// log-probabilities are NaN has NaN scores.
struct PnPick {
    int32_t rows, size, count, slots;
    int32_t dtype;  // of `hidden` and `gate`
    int32_t vocabulary, rank, book_dtype;
    const void* predecessors;  // [vocabulary, rank], PN_F32 or PN_BF16
    const void* successors;
    const PnMatrix* gate;     // [rank, hidden]
    const int32_t* token_of;  // each column, or null where they are the columns
    const float* logits;      // [rows, size]
    const int32_t* anchors;   // [rows / slots]
    const void* hidden;       // [rows / slots] blocks of [slots, hidden], hidden_stride elements apart
    int64_t hidden_stride;
    int32_t* chosen;  // [rows, count] columns, best first
    int32_t* tokens;  // [rows, count], those of the columns
    float* scores;    // [rows, count (before), count]
};

enum PnStage {
    PN_STAGE_EMBED,
    PN_STAGE_NORM,
    PN_STAGE_QKV,
    PN_STAGE_ROPE,
    PN_STAGE_ATTEND,
    PN_STAGE_OUTPUT,
    PN_STAGE_GATE_UP,
    PN_STAGE_DOWN,
    PN_STAGE_HEAD,
    PN_NUM_STAGES
};

PN_API int32_t pn_abi_version(void);
PN_API const char* pn_last_error(void);
// Comma-separated instruction sets this build and this processor both have, best first: amx, avx512bf16, avx512, avxvnni, avx2, or
// i8mm, dotprod, neon; portable; after them, from build.py --emulated, those for tests, whose names begin
// with "emulated-".
PN_API const char* pn_available(void);
// Choose one of pn_available for all that follows. Packing does not depend on it.
PN_API int32_t pn_use(const char* isa);
PN_API const char* pn_in_use(void);
// Threads of the pool, the caller's included. Waits for a running pass.
PN_API int32_t pn_set_threads(int32_t num_threads);
PN_API int32_t pn_num_threads(void);

// Head dimension as it is stored in the cache: a multiple of 32, zeros behind head_dim.
PN_API int32_t pn_padded_head_dim(int32_t head_dim);

// A matrix of parts below one another, each of `rows[i]` rows kept as `formats[i]`; all but the last are whole groups of 16 rows.
// Every row is zero.
PN_API PnMatrix* pn_matrix_new(int32_t num_parts, const int32_t* rows, const int32_t* formats, int32_t cols);
PN_API void pn_matrix_free(PnMatrix* matrix);
PN_API int64_t pn_matrix_bytes(const PnMatrix* matrix);
// Put `num_rows` rows of one part at first_row, first_row + 1, ... `source` is the part's own format, in ggml's blocks where it is
// quantised; PN_F32 for PN_BF16 too, and any dense one for PN_F32.
PN_API int32_t pn_matrix_fill(PnMatrix* matrix, int32_t first_row, int32_t num_rows, int32_t source, const void* data);
// Rows `ids` as floats [num_ids, cols]: an embedding.
PN_API int32_t pn_matrix_rows(const PnMatrix* matrix, const int32_t* ids, int32_t num_ids, int32_t dtype, float* out);
// A matrix of the rows `ids` of another, same format: the head over a part of the vocabulary.
PN_API PnMatrix* pn_matrix_select(const PnMatrix* matrix, const int32_t* ids, int32_t num_ids);
// out [num_tokens, rows] = x [num_tokens, cols] W^T, x rounded to dtype first.
PN_API int32_t pn_matrix_multiply(const PnMatrix* matrix, int32_t dtype, const float* x, int32_t num_tokens,
                                  float* out);

// For each of `rows` rows of logits: the `count` (at most `size`) most probable tokens, best first, among equals the lowest ids,
// and their log-probabilities in softmax(logits * inverse): ids and logs [rows, count]. The logs are NaN for a row that holds NaN
// or whose largest logit is not finite.
PN_API int32_t pn_likeliest(const float* logits, int32_t rows, int32_t size, int32_t count, float inverse, int32_t* ids,
                            float* logs);

// DFlash 2's candidates: those of PnPick.
PN_API int32_t pn_pick(const PnPick* pick);

// Walks through the scores [slots, count, count] of pn_pick. For each draft position, writes the index of the candidate with the
// largest score after the one chosen before (at the first position: after candidate 0), among equals the first, to places [slots],
// and its log-probability in softmax(scores * inverse) to logs [slots]. Returns the number of positions: one whose largest score
// is not finite, or that has a NaN, ends the walk.
PN_API int32_t pn_walk(const float* scores, int32_t slots, int32_t count, double inverse, int32_t* places,
                       double* logs);

PN_API PnModel* pn_model_new(const PnConfig* config);
PN_API void pn_model_free(PnModel* model);
// The whole pass: embedding, layers, keys and values appended from `starts` on, taps, final norm, head.
PN_API int32_t pn_forward(PnModel* model, const PnCache* cache, const PnPass* pass);
// Moves each row's entries at starts[row] + slots to positions starts[row], starts[row] + 1, ... `slots`: counts[row] for each row,
// ascending, counted from the start. For all layers and key heads of the model.
PN_API int32_t pn_keep(const PnModel* model, const PnCache* cache, int32_t num_rows, const int32_t* rows,
                       const int32_t* starts, const int32_t* counts, const int32_t* slots);
// DFlash: keys and values that every layer computes from features [T, cols of fc] in the model's dtype, written from `starts` on.
PN_API int32_t pn_inject(PnModel* model, const PnCache* cache, int32_t num_rows, const int32_t* rows,
                         const int32_t* starts, const int32_t* counts, const void* features);
