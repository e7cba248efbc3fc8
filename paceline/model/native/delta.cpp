// Gated delta nets (arXiv 2412.06464). For each token, by value head: S <- e^g S, then S <- S + k u^T with u = beta (v - S^T k);
// output: S^T q. A token's update (k, u, g) does not depend on later tokens, so the state in memory lags behind: a token reads it,
// and the pending tokens and tokens of the pass before it (in a tree, its ancestors). model/torch/delta_cache.py decides when the
// oldest pending tokens are committed to the state.
#include <cmath>
#include <cstring>

#include "error.h"
#include "forward.h"

namespace pn {

namespace {

constexpr float kUnitEps = 1e-6f;

}  // namespace

int32_t Forward::prepare_delta() {
    if (!cache_.memories || !pass_.held) return fail("a pass of gated delta nets needs their memories");
    gone_.assign(size_t(pass_.num_rows), 0);
    for (int at = 0; at < pass_.num_settles; ++at) {
        const int index = pass_.settle_rows[at];
        if (index < 0 || index >= pass_.num_rows || pass_.settle_counts[at] < 0 || pass_.settle_before[at] < 0 ||
            pass_.settle_before[at] >= pass_.counts[index])
            return fail("a trail becomes shorter where it is not");
        gone_[size_t(index)] += pass_.settle_counts[at];
        if (gone_[size_t(index)] > pass_.held[index] + pass_.settle_before[at])
            return fail("a trail has not so many tokens");
    }
    int longest = 0;
    for (int index = 0; index < pass_.num_rows; ++index) {
        const int all = pass_.held[index] + pass_.counts[index];
        if (pass_.held[index] < 0 || pass_.held[index] > cache_.room || all - gone_[size_t(index)] > cache_.room)
            return fail("a trail has no room for a row's tokens");
        longest = std::max(longest, all);
    }
    const size_t tokens = size_t(num_tokens_), heads = size_t(config_.delta_value_heads);
    const size_t row = size_t(padded_cols(model_.delta_values()) * model_.element_bytes());
    bool ok = model_.delta_mixed.at_least(tokens * size_t(model_.delta_channels()) * 4) &&
              model_.delta_betas.at_least(tokens * heads * 4) && model_.delta_decays.at_least(tokens * heads * 4) &&
              model_.delta_changes.at_least(tokens * size_t(model_.delta_values()) * 4) &&
              model_.delta_found.at_least(tokens * size_t(model_.delta_values()) * 4) &&
              model_.delta_out.at_least(tokens * row);
    while (int(model_.threads.size()) < pool_.size()) model_.threads.push_back(std::make_unique<ThreadBuffers>());
    for (int thread = 0; thread < pool_.size();
         ++thread)  // four numbers for each token that another may follow, and two vectors
        ok &= model_.threads[size_t(thread)]->delta.at_least(
                  size_t(4 * longest + config_.delta_key_dim + config_.delta_value_dim) * 4) != nullptr;
    return ok ? 0 : fail("out of memory");
}

void Forward::delta(int thread, int index) {
    const PnLayer& layer = model_.layers[size_t(index)];
    const PnMemory& memory = cache_.memories[model_.cache_layer[size_t(index)]];
    const int columns = model_.delta_columns(), values = model_.delta_values(), heads = config_.delta_value_heads,
              dim = config_.delta_value_dim, all_heads = 2 * config_.delta_key_heads + heads;
    const Rows input = rows_for(thread, *layer.qkv, normed_input(thread, layer.input_norm, index - 1),
                                config_.hidden_size, num_tokens_);
    share(thread, PN_STAGE_QKV, layer.qkv->num_pieces(), 1, [&](int begin, int end) {
        product(thread, *layer.qkv, begin, end, input, model_.qkv.as<float>(), columns, false, layer.qkv_bias);
    });
    share(thread, PN_STAGE_ROPE, num_tokens_ * (all_heads + 1), 4, [&](int begin, int end) {
        for (int item = begin; item < end; ++item) {
            const int head = item / num_tokens_, token = item % num_tokens_;
            if (head < all_heads) convolve(layer, memory, token, head);
            else weigh(layer, token);
        }
    });
    share(thread, PN_STAGE_ATTEND, pass_.num_rows * heads, 1, [&](int begin, int end) {
        for (int item = begin; item < end; ++item) delta_head(thread, memory, item / heads, item % heads);
    });
    share(thread, PN_STAGE_ATTEND, 4 * pass_.num_rows + num_tokens_, 1,
          [&](int begin, int end) {
              for (int item = begin; item < end; ++item) {
                  if (item < 4 * pass_.num_rows) {
                      keep_trail(memory, item / 4, item % 4);
                      continue;
                  }
                  const int token = item - 4 * pass_.num_rows, stride = padded_cols(values);
                  const float* gates = model_.qkv.as<float>() + int64_t(token) * columns + model_.delta_gate_at();
                  float* found = model_.delta_found.as<float>() + int64_t(token) * values;
                  for (int head = 0; head < heads; ++head)
                      kernels_.norm_floats(found + head * dim, layer.delta_norm, dim, config_.eps, found + head * dim);
                  kernels_.gate(gates, found, values, {PN_SILU, 0.0f, 0.0f},
                                element(model_.delta_out, int64_t(token) * stride));
              }
          },
          {layer.output, 1, 1});
    const Rows out = rows_for(thread, *layer.output, model_.delta_out, values, num_tokens_);
    sublayer_output(thread, PN_STAGE_OUTPUT, *layer.output, layer.output_bias, out, nullptr, layer.attention_out_norm,
                    layer.experts ? Next{layer.router, 1, 1} : Next{layer.gate_up, 1, 2});
}

// A query, key or value head of a token, from its own channels and those of the tokens that it follows. Queries and keys have a
// length of one, queries divided by the root of their size.
void Forward::convolve(const PnLayer& layer, const PnMemory& memory, int token, int head) {
    const int key_heads = config_.delta_key_heads, key_dim = config_.delta_key_dim, taps = config_.delta_taps;
    const int64_t channels = model_.delta_channels();
    const bool is_value = head >= 2 * key_heads;
    const int size = is_value ? config_.delta_value_dim : key_dim;
    const int first = is_value ? 2 * model_.delta_keys() + (head - 2 * key_heads) * size : head * key_dim;
    const int index = model_.token_row[size_t(token)], row = pass_.rows[index], begin = first_token_[size_t(index)];
    const float* rows[kMaxTaps];
    int node = token - begin, before = pass_.held[index];
    for (int tap = taps - 1; tap >= 0; --tap) {
        if (node >= 0) {
            rows[tap] = model_.qkv.as<float>() + int64_t(begin + node) * model_.delta_columns();
            node = pass_.parents ? pass_.parents[begin + node] : node - 1;
        } else if (--before >= 0) {
            rows[tap] = memory.inputs + (int64_t(row) * cache_.room + before) * channels;
        } else {
            // `before` is negative: counted from the end of the row's window.
            rows[tap] = memory.windows + (int64_t(row + 1) * (taps - 1) + before) * channels;
        }
    }
    float* out = model_.delta_mixed.as<float>() + token * channels + first;
    kernels_.convolve({rows, layer.delta_kernel, channels, taps, first, size}, out);
    if (!is_value)
        kernels_.norm_floats(out, model_.delta_units.data() + (head < key_heads ? 0 : key_dim), size,
                             kUnitEps / float(size), out);  // added to the mean, not the sum
}

// Betas and decays of a token.
void Forward::weigh(const PnLayer& layer, int token) {
    const int heads = config_.delta_value_heads;
    const float* columns = model_.qkv.as<float>() + int64_t(token) * model_.delta_columns();
    for (int head = 0; head < heads; ++head) {
        const float beta = columns[model_.delta_beta_at() + head];
        const float step = columns[model_.delta_step_at() + head] + layer.delta_step[head];
        const float rate = step > 20.0f ? step : std::log1p(std::exp(step));  // softplus, as PyTorch has it
        model_.delta_betas.as<float>()[token * heads + head] = 1.0f / (1.0f + std::exp(-beta));
        model_.delta_decays.as<float>()[token * heads + head] = layer.delta_rate[head] * rate;
    }
}

// What one value head adds to its state, and finds there, for all tokens of a row, one after another.
void Forward::delta_head(int thread, const PnMemory& memory, int row_index, int head) {
    const int heads = config_.delta_value_heads, key_heads = config_.delta_key_heads, key_dim = config_.delta_key_dim,
              dim = config_.delta_value_dim, key_head = head / (heads / key_heads);
    const int row = pass_.rows[row_index], held = pass_.held[row_index], count = pass_.counts[row_index];
    const int64_t begin = first_token_[size_t(row_index)], channels = model_.delta_channels(),
                  values = model_.delta_values(), keys = model_.delta_keys(), trail = int64_t(row) * cache_.room;
    const float* old_keys = memory.keys + trail * keys + key_head * key_dim;
    const float* old_changes = memory.changes + trail * values + head * dim;
    const float* old_decays = memory.decays + trail * heads + head;
    const float* new_queries = model_.delta_mixed.as<float>() + begin * channels + key_head * key_dim;
    const float* new_keys = new_queries + keys;
    const float* new_values = model_.delta_mixed.as<float>() + begin * channels + 2 * keys + head * dim;
    float* new_changes = model_.delta_changes.as<float>() + begin * values + head * dim;
    const float* new_decays = model_.delta_decays.as<float>() + begin * heads + head;
    const float* betas = model_.delta_betas.as<float>() + begin * heads + head;
    const float* state = memory.states + (int64_t(row) * heads + head) * key_dim * dim;
    // Of every token that is held and of the pass: the sum of decays up to it, its weight, products of keys, of keys and queries.
    float* sums = model_.threads[size_t(thread)]->delta.as<float>();
    float *weights = sums + held + count, *of_key = weights + held + count, *of_query = of_key + held + count;
    float* vector = of_query + held + count;
    float* known = vector + key_dim;
    int gone = 0, next = 0;
    for (; next < pass_.num_settles && pass_.settle_rows[next] < row_index;) ++next;
    for (int token = 0; token < count; ++token) {
        for (; next < pass_.num_settles && pass_.settle_rows[next] == row_index && pass_.settle_before[next] == token;
             ++next) {
            settle(memory, row_index, head, gone, pass_.settle_counts[next], sums);
            gone += pass_.settle_counts[next];
        }
        const int all = held + token;  // tokens [gone, all) may be before this one
        const float* query = new_queries + token * channels;
        const float* key = new_keys + token * channels;
        if (gone < held) {
            kernels_.dots(old_keys + gone * keys, keys, held - gone, key, key_dim, of_key + gone);
            kernels_.dots(old_keys + gone * keys, keys, held - gone, query, key_dim, of_query + gone);
        }
        const int fresh = std::max(gone - held, 0);  // the first token of the pass that is not in the state
        kernels_.dots(new_keys + fresh * channels, channels, token - fresh, key, key_dim, of_key + held + fresh);
        // One more than of the key: the output also sees the token's own change, by of_query[all].
        kernels_.dots(new_keys + fresh * channels, channels, token + 1 - fresh, query, key_dim,
                      of_query + held + fresh);
        // Sums of decays run along the path; tokens outside the path have weight zero.
        float sum = 0.0f;
        for (int at = gone; at < held; ++at) sums[at] = sum += old_decays[int64_t(at) * heads];
        for (int at = std::max(gone, held); at < all; ++at) weights[at] = 0.0f;
        const auto walk = [&](int at) {
            sums[held + at] = sum += new_decays[int64_t(at) * heads], weights[held + at] = 1.0f;
        };
        if (pass_.parents) {
            const TreePath& path = model_.paths[size_t(begin + token)];
            for (int step = 0; step + 1 < path.size; ++step) walk(path.slots[step]);
        } else {
            for (int at = fresh; at < token; ++at) walk(at);
        }
        sum += new_decays[int64_t(token) * heads];
        // Outside the path `sums` are those of an earlier token, and not read.
        for (int at = gone; at < all; ++at)
            weights[at] = at < held || weights[at] != 0.0f ? std::exp(sum - sums[at]) : 0.0f;
        const float left = std::exp(sum);
        const auto read = [&](const float* from, const float* products, float* out) {
            for (int at = 0; at < key_dim; ++at) vector[at] = from[at] * left;
            kernels_.combine(state, dim, vector, key_dim, dim, out);
            for (int at = gone; at < all; ++at) sums[at] = weights[at] * products[at];  // sums are no longer needed
            if (gone < held) kernels_.combine(old_changes + gone * values, values, sums + gone, held - gone, dim, out);
            kernels_.combine(new_changes + fresh * values, values, sums + held + fresh, token - fresh, dim, out);
        };
        memset(known, 0, size_t(dim) * 4);
        read(key, of_key, known);
        float* change = new_changes + token * values;
        const float beta = betas[int64_t(token) * heads];
        for (int at = 0; at < dim; ++at) change[at] = beta * (new_values[token * channels + at] - known[at]);
        float* found = model_.delta_found.as<float>() + (begin + token) * values + head * dim;
        memset(found, 0, size_t(dim) * 4);
        read(query, of_query, found);
        kernels_.add_scaled(change, dim, of_query[all], found);
    }
}

// Tokens [first, first + count) of those held and of the pass go into the state of one head.
void Forward::settle(const PnMemory& memory, int row_index, int head, int first, int count, float* weights) {
    const int heads = config_.delta_value_heads, key_dim = config_.delta_key_dim, dim = config_.delta_value_dim,
              key_head = head / (heads / config_.delta_key_heads);
    const int row = pass_.rows[row_index], held = pass_.held[row_index];
    const int64_t begin = first_token_[size_t(row_index)], channels = model_.delta_channels(),
                  values = model_.delta_values(), keys = model_.delta_keys(), trail = int64_t(row) * cache_.room;
    float* state = memory.states + (int64_t(row) * heads + head) * key_dim * dim;
    for (int from = first, end = first + count; from < end;) {
        const bool is_old = from < held;
        const int to = is_old ? std::min(end, held) : end, place = is_old ? from : from - held;
        const float* decays = is_old ? memory.decays + (trail + place) * heads + head
                                     : model_.delta_decays.as<float>() + (begin + place) * heads + head;
        const float* key =
            is_old ? memory.keys + (trail + place) * keys + key_head * key_dim
                   : model_.delta_mixed.as<float>() + (begin + place) * channels + keys + key_head * key_dim;
        const float* changes = is_old ? memory.changes + (trail + place) * values + head * dim
                                      : model_.delta_changes.as<float>() + (begin + place) * values + head * dim;
        const int64_t key_stride = is_old ? keys : channels;
        float *rest = weights, *own = weights + (to - from), sum = 0.0f;
        for (int at = to - 1; at >= from; --at) {  // what later tokens leave of it
            rest[at - from] = std::exp(sum);
            sum += decays[int64_t(at - from) * heads];
        }
        const float left = std::exp(sum);
        for (int column = 0; column < key_dim; ++column) {
            for (int at = 0; at < to - from; ++at) own[at] = rest[at] * key[at * key_stride + column];
            float* to_state = state + int64_t(column) * dim;
            for (int at = 0; at < dim; ++at) to_state[at] *= left;
            kernels_.combine(changes, values, own, to - from, dim, to_state);
        }
        from = to;
    }
}

// Updates a row's pending window after the pass: remaining tokens move to the front, followed by those of the pass. `kind`: inputs
// and windows, keys, changes or decays.
void Forward::keep_trail(const PnMemory& memory, int row_index, int kind) {
    const int row = pass_.rows[row_index], held = pass_.held[row_index], count = pass_.counts[row_index],
              gone = gone_[size_t(row_index)], windows = config_.delta_taps - 1;
    const int64_t begin = first_token_[size_t(row_index)], channels = model_.delta_channels(),
                  trail = int64_t(row) * cache_.room;
    struct Source {
        float* trail;
        int64_t size;
        const float* fresh;
        int64_t stride;
    };
    const float* columns = model_.qkv.as<float>() + begin * model_.delta_columns();
    const Source sources[4] = {
        {memory.inputs, channels, columns, model_.delta_columns()},
        {memory.keys, model_.delta_keys(), model_.delta_mixed.as<float>() + begin * channels + model_.delta_keys(),
         channels},
        {memory.changes, model_.delta_values(), model_.delta_changes.as<float>() + begin * model_.delta_values(),
         model_.delta_values()},
        {memory.decays, config_.delta_value_heads, model_.delta_decays.as<float>() + begin * config_.delta_value_heads,
         config_.delta_value_heads},
    };
    const Source& source = sources[kind];
    float* own = source.trail + trail * source.size;
    const size_t bytes = size_t(source.size) * 4;
    const auto from = [&](int at) {
        return at < held ? own + at * source.size : source.fresh + (at - held) * source.stride;
    };
    if (kind == 0 && gone) {  // before the inputs that it reads move
        float* window = memory.windows + int64_t(row) * windows * channels;
        for (int at = 0; at < windows; ++at) {
            const int place = gone - windows + at;  // ascending: none is overwritten before it is read
            memmove(window + at * channels, place < 0 ? window + (place + windows) * channels : from(place), bytes);
        }
    }
    for (int at = gone; at < held + count; ++at)
        if (gone || at >= held) memmove(own + (at - gone) * source.size, from(at), bytes);
}

}  // namespace pn
