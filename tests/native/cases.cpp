// The native library's interface with inputs that are the same on every processor; prints a line for each case, its name and a hash
// of all bits that came out. Two libraries with the same bits print the same lines. Every NaN counts as the same one: its sign is
// the processor's affair.
//
//     cases                what pn_available says
//     cases ISA            the lines of this instruction set; those whose bits any x86 instruction set shares begin with "blocks"
//
// tests/native/test_arm.py compiles and compares. Build with -ffp-contract=off: inputs are made of floats.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "api.h"

namespace {

const char* const kNames[PN_NUM_FORMATS] = {"float32", "bfloat16", "Q8_0", "Q4_1", "float16", "Q4_0",  "Q5_0",
                                            "Q5_1",    "Q4_K",     "Q5_K", "Q6_K", "IQ4_NL",  "IQ4_XS"};

[[noreturn]] void stop(const char* what) {
    fprintf(stderr, "%s: %s\n", what, pn_last_error());
    exit(1);
}
void check(int32_t status, const char* what) {
    if (status != 0) stop(what);
}

// ---- inputs ----

struct Random {
    uint64_t state;

    uint32_t bits() {  // splitmix64
        uint64_t value = state += 0x9e3779b97f4a7c15u;
        value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
        value = (value ^ value >> 27) * 0x94d049bb133111ebu;
        return uint32_t((value ^ value >> 31) >> 32);
    }
    int below(int count) { return int(bits() % uint32_t(count)); }
    // Bell-shaped, about one in size: exact sums of whole numbers.
    float number() {
        int sum = 0;
        for (int turn = 0; turn < 4; ++turn) sum += int(bits() >> 9) - (1 << 22);
        return float(sum) * 0x1p-22f;
    }
    std::vector<float> numbers(size_t count, float scale) {
        std::vector<float> all(count);
        for (float& each : all) each = number() * scale;
        return all;
    }
    uint16_t half(int least_exponent, int exponents) {
        return uint16_t((bits() & 0x83ffu) | uint32_t(least_exponent + below(exponents)) << 10);
    }
};

struct Shape {
    int block_cols, block_bytes;
    std::vector<int> halves;  // where half-precision numbers stand in a block
};
Shape shape_of(int format) {
    switch (format) {
        case PN_Q8_0:
            return {32, 34, {0}};
        case PN_Q4_1:
            return {32, 20, {0, 2}};
        case PN_Q4_0:
        case PN_IQ4_NL:
            return {32, 18, {0}};
        case PN_Q5_0:
            return {32, 22, {0}};
        case PN_Q5_1:
            return {32, 24, {0, 2}};
        case PN_Q4_K:
            return {256, 144, {0, 2}};
        case PN_Q5_K:
            return {256, 176, {0, 2}};
        case PN_Q6_K:
            return {256, 210, {208}};
        case PN_IQ4_XS:
            return {256, 136, {0}};
        default:
            return {1, format == PN_F32 ? 4 : 2, {}};
    }
}

// Rows as a file has them: any codes and factors; numbers of half precision down to those below the normal ones when `is_wild`.
std::vector<uint8_t> stored_rows(Random& random, int format, int rows, int cols, bool is_wild) {
    const Shape shape = shape_of(format);
    const size_t blocks = size_t(rows) * size_t(cols / shape.block_cols);
    std::vector<uint8_t> data(blocks * size_t(shape.block_bytes));
    for (size_t block = 0; block < blocks; ++block) {
        uint8_t* at = &data[block * size_t(shape.block_bytes)];
        if (format == PN_F32) {
            const float value = random.number() * 0.125f;
            memcpy(at, &value, 4);
        } else if (format == PN_BF16) {
            const float value = random.number() * 0.125f;
            memcpy(at, reinterpret_cast<const uint8_t*>(&value) + 2, 2);
        } else if (format == PN_F16) {
            const uint16_t half = random.half(is_wild ? 0 : 9, is_wild ? 20 : 5);
            memcpy(at, &half, 2);
        } else {
            for (int byte = 0; byte < shape.block_bytes; ++byte) at[byte] = uint8_t(random.bits());
            for (const int place : shape.halves) {
                const uint16_t half = random.half(is_wild ? 0 : 2, is_wild ? 20 : 3);
                memcpy(at + place, &half, 2);
            }
        }
    }
    return data;
}

struct Matrix {
    PnMatrix* own = nullptr;
    Matrix() = default;
    Matrix(const Matrix&) = delete;
    Matrix& operator=(const Matrix&) = delete;
    ~Matrix() { pn_matrix_free(own); }

    void make(Random& random, const std::vector<int32_t>& rows, const std::vector<int32_t>& formats, int cols,
              bool is_wild = false) {
        own = pn_matrix_new(int32_t(rows.size()), rows.data(), formats.data(), cols);
        if (!own) stop("pn_matrix_new");
        int first = 0;
        for (size_t part = 0; part < rows.size(); first += rows[part++]) {
            const std::vector<uint8_t> data = stored_rows(random, formats[part], rows[part], cols, is_wild);
            check(pn_matrix_fill(own, first, rows[part], formats[part], data.data()), "pn_matrix_fill");
        }
    }
};

// ---- what comes out ----

struct Hash {
    uint64_t value = 0xcbf29ce484222325u;

    void word(uint32_t bits) { value = (value ^ bits) * 0x100000001b3u; }
    void floats(const float* from, size_t count) {
        for (size_t at = 0; at < count; ++at) {
            uint32_t bits;
            memcpy(&bits, from + at, 4);
            word((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits);
        }
    }
    void bfloats(const uint16_t* from, size_t count) {
        for (size_t at = 0; at < count; ++at) word((from[at] & 0x7fffu) > 0x7f80u ? 0x7fc0u : from[at]);
    }
    void elements(const void* from, size_t count, int dtype) {
        if (dtype == PN_F32) floats(static_cast<const float*>(from), count);
        else bfloats(static_cast<const uint16_t*>(from), count);
    }
    void print(const std::string& name) const {
        printf("%s %016llx\n", name.c_str(), static_cast<unsigned long long>(value));
    }
};

const char* name_of(int dtype) { return dtype == PN_F32 ? "float32" : "bfloat16"; }
// Whether products with this are in whole numbers.
bool is_exact(int format, int dtype) { return dtype == PN_BF16 && shape_of(format).block_cols > 1; }

// ---- matrices ----

void multiply(Hash& hash, const PnMatrix* matrix, int rows, int cols, int dtype, const std::vector<float>& x) {
    const int num_tokens = int(x.size()) / cols;
    std::vector<float> out(size_t(num_tokens) * size_t(rows));
    check(pn_matrix_multiply(matrix, dtype, x.data(), num_tokens, out.data()), "pn_matrix_multiply");
    hash.floats(out.data(), out.size());
}

void one_matrix(int format, int dtype, int rows, int cols) {
    Random random = {uint64_t(format * 1000003 + rows * 1009 + cols)};
    Matrix matrix;
    matrix.make(random, {rows}, {format}, cols, true);
    Hash hash;
    std::vector<int32_t> ids;
    for (int index = 0; index < 9; ++index) ids.push_back(random.below(rows));
    std::vector<float> held(ids.size() * size_t(cols));
    check(pn_matrix_rows(matrix.own, ids.data(), int32_t(ids.size()), dtype, held.data()), "pn_matrix_rows");
    hash.floats(held.data(), held.size());
    for (const int num_tokens : {1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 17, 33}) {
        std::vector<float> x = random.numbers(size_t(num_tokens * cols), 1.0f);
        for (size_t at = 0; at < x.size(); ++at) x[at] = ldexpf(x[at], int(at / 32 % 41) - 20);  // blocks of all sizes
        multiply(hash, matrix.own, rows, cols, dtype, x);
    }
    PnMatrix* selected = pn_matrix_select(matrix.own, ids.data(), int32_t(ids.size()));
    if (!selected) stop("pn_matrix_select");
    multiply(hash, selected, int(ids.size()), cols, dtype, random.numbers(size_t(5 * cols), 1.0f));
    pn_matrix_free(selected);
    hash.print(std::string(is_exact(format, dtype) ? "blocks " : "dense ") + kNames[format] + " in " + name_of(dtype) +
               " " + std::to_string(rows) + "x" + std::to_string(cols));
}

// Inputs at the end of their range, tiny ones, nothing at all, and what is no number.
void at_limits(int format, int dtype) {
    Random random = {uint64_t(format + 77)};
    constexpr int kRows = 48, kCols = 768;
    Matrix matrix;
    matrix.make(random, {kRows}, {format}, kCols);
    std::vector<float> x(size_t(9 * kCols));
    const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    for (int at = 0; at < kCols; ++at) {
        x[size_t(at)] = 1.5e38f, x[size_t(kCols + at)] = at % 2 ? -1e-25f : 1e-25f, x[size_t(2 * kCols + at)] = 1e-39f;
        x[size_t(8 * kCols + at)] = at % 64 < 32 ? -32.0f : random.number();
    }
    x[3 * kCols + 5] = 1e-36f, x[4 * kCols] = 1.0f, x[4 * kCols + 1] = 0x1p-13f;
    x[6 * kCols + 40] = nan, x[7 * kCols + 700] = infinity, x[7 * kCols + 701] = -2.0f;
    Hash hash;
    for (int row = 0; row < 9; ++row)
        multiply(hash, matrix.own, kRows, kCols, dtype, {x.begin() + row * kCols, x.begin() + (row + 1) * kCols});
    multiply(hash, matrix.own, kRows, kCols, dtype, x);
    hash.print(std::string(is_exact(format, dtype) ? "blocks " : "dense ") + kNames[format] + " in " + name_of(dtype) +
               " at its limits");
}

void mixed_parts(int dtype) {
    Random random = {5};
    Matrix matrix;
    matrix.make(random, {32, 16, 48, 16, 7}, {PN_Q4_K, dtype, PN_Q6_K, PN_F16, PN_Q5_0}, 768);
    Hash hash;
    for (const int num_tokens : {1, 5, 33})
        multiply(hash, matrix.own, 119, 768, dtype, random.numbers(size_t(num_tokens * 768), 1.0f));
    hash.print(std::string("dense parts of several formats in ") + name_of(dtype));
}

void matrices() {
    const int sizes[][2] = {{1, 1}, {3, 7}, {5, 33}, {13, 64}, {66, 96}, {130, 160}, {37, 256}, {19, 1024}, {50, 1792}};
    for (const int dtype : {PN_F32, PN_BF16}) {
        for (int format = 0; format < PN_NUM_FORMATS; ++format) {
            if (format == PN_F32 && dtype == PN_BF16) continue;  // refused
            for (const int (&size)[2] : sizes)
                if (size[1] % shape_of(format).block_cols == 0) one_matrix(format, dtype, size[0], size[1]);
            at_limits(format, dtype);
        }
        mixed_parts(dtype);
    }
}

// ---- sampling ----

void likeliest() {
    for (const int size : {1, 17, 257, 4096, 5000}) {
        Random random = {uint64_t(size)};
        Hash hash;
        std::vector<float> logits = random.numbers(size_t(2 * size), 4.0f);
        for (int at = 0; at < size; ++at) logits[size_t(at)] = floorf(logits[size_t(at)]);  // many are equal
        for (const int count : {1, size < 16 ? size : 16}) {
            std::vector<int32_t> ids(size_t(2 * count));
            std::vector<float> logs(size_t(2 * count));
            check(pn_likeliest(logits.data(), 2, size, count, 1.0f, ids.data(), logs.data()), "pn_likeliest");
            for (const int32_t id : ids) hash.word(uint32_t(id));
            hash.floats(logs.data(), logs.size());
        }
        hash.print("blocks or dense: the likeliest of " + std::to_string(size));
    }
}

// Three blocks of four slots, and a walk through each.
void picks(int dtype) {
    constexpr int kBlocks = 3, kSlots = 4, kTaken = kBlocks * kSlots, kSize = 4500, kCount = 13, kRank = 21,
                  kHidden = 75;
    Random random = {uint64_t(dtype + 9)};
    Hash hash;
    const std::vector<float> logits = random.numbers(size_t(kTaken * kSize), 3.0f);
    const std::vector<uint8_t> before = stored_rows(random, dtype, kSize, kRank, false),
                               after = stored_rows(random, dtype, kSize, kRank, false),
                               hidden = stored_rows(random, dtype, kTaken, kHidden, false);
    Matrix gate;
    gate.make(random, {kRank}, {dtype}, kHidden);
    const std::vector<int32_t> anchors = {5, 0, kSize - 1};
    std::vector<int32_t> chosen(size_t(kTaken * kCount)), tokens(chosen.size()), places(kTaken);
    std::vector<float> scores(size_t(kTaken * kCount * kCount));
    PnPick pick = {};
    pick.rows = kTaken, pick.size = kSize, pick.count = kCount, pick.slots = kSlots,
    pick.dtype = pick.book_dtype = dtype;
    pick.vocabulary = kSize, pick.rank = kRank, pick.predecessors = before.data(), pick.successors = after.data();
    pick.gate = gate.own, pick.logits = logits.data(), pick.anchors = anchors.data(), pick.hidden = hidden.data();
    pick.hidden_stride = kSlots * kHidden;
    pick.chosen = chosen.data(), pick.tokens = tokens.data(), pick.scores = scores.data();
    check(pn_pick(&pick), "pn_pick");
    for (const int32_t token : tokens) hash.word(uint32_t(token));
    hash.floats(scores.data(), scores.size());
    for (int block = 0; block < kBlocks; ++block) {
        std::vector<double> logs(kSlots);
        const float* from = scores.data() + block * kSlots * kCount * kCount;
        if (pn_walk(from, kSlots, kCount, 1.0, places.data(), logs.data()) != kSlots) stop("pn_walk");
        for (int slot = 0; slot < kSlots; ++slot) hash.word(uint32_t(places[size_t(slot)]));
    }
    hash.print(std::string("dense candidates and their scores in ") + name_of(dtype));
}

// ---- models ----

struct Sizes {
    const char* name;
    int hidden, inner, heads, kv_heads, head_dim;
    bool has_biases, has_qk_norm, is_causal;
    int window;  // of every other layer
};

constexpr int kLayers = 2, kVocabulary = 131, kRows = 4, kMaxLen = 128, kFeatures = 256;

struct Model {
    Random random;
    const Sizes& sizes;
    int dtype;
    std::vector<int32_t> formats;  // by turns
    size_t turn = 0;
    std::vector<std::vector<float>> vectors;
    std::vector<Matrix> matrices = std::vector<Matrix>(4 * kLayers + 4);
    size_t num_matrices = 0;
    std::vector<PnLayer> layers = std::vector<PnLayer>(kLayers);
    PnConfig config = {};
    PnModel* own = nullptr;
    std::vector<uint8_t> keys, values;
    PnCache cache = {};

    static int padded(int rows) { return (rows + 15) / 16 * 16; }
    const float* vector(int size, float scale, float offset) {
        vectors.push_back(random.numbers(size_t(size), scale));
        for (float& each : vectors.back()) each += offset;
        return vectors.back().data();
    }
    const PnMatrix* matrix(std::vector<int32_t> rows, int cols) {
        std::vector<int32_t> kinds;
        for (size_t part = 0; part < rows.size(); ++part) {
            int32_t kind = formats[turn++ % formats.size()];
            if (cols % shape_of(kind).block_cols) kind = PN_Q8_0;
            kinds.push_back(kind == PN_F32 && dtype == PN_BF16 ? PN_BF16 : kind);
        }
        Matrix& made = matrices[num_matrices++];
        made.make(random, rows, kinds, cols);
        return made.own;
    }

    Model(const Sizes& given, int of_dtype, std::vector<int32_t> of_formats, uint64_t seed)
        : random{seed}, sizes(given), dtype(of_dtype), formats(std::move(of_formats)) {
        const int queries = padded(sizes.heads * sizes.head_dim), kv = padded(sizes.kv_heads * sizes.head_dim);
        const int inner = padded(sizes.inner);
        for (int index = 0; index < kLayers; ++index) {
            PnLayer& layer = layers[size_t(index)];
            layer = {};
            layer.input_norm = vector(sizes.hidden, 0.3f, 1.0f), layer.mlp_norm = vector(sizes.hidden, 0.3f, 1.0f);
            if (sizes.has_qk_norm)
                layer.q_norm = vector(sizes.head_dim, 0.3f, 1.0f), layer.k_norm = vector(sizes.head_dim, 0.3f, 1.0f);
            layer.qkv = matrix({queries, kv, kv}, sizes.hidden);
            layer.output = matrix({sizes.hidden}, sizes.heads * sizes.head_dim);
            layer.gate_up = matrix({inner, inner}, sizes.hidden);
            layer.down = matrix({sizes.hidden}, sizes.inner);
            if (sizes.has_biases) {
                layer.qkv_bias = vector(queries + 2 * kv, 0.3f, 0.0f),
                layer.output_bias = vector(sizes.hidden, 0.3f, 0.0f);
                layer.gate_up_bias = vector(2 * inner, 0.3f, 0.0f), layer.down_bias = vector(sizes.hidden, 0.3f, 0.0f);
            }
            layer.window = index % 2 ? sizes.window : 0;
            layer.is_causal = sizes.is_causal;
        }
        config.num_layers = kLayers, config.hidden_size = sizes.hidden, config.inner_size = sizes.inner;
        config.num_heads = sizes.heads, config.num_kv_heads = sizes.kv_heads, config.head_dim = sizes.head_dim;
        config.dtype = dtype, config.eps = 1e-5f, config.layers = layers.data(), config.embedding_scale = 1.0f;
        config.embedding = matrix({kVocabulary}, sizes.hidden), config.head = matrix({kVocabulary}, sizes.hidden);
        config.final_norm = vector(sizes.hidden, 0.3f, 1.0f);
        config.cos = vector(kMaxLen * sizes.head_dim, 0.5f, 0.0f),
        config.sin = vector(kMaxLen * sizes.head_dim, 0.5f, 0.0f);
        config.rotary_dim = sizes.head_dim, config.attention_scale = 1.0f / sqrtf(float(sizes.head_dim));
        config.residual_scale = config.logit_scale = 1.0f;
        config.fc = matrix({sizes.hidden}, kFeatures), config.hidden_norm = vector(sizes.hidden, 0.3f, 1.0f);
        config.context_kv = matrix({2 * kLayers * kv}, sizes.hidden);
        if (sizes.has_biases) config.context_bias = vector(2 * kLayers * kv, 0.3f, 0.0f);
        own = pn_model_new(&config);
        if (!own) stop("pn_model_new");
        const size_t head = size_t(kMaxLen) * size_t(pn_padded_head_dim(sizes.head_dim)),
                     row = head * size_t(sizes.kv_heads);
        keys.resize(row * kRows * kLayers * (dtype == PN_F32 ? 4 : 2)), values.resize(keys.size());
        cache = {
            keys.data(), values.data(), int64_t(row * kRows), int64_t(row), int64_t(head), kMaxLen, kRows, nullptr, 0};
    }
    ~Model() { pn_model_free(own); }
    Model(const Model&) = delete;
    Model& operator=(const Model&) = delete;

    void forward(Hash& hash, const std::vector<int32_t>& rows, const std::vector<int32_t>& starts,
                 const std::vector<int32_t>& counts, bool has_logits) {
        int num_tokens = 0;
        for (const int32_t count : counts) num_tokens += count;
        std::vector<int32_t> tokens, logit_rows, best(static_cast<size_t>(num_tokens));
        for (int token = 0; token < num_tokens; ++token)
            tokens.push_back(random.below(kVocabulary)), logit_rows.push_back(token);
        const std::vector<int32_t> tapped = {1, 0};
        const size_t element = dtype == PN_F32 ? 4 : 2,
                     num_taps = size_t(num_tokens) * tapped.size() * size_t(sizes.hidden);
        std::vector<uint8_t> taps(num_taps * element);
        std::vector<float> logits(size_t(num_tokens) * kVocabulary);
        PnPass pass = {};
        pass.num_rows = int32_t(rows.size()), pass.rows = rows.data(), pass.starts = starts.data(),
        pass.counts = counts.data();
        pass.tokens = tokens.data(), pass.num_taps = int32_t(tapped.size()), pass.tap_layers = tapped.data();
        pass.taps = taps.data(), pass.num_logit_rows = num_tokens, pass.logit_rows = logit_rows.data();
        pass.logits = has_logits ? logits.data() : nullptr, pass.logits_stride = kVocabulary, pass.argmax = best.data();
        check(pn_forward(own, &cache, &pass), "pn_forward");
        hash.elements(taps.data(), num_taps, dtype);
        if (has_logits) hash.floats(logits.data(), logits.size());
        for (const int32_t each : best) hash.word(uint32_t(each));
    }

    // Chunks, rows out of order, drafts that are refused, features.
    void story(Hash& hash) {
        forward(hash, {2}, {0}, {40}, false);
        forward(hash, {0}, {0}, {11}, true);
        forward(hash, {3, 0, 2}, {0, 11, 40}, {1, 4, 9}, true);
        std::vector<float> features = random.numbers(size_t(6 * kFeatures), 1.0f);
        std::vector<uint16_t> rounded(features.size());
        for (size_t at = 0; at < features.size(); ++at)
            memcpy(&rounded[at], reinterpret_cast<const uint8_t*>(&features[at]) + 2, 2);
        const int32_t rows[] = {1, 2}, starts[] = {0, 41}, counts[] = {4, 2};
        const void* given = dtype == PN_F32 ? static_cast<const void*>(features.data()) : rounded.data();
        check(pn_inject(own, &cache, 2, rows, starts, counts, given), "pn_inject");
        forward(hash, {2, 1, 3}, {41, 4, 1}, {1, 17, 3}, true);
        forward(hash, {0, 3, 1, 2}, {12, 4, 21, 42}, {5, 1, 2, 8}, true);
        forward(hash, {3, 2}, {2, 50}, {19, 70}, true);
        forward(hash, {1}, {23}, {1}, false);
        hash.elements(keys.data(), keys.size() / (dtype == PN_F32 ? 4 : 2), dtype);
        hash.elements(values.data(), values.size() / (dtype == PN_F32 ? 4 : 2), dtype);
    }
};

void model(const Sizes& sizes, int dtype, const std::vector<int32_t>& formats, const std::string& name) {
    Hash hash;
    Model(sizes, dtype, formats, 1).story(hash);
    hash.print(name + " in " + name_of(dtype));
}

void models() {
    const Sizes shapes[] = {
        {"llama", 50, 70, 4, 2, 16, false, false, true, 0},
        {"biases", 36, 45, 6, 3, 6, true, false, true, 0},
        {"one key head", 33, 80, 3, 1, 8, false, false, true, 0},
        {"windows", 64, 80, 2, 1, 40, false, false, true, 7},
        {"norms of heads", 40, 80, 2, 2, 80, false, true, true, 0},
        {"drafter", 72, 96, 4, 1, 64, true, true, false, 9},
    };
    for (const Sizes& sizes : shapes)
        for (const int dtype : {PN_F32, PN_BF16})
            model(sizes, dtype, {dtype}, std::string("dense model: ") + sizes.name);
    const Sizes wide = {"blocks", 256, 512, 4, 2, 64, true, false, true, 33};
    for (int format = 0; format < PN_NUM_FORMATS; ++format)
        if (shape_of(format).block_cols > 1)
            model(wide, PN_BF16, {format}, std::string("blocks model: ") + kNames[format]);
    model(wide, PN_F32, {PN_Q4_K, PN_Q6_K, PN_Q5_0, PN_Q8_0, PN_IQ4_XS}, "dense model: a mixture");
    model(wide, PN_BF16, {PN_Q4_K, PN_BF16, PN_F16, PN_Q6_K}, "dense model: a mixture with dense parts");
    check(pn_set_threads(2), "pn_set_threads");
    model(wide, PN_BF16, {PN_Q4_K, PN_Q6_K, PN_Q5_0, PN_Q8_0, PN_IQ4_XS}, "blocks model: a mixture");
}

}  // namespace

int main(int count, char** arguments) {
    if (count < 2) {
        puts(pn_available());
        return 0;
    }
    check(pn_use(arguments[1]), "pn_use");
    setvbuf(stdout, nullptr, _IOLBF, 0);
    matrices();
    likeliest();
    for (const int dtype : {PN_F32, PN_BF16}) picks(dtype);
    models();
    return 0;
}
