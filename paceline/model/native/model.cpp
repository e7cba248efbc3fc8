// Models, operations on single matrices, and DFlash's features.
#include "model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#include "error.h"

namespace pn {

namespace {

// float32 weights are rounded for bfloat16 when they are packed, not when they are multiplied.
const char* fault_of(const PnMatrix& matrix, int dtype) {
    for (const PnPart& part : matrix.parts)
        if (dtype == PN_BF16 && part.format == PN_F32) return "a float32 matrix cannot be multiplied in bfloat16";
    return nullptr;
}

const char* fault_of(const PnMatrix* matrix, int rows, int cols, int dtype) {
    if (!matrix) return "a matrix is missing";
    if (const char* fault = fault_of(*matrix, dtype)) return fault;
    return padded_rows(matrix->rows) == padded_rows(rows) && matrix->cols == cols
               ? nullptr
               : "a matrix does not have the config's shape";
}

// All layers of a model are mixed, with as many taps, or none.
const char* mix_fault_of(const PnModel& model, const PnLayer& layer) {
    const PnConfig& config = model.config;
    if (layer.mix_taps != model.layers[0].mix_taps || layer.mix_taps < 0)
        return "layers must be mixed with as many taps";
    if (!layer.mix_taps) return layer.attention_mix || layer.mlp_mix ? "a mix needs taps" : nullptr;
    if (config.hidden_size % kWide) return "only hidden sizes that are multiples of 16 can be mixed";
    if (!layer.attention_base || !layer.mlp_base) return "a mix is incomplete";
    for (const PnMatrix* matrix : {layer.attention_mix, layer.mlp_mix})
        if (const char* fault = fault_of(matrix, model.mix_columns(), config.hidden_size, config.dtype)) return fault;
    return nullptr;
}

const char* mlp_fault_of(const PnConfig& config, const PnExpert& mlp) {
    if (mlp.inner_size < 1) return "sizes must be positive";
    const char* fault = fault_of(mlp.gate_up, 2 * padded_rows(mlp.inner_size), config.hidden_size, config.dtype);
    return fault ? fault : fault_of(mlp.down, config.hidden_size, mlp.inner_size, config.dtype);
}

const char* experts_fault_of(const PnModel& model, const PnLayer& layer) {
    const PnConfig& config = model.config;
    if (layer.num_experts < 1 || config.experts_per_token < 1 || config.experts_per_token > layer.num_experts ||
        layer.has_shared < 0 || layer.has_shared > 1)
        return "a token cannot choose so many experts";
    if (layer.mlp_mix) return "experts cannot be mixed";
    const int rows = padded_rows(layer.num_experts) * layer.has_shared + (layer.has_shared ? 1 : layer.num_experts);
    if (const char* fault = fault_of(layer.router, rows, config.hidden_size, config.dtype)) return fault;
    for (int expert = 0; expert < layer.num_experts + layer.has_shared; ++expert)
        if (const char* fault = mlp_fault_of(config, layer.experts[expert])) return fault;
    return nullptr;
}

const char* delta_fault_of(const PnModel& model, const PnLayer& layer) {
    const PnConfig& config = model.config;
    if (config.delta_key_heads < 1 || config.delta_value_heads < 1 || config.delta_key_dim < 1 ||
        config.delta_value_dim < 1 || config.delta_value_heads % config.delta_key_heads || config.delta_taps < 1 ||
        config.delta_taps > kMaxTaps)
        return "the sizes of a gated delta net are impossible";
    if (!layer.delta_rate || !layer.delta_step || !layer.delta_norm || layer.attention_mix)
        return "a gated delta net is incomplete";
    return config.fc ? "a drafter's layers have attention" : nullptr;
}

const char* fault_of(const PnModel& model) {
    const PnConfig& config = model.config;
    if (config.num_layers < 1 || config.hidden_size < 1 || config.inner_size < 1 || config.num_heads < 1 ||
        config.num_kv_heads < 1)
        return "sizes must be positive";
    if (config.head_dim < 2 || config.head_dim % 2 || config.head_dim > kMaxHeadDim)
        return "the head dimension must be even and at most 1024";
    if (config.num_heads % config.num_kv_heads) return "heads must be a multiple of key heads";
    if (config.dtype != PN_F32 && config.dtype != PN_BF16) return "the dtype must be float32 or bfloat16";
    const int queries = config.num_heads * config.head_dim;
    if (config.rotary_dim < 2 || config.rotary_dim % 2 || config.rotary_dim > config.head_dim)
        return "the rotated part of a head must be even and no larger than the head";
    if (config.activation < PN_SILU || config.activation > PN_CLAMPED_SWIGLU) return "the activation is unknown";
    for (const PnLayer& layer : model.layers) {
        if (layer.window < 0 || layer.rope < PN_ROPE_MAIN || layer.rope > PN_ROPE_NONE) return "a layer is incomplete";
        if (layer.rope == PN_ROPE_LOCAL && !(config.local_cos && config.local_sin))
            return "rotary tables of local layers are missing";
        for (const char* fault :
             {layer.delta_kernel ? delta_fault_of(model, layer) : nullptr,
              fault_of(
                  layer.qkv, layer.delta_kernel ? model.delta_columns() : model.qkv_columns(),
                  config.beside_norm && &layer == model.layers.data() ? 2 * config.hidden_size : config.hidden_size,
                  config.dtype),
              fault_of(layer.output, config.hidden_size, layer.delta_kernel ? model.delta_values() : queries,
                       config.dtype),
              layer.experts ? experts_fault_of(model, layer)
                            : mlp_fault_of(config, {layer.gate_up, layer.down, nullptr, nullptr, config.inner_size}),
              mix_fault_of(model, layer)})
            if (fault) return fault;
    }
    const PnLayer& first = model.layers[0];
    if (config.beside_norm && (!config.embedding || !first.input_norm || first.delta_kernel || first.attention_mix))
        return "what stands beside hidden states needs an embedding, its norm, and attention";
    if (!config.final_norm || !config.cos || !config.sin) return "norm or rotary tables are missing";
    if (config.embedding && config.embedding->cols != config.hidden_size)
        return "the embedding does not have the config's shape";
    if (config.head && config.head->cols != config.hidden_size) return "the head does not have the config's shape";
    if (const char* fault = config.head ? fault_of(*config.head, config.dtype) : nullptr) return fault;
    if (!config.fc) return nullptr;
    if (!config.hidden_norm) return "the norm of the features is missing";
    if (config.is_norm_whole) return "keys of features are normed by head";
    if (const char* fault = fault_of(config.fc, config.hidden_size, config.fc->cols, config.dtype)) return fault;
    return fault_of(config.context_kv, 2 * config.num_layers * model.kv_rows(), config.hidden_size, config.dtype);
}

// DFlash: features through fc and norm to the keys and values of all layers.
class Inject {
public:
    Inject(PnModel& model, const PnCache& cache, const int32_t* rows, const void* features, Pool& pool)
        : model_(model), config_(model.config), cache_(cache), rows_(rows),
          features_(static_cast<const uint8_t*>(features)), pool_(pool), kernels_(*kernels_for(config_.dtype)),
          num_tokens_(int(model.token_row.size())) {}

    int32_t prepare() {
        const size_t tokens = size_t(num_tokens_), element = size_t(model_.element_bytes());
        const int features = padded_cols(config_.fc->cols), hidden = padded_cols(config_.hidden_size);
        bool ok = model_.features.at_least(tokens * size_t(features) * element) &&
                  model_.hidden.at_least(tokens * size_t(config_.hidden_size) * 4) &&
                  model_.input.at_least(tokens * size_t(hidden) * element) &&
                  model_.qkv.at_least(tokens * size_t(columns()) * 4) &&
                  model_.planes.at_least((tokens + kSpareRows) * size_t(plane_bytes(std::max(features, hidden))));
        while (int(model_.threads.size()) < pool_.size()) model_.threads.push_back(std::make_unique<ThreadBuffers>());
        for (int thread = 0; thread < pool_.size(); ++thread)
            ok &=
                model_.threads[size_t(thread)]->expanded.at_least(scratch_bytes(std::max(features, hidden))) != nullptr;
        if (model_.shares.size() < kStages) model_.shares = std::vector<Share>(kStages);
        for (Share& share : model_.shares) share.reset();
        return ok ? 0 : fail("out of memory");
    }

    void run(int thread) {
        const int hidden_size = config_.hidden_size, padded = padded_cols(hidden_size), features = config_.fc->cols;
        const int64_t ldx = padded_cols(features), element = model_.element_bytes();
        share(thread, 0, num_tokens_, 1, [&](int token) {
            uint8_t* to = model_.features.as<uint8_t>() + token * ldx * element;
            memcpy(to, features_ + int64_t(token) * features * element, size_t(features * element));
            memset(to + features * element, 0, size_t((ldx - features) * element));
        });
        product(thread, 1, *config_.fc, model_.features, model_.hidden, hidden_size, nullptr);
        share(thread, 3, num_tokens_, 1, [&](int token) {
            kernels_.norm(model_.hidden.as<float>() + int64_t(token) * hidden_size, config_.hidden_norm, hidden_size,
                          padded, config_.eps, model_.input.as<uint8_t>() + int64_t(token) * padded * element);
        });
        product(thread, 4, *config_.context_kv, model_.input, model_.qkv, columns(), config_.context_bias);
        share(thread, 6, num_tokens_ * 2 * config_.num_layers * config_.num_kv_heads, 4, [&](int item) { put(item); });
    }

private:
    static constexpr size_t kStages = 7;

    int columns() const { return 2 * config_.num_layers * model_.kv_rows(); }

    template <class Work>
    void pieces(int stage, int count, int least, int thread, Work work) {
        model_.shares[size_t(stage)].each(count, pool_.size(), least, thread, work);
    }

    template <class Work>
    void share(int thread, int stage, int count, int least, Work work) {
        pieces(stage, count, least, thread, [&](int begin, int end) {
            for (int item = begin; item < end; ++item) work(item);
        });
        pool_.barrier();
    }

    // Two stages: the inputs as the matrix takes them, and the product.
    void product(int thread, int stage, const PnMatrix& matrix, const Buffer& x, const Buffer& y, int columns,
                 const float* bias) {
        const int padded = matrix.padded_cols();
        const int64_t row_bytes = int64_t(padded) * model_.element_bytes();
        const Rows in = rows_of(matrix, kernels_, x.as<void>(), row_bytes, num_tokens_, model_.planes.as<void>());
        if (in.planes)
            share(thread, stage, num_tokens_, std::max(in.chunk_rows, 1),
                  [&](int token) { make_planes(kernels_, in, padded, token, num_tokens_); });
        pieces(stage + 1, matrix.num_pieces(), 1, thread, [&](int begin, int end) {
            multiply_pieces(kernels_, matrix, begin, end, in, num_tokens_,
                            {y.as<float>(), columns, 0, columns, false, bias},
                            model_.threads[size_t(thread)]->expanded.as<void>());
        });
        pool_.barrier();
    }

    void put(int item) {
        const int kv_heads = config_.num_kv_heads, head_dim = config_.head_dim, padded = model_.padded_head_dim();
        const int head = item % kv_heads, layer = item / kv_heads % config_.num_layers;
        const bool is_value = item / kv_heads / config_.num_layers % 2;
        const int token = item / kv_heads / config_.num_layers / 2, position = model_.token_position[size_t(token)];
        const int row = rows_[model_.token_row[size_t(token)]];
        const float* from = model_.qkv.as<float>() + int64_t(token) * columns() +
                            (is_value * config_.num_layers + layer) * model_.kv_rows() + head * head_dim;
        const int64_t at = layer * cache_.layer_stride + row * cache_.row_stride + head * cache_.head_stride;
        void* to = static_cast<uint8_t*>(is_value ? cache_.values : cache_.keys) + at * model_.element_bytes();
        if (is_value) {
            const bool is_last =
                token + 1 == num_tokens_ || model_.token_row[size_t(token)] != model_.token_row[size_t(token + 1)];
            kernels_.value(from, head_dim, padded, to, position, is_last);
            return;
        }
        const int64_t table = int64_t(position) * config_.rotary_dim;
        kernels_.key({from, model_.layers[size_t(layer)].k_norm, config_.eps, config_.cos + table, config_.sin + table,
                      head_dim, config_.rotary_dim},
                     padded, to, position);
    }

    PnModel& model_;
    const PnConfig& config_;
    const PnCache& cache_;
    const int32_t* rows_;
    const uint8_t* features_;
    Pool& pool_;
    const Kernels& kernels_;
    const int num_tokens_;
};

// A matrix product on its own.
struct Multiply {
    const PnMatrix& matrix;
    const Kernels& kernels;
    Pool& pool;
    Buffer x, planes;
    Rows in;
    std::vector<std::unique_ptr<Buffer>> scratch;
    Share pieces;
    int num_tokens;
    float* out;

    void run(int thread) {
        pieces.each(matrix.num_pieces(), pool.size(), 1, thread, [&](int begin, int end) {
            multiply_pieces(kernels, matrix, begin, end, in, num_tokens,
                            {out, matrix.rows, 0, matrix.rows, false, nullptr}, scratch[size_t(thread)]->as<void>());
        });
    }
};

int32_t multiply(const PnMatrix& matrix, int dtype, const float* x, int num_tokens, float* out, Pool& pool) {
    Multiply work = {matrix, *kernels_for(dtype), pool, {}, {}, {}, {}, {}, num_tokens, out};
    const int padded = matrix.padded_cols(), element = dtype == PN_F32 ? 4 : 2;
    const bool has_planes = takes_planes(matrix, work.kernels);
    bool ok = work.x.at_least(size_t(num_tokens) * size_t(padded) * size_t(element)) != nullptr;
    for (int thread = 0; thread < pool.size(); ++thread) {
        work.scratch.push_back(std::make_unique<Buffer>());
        ok &= work.scratch.back()->at_least(scratch_bytes(padded)) != nullptr;
    }
    if (has_planes)
        ok &= work.planes.at_least(size_t(num_tokens + kSpareRows) * size_t(plane_bytes(padded))) != nullptr;
    if (!ok) return fail("out of memory");
    work.in =
        rows_of(matrix, work.kernels, work.x.as<void>(), int64_t(padded) * element, num_tokens, work.planes.as<void>());
    for (int token = 0; token < num_tokens; ++token) {
        uint8_t* row = work.x.as<uint8_t>() + int64_t(token) * padded * element;
        work.kernels.convert(x + int64_t(token) * matrix.cols, matrix.cols, padded, row);
        if (has_planes) make_planes(work.kernels, work.in, padded, token, num_tokens);
    }
    pool.run([](void* self, int thread) { static_cast<Multiply*>(self)->run(thread); }, &work);
    return 0;
}

}  // namespace

}  // namespace pn

using namespace pn;

PnModel* pn_model_new(const PnConfig* config) {
    try {
        std::unique_ptr<PnModel> model = std::make_unique<PnModel>();
        model->config = *config;
        if (config->num_layers > 0) model->layers.assign(config->layers, config->layers + config->num_layers);
        model->config.layers = nullptr;
        const float key_dim = float(std::max(config->delta_key_dim, 1));
        // A norm divides by the root of the mean: 1 / sqrt(dim) makes unit vectors, and queries have it once more.
        model->delta_units.assign(size_t(key_dim), 1.0f / key_dim);
        model->delta_units.resize(size_t(2 * key_dim), 1.0f / std::sqrt(key_dim));
        int num_attention = 0, num_delta = 0;
        for (PnLayer& layer : model->layers) {
            model->cache_layer.push_back(layer.delta_kernel ? num_delta++ : num_attention++);
            model->experts.emplace_back();
            if (!layer.experts) continue;
            model->experts.back().assign(layer.experts,
                                         layer.experts + std::max(layer.num_experts + layer.has_shared, 0));
            layer.experts = model->experts.back().data();
        }
        if (const char* fault = fault_of(*model)) return fail_null(fault);
        return model.release();
    } catch (const std::bad_alloc&) {
        return fail_null("out of memory");
    }
}

void pn_model_free(PnModel* model) { delete model; }

int32_t pn_inject(PnModel* model, const PnCache* cache, int32_t num_rows, const int32_t* rows, const int32_t* starts,
                  const int32_t* counts, const void* features) {
    if (!model->config.fc) return fail("this model takes no features");
    return in_turn([&](Pool& pool) {
        model->token_row.clear(), model->token_position.clear();
        for (int index = 0; index < num_rows; ++index) {
            if (rows[index] < 0 || rows[index] >= cache->num_rows || starts[index] < 0 || counts[index] < 0 ||
                starts[index] > cache->max_len - counts[index])
                return fail("a row's tokens do not fit the cache");
            for (int offset = 0; offset < counts[index]; ++offset)
                model->token_row.push_back(index), model->token_position.push_back(starts[index] + offset);
        }
        if (model->token_row.empty()) return 0;
        Inject inject(*model, *cache, rows, features, pool);
        if (inject.prepare() != 0) return -1;
        pool.run([](void* self, int thread) { static_cast<Inject*>(self)->run(thread); }, &inject);
        return 0;
    });
}

int32_t pn_matrix_rows(const PnMatrix* matrix, const int32_t* ids, int32_t num_ids, int32_t dtype, float* out) {
    const Kernels& kernels = *kernels_for(dtype);
    for (int index = 0; index < num_ids; ++index) {
        if (ids[index] < 0 || ids[index] >= matrix->rows) return fail("a row is outside the matrix");
        const PnPart& part = matrix->part_of(ids[index]);
        kernels.row(part, ids[index] - part.first_piece * kWide, out + int64_t(index) * matrix->cols);
    }
    return 0;
}

int32_t pn_matrix_multiply(const PnMatrix* matrix, int32_t dtype, const float* x, int32_t num_tokens, float* out) {
    if (num_tokens < 1) return 0;
    if (const char* fault = fault_of(*matrix, dtype)) return fail(fault);
    return in_turn([&](Pool& pool) { return multiply(*matrix, dtype, x, num_tokens, out, pool); });
}
