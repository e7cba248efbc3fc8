// One pass through a decoder: every thread runs the same stages and shares the work of each; barriers separate them.
#include "forward.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#include "error.h"

namespace pn {

int32_t Forward::prepare() {
    model_.token_row.clear(), model_.token_position.clear(), model_.token_slot.clear(), model_.tasks.clear();
    model_.paths.clear(), model_.path_slots.clear(), model_.token_offset.clear();
    first_token_.clear();
    for (int index = 0; index < pass_.num_rows; ++index) {
        const int start = pass_.starts[index], count = pass_.counts[index];
        if (pass_.rows[index] < 0 || pass_.rows[index] >= cache_.num_rows || start < 0 || count < 1 ||
            start > cache_.max_len - count)
            return fail("a row's tokens do not fit the cache");
        max_end_ = std::max(max_end_, start + count);
        for (int head = 0; head < config_.num_heads; ++head)
            for (int query = 0; query < count; query += kMaxQueries)
                model_.tasks.push_back(
                    {index, head, int(model_.token_row.size()) + query, std::min(kMaxQueries, count - query)});
        first_token_.push_back(int(model_.token_row.size()));
        if (place_tokens(index) != 0) return -1;
    }
    const int* slots = model_.path_slots.data();  // only now: the vector may have moved while it grew
    for (TreePath& path : model_.paths) path.slots = slots, slots += path.size;
    num_tokens_ = int(model_.token_row.size());
    if (num_tokens_ == 0) return fail("a pass needs at least one token");
    if (config_.beside_norm ? !pass_.tokens || !pass_.hidden : (pass_.tokens == nullptr) == (pass_.hidden == nullptr))
        return fail(config_.beside_norm ? "a pass needs tokens and hidden states"
                                        : "a pass needs tokens or hidden states");
    if (pass_.tokens) {
        if (!config_.embedding) return fail("the model has no embedding");
        for (int token = 0; token < num_tokens_; ++token)
            if (pass_.tokens[token] < 0 || pass_.tokens[token] >= config_.embedding->rows)
                return fail("a token is outside the vocabulary");
    }
    if (pass_.num_logit_rows && !config_.head) return fail("the model has no head");
    for (int index = 0; index < pass_.num_logit_rows; ++index)
        if (pass_.logit_rows[index] < 0 || pass_.logit_rows[index] >= num_tokens_)
            return fail("a logit row is outside the pass");
    if (model_.num_delta_layers() && prepare_delta() != 0) return -1;
    return reserve();
}

// Positions of a row's tokens in the text and in the cache.
int32_t Forward::place_tokens(int index) {
    const int start = pass_.starts[index], first = int(model_.token_row.size());
    for (int offset = 0; offset < pass_.counts[index]; ++offset) {
        const int parent = pass_.parents ? pass_.parents[first + offset] : offset - 1;
        if (parent < -1 || parent >= offset) return fail("a token's parent does not come before it");
        model_.token_row.push_back(index), model_.token_slot.push_back(start + offset);
        model_.token_offset.push_back(offset);
        model_.token_position.push_back(parent < 0 ? start : model_.token_position[size_t(first + parent)] + 1);
        if (!pass_.parents) continue;
        const int size = model_.token_position.back() - start + 1;
        model_.paths.push_back({nullptr, size});
        model_.path_slots.resize(model_.path_slots.size() + size_t(size));
        auto slot = model_.path_slots.rbegin();
        // From the token up to the root, written from the back: slots ascend.
        for (int node = offset; node >= 0; node = pass_.parents[first + node]) *slot++ = node;
    }
    return 0;
}

int32_t Forward::reserve() {
    const size_t tokens = size_t(num_tokens_), element = size_t(model_.element_bytes());
    const int queries = config_.num_heads * config_.head_dim;
    bool ok = model_.hidden.at_least(tokens * size_t(config_.hidden_size) * 4) != nullptr;
    ok &= !config_.beside_norm || model_.embedded.at_least(tokens * size_t(config_.hidden_size) * 4);
    ok &= model_.qkv.at_least(tokens * size_t(std::max(model_.qkv_columns(), model_.delta_columns())) * 4) != nullptr;
    ok &= model_.query.at_least(tokens * size_t(config_.num_heads * model_.padded_head_dim()) * element) != nullptr;
    ok &= model_.attended.at_least(tokens * size_t(padded_cols(queries)) * element) != nullptr;
    const size_t routed = model_.has_experts() ? tokens * size_t(model_.experts_per_token()) : 0;
    const int inner = padded_cols(model_.widest_inner());
    ok &= model_.gated.at_least(std::max(tokens, routed) * size_t(inner) * element) != nullptr;
    ok &= model_.unmixed.at_least(tokens * size_t(config_.hidden_size) * 4) != nullptr;
    ok &= model_.logit_input.at_least(size_t(pass_.num_logit_rows) * size_t(padded_cols(config_.hidden_size)) *
                                      element) != nullptr ||
          !pass_.num_logit_rows;
    const int input_size = config_.beside_norm ? 2 * config_.hidden_size : config_.hidden_size;
    const size_t row_bytes = size_t(padded_cols(input_size)) * element, mix_columns = size_t(model_.mix_columns());
    ok &= model_.input.at_least(tokens * row_bytes) != nullptr;
    ok &= !mix_columns ||
          (model_.mixed.at_least(tokens * row_bytes) && model_.mix_added.at_least(tokens * mix_columns * 4));
    if (routed) {
        const size_t columns = size_t(padded_rows(model_.most_experts()) + kWide);
        ok &= model_.routed.at_least(tokens * columns * 4) && model_.expert_input.at_least(routed * row_bytes) &&
              model_.expert_out.at_least(routed * size_t(config_.hidden_size) * 4);
        model_.chosen.resize(routed), model_.place_of.resize(routed), model_.expert_weights.resize(routed);
        model_.sorted_token.resize(routed), model_.group_of.resize(routed);
        model_.groups.reserve(size_t(model_.most_experts()));
        model_.next_of_expert.resize(size_t(model_.most_experts()) + 1);
        model_.group_of_expert.resize(size_t(model_.most_experts()));
    }
    const int widest = std::max({padded_cols(input_size), padded_cols(queries), inner});
    while (int(model_.threads.size()) < pool_.size()) model_.threads.push_back(std::make_unique<ThreadBuffers>());
    const size_t gated = std::max(size_t(kGated), 2 * tokens) * 2;  // columns of sixteen, of any number of the rows
    const size_t columns = std::max(gated, size_t(pass_.num_logit_rows) * kHeadPieces) * kWide;
    const size_t groups = std::max(std::min(routed, size_t(model_.most_experts())), size_t(1));
    const size_t most_rows = std::max({tokens, size_t(pass_.num_logit_rows), routed}) + groups * kSpareRows;
    ok &= model_.planes.at_least(most_rows * size_t(plane_bytes(widest))) != nullptr;
    for (int thread = 0; thread < pool_.size(); ++thread) {
        ThreadBuffers& own = *model_.threads[size_t(thread)];
        ok &= own.expanded.at_least(scratch_bytes(widest)) != nullptr;
        ok &= own.scores.at_least(round_up(size_t(max_end_), 64) * kMaxQueries * 4) != nullptr;
        ok &= own.columns.at_least(columns * 4) != nullptr;
        ok &= own.planes.at_least(size_t(kOwnInputs + kSpareRows) * size_t(plane_bytes(widest))) != nullptr;
        ok &= own.input.at_least(size_t(std::min(num_tokens_, kOwnInputs)) * row_bytes) != nullptr;
        ok &= !mix_columns || own.mixed.at_least(size_t(std::min(num_tokens_, kOwnInputs)) * row_bytes);
    }
    if (!ok) return fail("out of memory");
    const size_t stages = model_.layers.size() * kStagesPerLayer + 4;
    if (model_.shares.size() < stages) model_.shares = std::vector<Share>(stages);
    for (Share& share : model_.shares) share.reset();
    model_.best.assign(size_t(pool_.size() * pass_.num_logit_rows), {-INFINITY, 0});
    stage_began_ = Clock::now();
    return 0;
}

void Forward::ask_for(const Next& next, int thread) const {
    const int pieces = next.matrix->num_pieces() / next.parts;
    const int first = Share::first(pieces, pool_.size(), next.least, thread);
    for (int part = 0; part < next.parts; ++part) {
        const int piece = part * pieces + first;
        const PnPart& from = next.matrix->part_of(piece * kWide);
        const uint8_t* begin = from.panels[0].group(from.group_of_piece(piece - from.first_piece));
        for (int at = 0; at < kAskedFor / next.parts; at += 64) __builtin_prefetch(begin + at);
    }
}

void Forward::run(int thread) {
    share(thread, PN_STAGE_EMBED, num_tokens_, 1,
          [&](int begin, int end) {
              for (int token = begin; token < end; ++token) embed(token);
          },
          {model_.layers[0].qkv, 1, 1});
    for (int index = 0; index < int(model_.layers.size()); ++index) layer(thread, index);
    const int last = int(model_.layers.size()) - 1;
    share(thread, PN_STAGE_NORM, num_tokens_ + pass_.num_logit_rows, 1, [&](int begin, int end) {
        for (int item = begin; item < end; ++item) {
            if (item < num_tokens_) {
                tap(item, last, true);
                if (pass_.hidden_out)
                    memcpy(pass_.hidden_out + int64_t(item) * config_.hidden_size, hidden(item),
                           size_t(config_.hidden_size) * 4);
                continue;
            }
            const int row = item - num_tokens_, padded = padded_cols(config_.hidden_size);
            kernels_.norm(hidden(pass_.logit_rows[row]), config_.final_norm, config_.hidden_size, padded, config_.eps,
                          element(model_.logit_input, int64_t(row) * padded));
        }
    });
    if (!pass_.num_logit_rows) return;
    const Rows input = rows_for(thread, *config_.head, model_.logit_input, config_.hidden_size, pass_.num_logit_rows);
    share(thread, PN_STAGE_HEAD, config_.head->num_pieces(), kLeastHeadPieces, [&](int begin, int end) {
        for (int first = begin; first < end; first += kHeadPieces)
            head(thread, input, first, std::min(first + kHeadPieces, end));
    });
}

Forward::Next Forward::after(int index) const {
    if (index + 1 < int(model_.layers.size())) return {model_.layers[size_t(index + 1)].qkv, 1, 1};
    return {pass_.num_logit_rows ? config_.head : nullptr, kLeastHeadPieces, 1};
}

void Forward::layer(int thread, int index) {
    const PnLayer& layer = model_.layers[size_t(index)];
    if (layer.delta_kernel) {
        delta(thread, index);
        if (layer.experts) experts(thread, index);
        else mlp(thread, index);
        return;
    }
    const int hidden_size = config_.hidden_size, columns = model_.qkv_columns();
    const bool is_beside = index == 0 && config_.beside_norm;
    const Buffer& normed = is_beside ? beside_input(thread) : normed_input(thread, layer.input_norm, index - 1);
    const Rows input =
        rows_for(thread, *layer.qkv, mixed_input(thread, layer.attention_mix, layer.attention_base, normed),
                 is_beside ? 2 * hidden_size : hidden_size, num_tokens_);
    share(thread, PN_STAGE_QKV, layer.qkv->num_pieces(), 1, [&](int begin, int end) {
        product(thread, *layer.qkv, begin, end, input, model_.qkv.as<float>(), columns, false, layer.qkv_bias);
    });
    if (config_.is_norm_whole && layer.q_norm)
        share(thread, PN_STAGE_ROPE, 2 * num_tokens_, 1, [&](int begin, int end) {
            for (int item = begin; item < end; ++item) norm_whole(layer, item);
        });
    share(thread, PN_STAGE_ROPE, num_tokens_ * (config_.num_heads + 2 * config_.num_kv_heads), 4,
          [&](int begin, int end) {
              for (int item = begin; item < end; ++item) rotate(index, item);
          });
    share(thread, PN_STAGE_ATTEND, int(model_.tasks.size()), 1,
          [&](int begin, int end) {
              for (int task = begin; task < end; ++task) attend(thread, index, model_.tasks[size_t(task)]);
          },
          {layer.output, 1, 1});
    if (config_.has_output_gate)
        share(thread, PN_STAGE_ATTEND, num_tokens_, 1, [&](int begin, int end) {
            for (int token = begin; token < end; ++token) gate_attended(token);
        });
    const Rows attended =
        rows_for(thread, *layer.output, model_.attended, config_.num_heads * config_.head_dim, num_tokens_);
    sublayer_output(thread, PN_STAGE_OUTPUT, *layer.output, layer.output_bias, attended,
                    layer.attention_mix ? layer.attention_base : nullptr, layer.attention_out_norm,
                    layer.experts ? Next{layer.router, 1, 1} : Next{layer.gate_up, 1, 2});
    if (layer.experts) experts(thread, index);
    else mlp(thread, index);
}

void Forward::mlp(int thread, int index) {
    const PnLayer& layer = model_.layers[size_t(index)];
    const int hidden_size = config_.hidden_size, inner = config_.inner_size;
    const PnExpert own = {layer.gate_up, layer.down, layer.gate_up_bias, layer.down_bias, inner};
    const Buffer& mlp_normed = normed_input(thread, layer.mlp_norm, -1);
    const Rows gated_input =
        rows_for(thread, *layer.gate_up, mixed_input(thread, layer.mlp_mix, layer.mlp_base, mlp_normed), hidden_size,
                 num_tokens_);
    share(thread, PN_STAGE_GATE_UP, layer.gate_up->num_pieces() / 2, 1,
          [&](int begin, int end) {
              gate_up(thread, own, gated_input, num_tokens_, model_.gated.as<uint8_t>(), begin, end);
          },
          {layer.down, 1, 1});
    const Rows gated = rows_for(thread, *layer.down, model_.gated, inner, num_tokens_);
    sublayer_output(thread, PN_STAGE_DOWN, *layer.down, layer.down_bias, gated,
                    layer.mlp_mix ? layer.mlp_base : nullptr, layer.mlp_out_norm, after(index));
}

// What comes out of a sublayer, added to the hidden states; before that mixed where it has a `base`, or else normed and scaled.
void Forward::sublayer_output(int thread, PnStage stage, const PnMatrix& matrix, const float* bias, Rows input,
                              const float* base, const float* out_norm, Next next) {
    const int size = config_.hidden_size;
    const bool is_added = !base && !out_norm && config_.residual_scale == 1.0f;
    float* to = (is_added ? model_.hidden : model_.unmixed).as<float>();
    share(
        thread, stage, matrix.num_pieces(), 1,
        [&](int begin, int end) { product(thread, matrix, begin, end, input, to, size, is_added, bias); }, next);
    if (is_added) return;
    share(thread, stage, num_tokens_, 1, [&](int begin, int end) {
        for (int token = begin; token < end; ++token) {
            if (!base) {
                add_output(token, to + int64_t(token) * size, out_norm);
                continue;
            }
            Mix mix = mix_of(token, base, 1);
            mix.x = to + int64_t(token) * size, mix.row_stride = size;
            kernels_.add_mixed(mix, hidden(token));
        }
    });
}

// Added to the hidden states, after its norm where it has one.
void Forward::add_output(int token, float* output, const float* out_norm) {
    if (out_norm) kernels_.norm_floats(output, out_norm, config_.hidden_size, config_.eps, output);
    kernels_.add_scaled(output, config_.hidden_size, config_.residual_scale, hidden(token));
}

void Forward::gate_attended(int token) {
    const int queries = config_.num_heads * config_.head_dim;
    const float* gates =
        model_.qkv.as<float>() + int64_t(token) * model_.qkv_columns() + model_.query_rows() + 2 * model_.kv_rows();
    kernels_.gate_out(gates, queries, element(model_.attended, int64_t(token) * padded_cols(queries)));
}

// All queries of a token, or all its keys.
void Forward::norm_whole(const PnLayer& layer, int item) {
    const bool is_key = item >= num_tokens_;
    float* heads = model_.qkv.as<float>() + int64_t(item % num_tokens_) * model_.qkv_columns();
    if (is_key) heads += model_.query_rows();
    kernels_.norm_floats(heads, is_key ? layer.k_norm : layer.q_norm,
                         (is_key ? config_.num_kv_heads : config_.num_heads) * config_.head_dim, config_.eps, heads);
}

// Pieces [begin, end) of a matrix times every token; y is [tokens, columns].
void Forward::product(int thread, const PnMatrix& matrix, int begin, int end, Rows x, float* y, int columns,
                      bool accumulate, const float* bias) {
    multiply_pieces(kernels_, matrix, begin, end, x, num_tokens_, {y, columns, 0, columns, accumulate, bias},
                    model_.threads[size_t(thread)]->expanded.as<void>());
}

// Inputs as the matrix takes them. Of few rows every thread makes planes of its own, as with normed inputs.
Rows Forward::rows_for(int thread, const PnMatrix& matrix, const Buffer& x, int cols, int count) {
    const int padded = padded_cols(cols);
    const bool is_shared = count > kOwnInputs;
    const Buffer& planes = is_shared ? model_.planes : model_.threads[size_t(thread)]->planes;
    const Rows out =
        rows_of(matrix, kernels_, x.as<void>(), int64_t(padded) * model_.element_bytes(), count, planes.as<void>());
    const auto make = [&](int begin, int end) {
        if (!is_shared) fetch(out.data, out.row_bytes * count);
        for (int row = begin; row < end; ++row) make_planes(kernels_, out, padded, row, count);
    };
    if (out.planes && is_shared) share(thread, PN_STAGE_NORM, count, std::max(out.chunk_rows, 1), make);
    else if (out.planes) make(0, count);
    return out;
}

void Forward::embed(int token) {
    float* to = hidden(token);
    if (pass_.hidden) memcpy(to, pass_.hidden + int64_t(token) * config_.hidden_size, size_t(config_.hidden_size) * 4);
    if (config_.beside_norm) {
        if (config_.adds_to_normed) kernels_.norm_floats(to, config_.beside_norm, config_.hidden_size, config_.eps, to);
        to = model_.embedded.as<float>() + int64_t(token) * config_.hidden_size;
    } else if (pass_.hidden) {
        return;
    }
    const PnPart& part = config_.embedding->part_of(pass_.tokens[token]);
    kernels_.row(part, pass_.tokens[token] - part.first_piece * kWide, to);
    if (config_.embedding_scale != 1.0f)
        for (int at = 0; at < config_.hidden_size; ++at) to[at] *= config_.embedding_scale;
}

// The input of a product; on the way the layer before is tapped. Of few tokens every thread makes a copy of its own, which is
// cheaper than to wait for the others.
const Buffer& Forward::normed_input(int thread, const float* weight, int tapped_layer) {
    const int padded = padded_cols(config_.hidden_size);
    const bool is_shared = num_tokens_ > kOwnInputs;
    const Buffer& to = is_shared ? model_.input : model_.threads[size_t(thread)]->input;
    const auto norm = [&](int begin, int end) {
        for (int token = begin; token < end; ++token) {
            // If tokens are few, every thread norms all of them, but only one taps each.
            if (is_shared || thread == token % pool_.size()) tap(token, tapped_layer, false);
            void* input = element(to, int64_t(token) * padded);
            if (weight) kernels_.norm(hidden(token), weight, config_.hidden_size, padded, config_.eps, input);
            else kernels_.convert(hidden(token), config_.hidden_size, padded, input);
        }
    };
    if (is_shared) share(thread, PN_STAGE_NORM, num_tokens_, 1, norm);
    else fetch(hidden(0), int64_t(num_tokens_) * config_.hidden_size * 4), norm(0, num_tokens_);
    return to;
}

// The input of the first layer's attention if that is the embedding concatenated with the hidden state.
const Buffer& Forward::beside_input(int thread) {
    const int size = config_.hidden_size, padded = padded_cols(2 * size);
    const bool is_shared = num_tokens_ > kOwnInputs;
    const Buffer& to = is_shared ? model_.input : model_.threads[size_t(thread)]->input;
    const auto make = [&](int begin, int end) {
        for (int token = begin; token < end; ++token) {
            void* embedded = element(to, int64_t(token) * padded);
            void* beside = element(to, int64_t(token) * padded + size);
            kernels_.norm(model_.embedded.as<float>() + int64_t(token) * size, model_.layers[0].input_norm, size, size,
                          config_.eps, embedded);
            if (config_.adds_to_normed) kernels_.convert(hidden(token), size, padded - size, beside);
            else kernels_.norm(hidden(token), config_.beside_norm, size, padded - size, config_.eps, beside);
        }
    };
    if (is_shared) share(thread, PN_STAGE_NORM, num_tokens_, 1, make);
    else make(0, num_tokens_);
    return to;
}

// Mixed inputs of a sublayer, or `normed` itself where there is no mix. As with the norm every thread makes its own of few tokens.
const Buffer& Forward::mixed_input(int thread, const PnMatrix* mix, const float* base, const Buffer& normed) {
    if (!mix) return normed;
    const Rows input = rows_for(thread, *mix, normed, config_.hidden_size, num_tokens_);
    const int columns = model_.mix_columns(), padded = padded_cols(config_.hidden_size);
    share(thread, PN_STAGE_NORM, mix->num_pieces(), 1, [&](int begin, int end) {
        product(thread, *mix, begin, end, input, model_.mix_added.as<float>(), columns, false, nullptr);
    });
    const bool is_shared = num_tokens_ > kOwnInputs;
    const Buffer& to = is_shared ? model_.mixed : model_.threads[size_t(thread)]->mixed;
    const auto make = [&](int begin, int end) {
        for (int token = begin; token < end; ++token) {
            Mix row = mix_of(token, base, 0);
            row.x = element(normed, int64_t(token) * padded), row.row_stride = padded;
            kernels_.mix(row, padded, element(to, int64_t(token) * padded));
        }
    };
    if (is_shared) share(thread, PN_STAGE_NORM, num_tokens_, 1, make);
    else make(0, num_tokens_);
    return to;
}

// Of one side of a sublayer, but for what is mixed.
Mix Forward::mix_of(int token, const float* base, int side) const {
    const int taps = model_.layers[0].mix_taps, size = config_.hidden_size, columns = model_.mix_columns();
    const float* added = model_.mix_added.as<float>() + int64_t(token) * columns + side * columns / 2;
    const int reach = std::min(taps, model_.token_offset[size_t(token)] + 1);
    return {nullptr, 0, base + int64_t(side) * taps * size, added, reach, size};
}

// The last layer is tapped behind the final norm, as Transformers' hidden_states[-1].
void Forward::tap(int token, int layer_index, bool is_normed) {
    const int size = config_.hidden_size;
    for (int slot = 0; slot < pass_.num_taps; ++slot) {
        if (pass_.tap_layers[slot] != layer_index) continue;
        uint8_t* to = static_cast<uint8_t*>(pass_.taps) +
                      (int64_t(token) * pass_.num_taps + slot) * size * model_.element_bytes();
        if (is_normed) kernels_.norm(hidden(token), config_.final_norm, size, size, config_.eps, to);
        else kernels_.convert(hidden(token), size, size, to);
    }
}

// One head of one token: queries to their buffer, keys and values to the cache.
void Forward::rotate(int index, int item) {
    const PnLayer& layer = model_.layers[size_t(index)];
    const int heads = config_.num_heads, kv_heads = config_.num_kv_heads, head_dim = config_.head_dim,
              padded = model_.padded_head_dim();
    const int head = item / num_tokens_, token = item % num_tokens_;  // a thread takes the heads whose products it made
    const int row_index = model_.token_row[size_t(token)], slot = model_.token_slot[size_t(token)],
              row = pass_.rows[row_index];
    const float* from = model_.qkv.as<float>() + int64_t(token) * model_.qkv_columns();
    const int rotary = layer.rope == PN_ROPE_NONE ? 0 : config_.rotary_dim;
    const bool is_local = layer.rope == PN_ROPE_LOCAL;
    const int64_t table = int64_t(model_.token_position[size_t(token)]) * rotary;
    const float *cos = is_local ? config_.local_cos : config_.cos, *sin = is_local ? config_.local_sin : config_.sin;
    const float *q_norm = config_.is_norm_whole ? nullptr : layer.q_norm,
                *k_norm = config_.is_norm_whole ? nullptr : layer.k_norm;
    HeadInput in = {from + head * head_dim, q_norm, config_.eps, cos + table, sin + table, head_dim, rotary};
    if (head < heads) {
        kernels_.query(in, padded, element(model_.query, (int64_t(token) * heads + head) * padded));
    } else if (head < heads + kv_heads) {
        in.x = from + model_.query_rows() + (head - heads) * head_dim, in.weight = k_norm;
        kernels_.key(in, padded, cached(cache_.keys, index, row, head - heads), slot);
    } else {
        const int value = head - heads - kv_heads;
        const bool is_last = slot + 1 == pass_.starts[row_index] + pass_.counts[row_index];
        kernels_.value(from + model_.query_rows() + model_.kv_rows() + value * head_dim, head_dim, padded,
                       cached(cache_.values, index, row, value), slot, is_last);
    }
}

void Forward::attend(int thread, int index, const Task& task) {
    const PnLayer& layer = model_.layers[size_t(index)];
    const int row = pass_.rows[task.row_index], head_dim = config_.head_dim, padded = model_.padded_head_dim();
    const int kv_head = task.head / (config_.num_heads / config_.num_kv_heads),
              position = pass_.parents ? pass_.starts[task.row_index] : model_.token_position[size_t(task.first_query)];
    const int written = pass_.starts[task.row_index] + pass_.counts[task.row_index];
    Attention attention;
    attention.query = element(model_.query, (int64_t(task.first_query) * config_.num_heads + task.head) * padded);
    attention.query_stride = int64_t(config_.num_heads) * padded;
    attention.num_queries = task.num_queries;
    attention.keys = cached(cache_.keys, index, row, kv_head);
    attention.values = cached(cache_.values, index, row, kv_head);
    attention.head_dim = head_dim, attention.padded_head_dim = padded;
    attention.position = position;
    attention.paths = pass_.parents ? model_.paths.data() + task.first_query : nullptr;
    attention.end = layer.is_causal && !pass_.parents ? position + task.num_queries : written;
    attention.window = layer.window;
    attention.is_causal = layer.is_causal != 0;
    attention.scale = config_.attention_scale, attention.cap = config_.attention_cap;
    attention.sink = layer.sinks ? layer.sinks[task.head] : -INFINITY;
    attention.scores = model_.threads[size_t(thread)]->scores.as<float>();
    attention.out_stride = padded_cols(config_.num_heads * head_dim);
    attention.out = element(model_.attended, task.first_query * attention.out_stride + task.head * head_dim);
    kernels_.attend(attention);
}

// Columns of the gated product of `num_rows` rows, sixteen a piece; with the last one the zeros behind them. Rows of `out` are as
// long as the input of `down`.
void Forward::gate_up(int thread, const PnExpert& mlp, Rows input, int num_rows, uint8_t* out, int begin, int end) {
    ThreadBuffers& own = *model_.threads[size_t(thread)];
    const PnMatrix& matrix = *mlp.gate_up;
    const float* bias = mlp.gate_up_bias;
    const Gating gating = {config_.activation, config_.swiglu_alpha, config_.swiglu_limit};
    const int half = matrix.num_pieces() / 2, most = gate_pieces(num_rows), stride = padded_cols(mlp.inner_size);
    const int64_t bytes = model_.element_bytes();
    for (; begin < end; begin += most) {
        const int pieces = std::min(most, end - begin), columns = pieces * kWide, first = begin * kWide;
        float* gates = own.columns.as<float>();
        float* ups = gates + int64_t(num_rows) * columns;
        for (float* y : {gates, ups}) {
            const int at = y == ups ? half + begin : begin;
            multiply_pieces(kernels_, matrix, at, at + pieces, input, num_rows,
                            {y, columns, at, columns, false, bias ? bias + at * kWide : nullptr},
                            own.expanded.as<void>());
        }
        const int size = std::min(columns, mlp.inner_size - first);
        const int behind = first + size == mlp.inner_size ? stride - mlp.inner_size : 0;
        for (int row = 0; row < num_rows; ++row) {
            uint8_t* to = out + (int64_t(row) * stride + first) * bytes;
            kernels_.gate(gates + row * columns, ups + row * columns, size, gating, to);
            memset(to + size * bytes, 0, size_t(behind * bytes));
        }
    }
}

void Forward::head(int thread, Rows input, int begin, int end) {
    ThreadBuffers& own = *model_.threads[size_t(thread)];
    const PnMatrix& matrix = *config_.head;
    const int rows = pass_.num_logit_rows, first = begin * kWide, count = std::min(end * kWide, matrix.rows) - first;
    float* y = pass_.logits ? pass_.logits + first : own.columns.as<float>();
    const int64_t ldy = pass_.logits ? pass_.logits_stride : kHeadPieces * kWide;
    multiply_pieces(kernels_, matrix, begin, end, input, rows, {y, ldy, begin, count, false, nullptr},
                    own.expanded.as<void>());
    if (config_.logit_scale != 1.0f || config_.logit_cap != 0.0f)
        for (int row = 0; row < rows; ++row)
            kernels_.scale_and_cap(y + row * ldy, count, config_.logit_scale, config_.logit_cap);
    if (!pass_.argmax) return;
    for (int row = 0; row < rows; ++row) {
        Best& best = model_.best[size_t(thread * rows + row)];
        if (std::isnan(best.value)) continue;
        // Of equal ones the first, and pieces do not come in order.
        const float least = first < best.index ? std::nextafter(best.value, -INFINITY) : best.value;
        float value;
        const int index = kernels_.argmax(y + row * ldy, count, least, &value);
        if (index >= 0) best = {value, first + index};
    }
}

void Forward::finish() {
    if (!pass_.argmax) return;
    for (int row = 0; row < pass_.num_logit_rows; ++row) {
        Best best = model_.best[size_t(row)];
        for (int thread = 1; thread < pool_.size(); ++thread) {
            const Best& other = model_.best[size_t(thread * pass_.num_logit_rows + row)];
            const bool is_better = other.value > best.value || (other.value == best.value && other.index < best.index);
            if (is_better || std::isnan(other.value)) best = other;
        }
        pass_.argmax[row] = std::isfinite(best.value) ? best.index : -1;
    }
}

}  // namespace pn

using namespace pn;

int32_t pn_keep(const PnModel* model, const PnCache* cache, int32_t num_rows, const int32_t* rows,
                const int32_t* starts, const int32_t* counts, const int32_t* slots) {
    return in_turn([&](Pool&) {
        const Kernels& kernels = *kernels_for(model->config.dtype);
        const int64_t element = model->element_bytes();
        for (int index = 0; index < num_rows; slots += counts[index++]) {
            const int start = starts[index], count = counts[index];
            if (rows[index] < 0 || rows[index] >= cache->num_rows || start < 0 || count < 0)
                return fail("a row to keep is outside the cache");
            for (int at = 0; at < count; ++at)
                if (slots[at] < (at ? slots[at - 1] + 1 : 0) || slots[at] >= cache->max_len - start)
                    return fail("slots to keep must ascend within the cache");
            for (int layer = 0; layer < model->config.num_layers - model->num_delta_layers(); ++layer)
                for (int head = 0; head < model->config.num_kv_heads; ++head) {
                    const int64_t at =
                        (layer * cache->layer_stride + rows[index] * cache->row_stride + head * cache->head_stride) *
                        element;
                    // Slots ascend: a position is read before another one is moved there.
                    for (int to = 0; to < count; ++to)
                        if (slots[to] != to)
                            kernels.move(static_cast<uint8_t*>(cache->keys) + at,
                                         static_cast<uint8_t*>(cache->values) + at, model->padded_head_dim(),
                                         start + slots[to], start + to);
                }
        }
        return 0;
    });
}

int32_t pn_forward(PnModel* model, const PnCache* cache, const PnPass* pass) {
    return in_turn([&](Pool& pool) {
        Forward forward(*model, *cache, *pass, pool);
        if (forward.prepare() != 0) return -1;
        pool.run([](void* self, int thread) { static_cast<Forward*>(self)->run(thread); }, &forward);
        forward.finish();
        return 0;
    });
}
