// A layer's experts: a few of many MLPs for each token. Tokens are sorted by expert, so that each selected expert runs once over
// all of its tokens. Outputs are added for each token in the order of its own experts, so that its result does not depend on the
// rest of the batch.
#include <cmath>
#include <cstring>

#include "forward.h"

namespace pn {

namespace {

int gated_pieces(const PnExpert& expert) { return expert.gate_up->num_pieces() / 2; }
int down_pieces(const PnExpert& expert) { return expert.down->num_pieces(); }

}  // namespace

// Pieces [begin, end) of the matrices of all groups, counted through: work(group, from, to) with those of each.
template <class Work>
void Forward::each_piece(int begin, int end, int (*pieces_of)(const PnExpert&), const PnLayer& layer, Work work) const {
    int first = 0;
    for (int at = 0; at < int(model_.groups.size()) && first < end; ++at) {
        const int pieces = pieces_of(layer.experts[model_.groups[size_t(at)].expert]);
        const int from = std::max(begin - first, 0), to = std::min(end - first, pieces);
        if (from < to) work(at, from, to);
        first += pieces;
    }
}

void Forward::experts(int thread, int index) {
    const PnLayer& layer = model_.layers[size_t(index)];
    const PnMatrix& router = *layer.router;
    const int size = config_.hidden_size, padded = padded_cols(size), inner = padded_cols(model_.widest_inner());
    const int of_token = config_.experts_per_token + layer.has_shared, num_rows = num_tokens_ * of_token;
    const int64_t bytes = model_.element_bytes();
    const Buffer& normed = normed_input(thread, layer.mlp_norm, -1);
    const Rows input = rows_for(thread, router, normed, size, num_tokens_);
    share(thread, PN_STAGE_GATE_UP, router.num_pieces(), 1, [&](int begin, int end) {
        product(thread, router, begin, end, input, model_.routed.as<float>(), router.rows, false, layer.router_bias);
    });
    share(thread, PN_STAGE_GATE_UP, num_tokens_, 1, [&](int begin, int end) {
        for (int token = begin; token < end; ++token) choose(layer, token);
    });
    share(thread, PN_STAGE_GATE_UP, 1, 1, [&](int, int) { sort_by_expert(layer); });
    const auto make = [&](const Buffer& x, int stride, const PnMatrix* PnExpert::* matrix, int row) {
        const int at = model_.group_of[size_t(row)];
        const ExpertGroup& group = model_.groups[size_t(at)];
        const PnMatrix& of = *(layer.experts[group.expert].*matrix);
        const Rows rows = group_rows(at, of, x, stride);
        if (rows.planes) make_planes(kernels_, rows, of.padded_cols(), row - group.first, group.count);
    };
    share(thread, PN_STAGE_NORM, num_rows, 1, [&](int begin, int end) {
        for (int row = begin; row < end; ++row) {
            const int64_t from = int64_t(model_.sorted_token[size_t(row)]) * padded;
            memcpy(element(model_.expert_input, int64_t(row) * padded), element(normed, from), size_t(padded * bytes));
            make(model_.expert_input, padded, &PnExpert::gate_up, row);
        }
    });
    int total = 0;
    for (const ExpertGroup& group : model_.groups) total += gated_pieces(layer.experts[group.expert]);
    share(thread, PN_STAGE_GATE_UP, total, 1, [&](int begin, int end) {
        each_piece(begin, end, gated_pieces, layer, [&](int at, int from, int to) {
            const ExpertGroup& group = model_.groups[size_t(at)];
            const PnExpert& own = layer.experts[group.expert];
            gate_up(thread, own, group_rows(at, *own.gate_up, model_.expert_input, padded), group.count,
                    element(model_.gated, int64_t(group.first) * inner), from, to);
        });
    });
    share(thread, PN_STAGE_NORM, num_rows, 1, [&](int begin, int end) {
        for (int row = begin; row < end; ++row) make(model_.gated, inner, &PnExpert::down, row);
    });
    total = 0;
    for (const ExpertGroup& group : model_.groups) total += down_pieces(layer.experts[group.expert]);
    float* out = model_.expert_out.as<float>();
    share(thread, PN_STAGE_DOWN, total, 1, [&](int begin, int end) {
        each_piece(begin, end, down_pieces, layer, [&](int at, int from, int to) {
            const ExpertGroup& group = model_.groups[size_t(at)];
            const PnExpert& own = layer.experts[group.expert];
            multiply_pieces(kernels_, *own.down, from, to, group_rows(at, *own.down, model_.gated, inner), group.count,
                            {out + int64_t(group.first) * size, size, 0, size, false, own.down_bias},
                            model_.threads[size_t(thread)]->expanded.as<void>());
        });
    });
    share(
        thread, PN_STAGE_DOWN, num_tokens_, 1,
        [&](int begin, int end) {
            for (int token = begin; token < end; ++token) {
                float* sum = model_.unmixed.as<float>() + int64_t(token) * size;
                memset(sum, 0, size_t(size) * 4);
                for (int at = token * of_token; at < (token + 1) * of_token; ++at)
                    kernels_.add_scaled(out + int64_t(model_.place_of[size_t(at)]) * size, size,
                                        model_.expert_weights[size_t(at)], sum);
                add_output(token, sum, layer.mlp_out_norm);
            }
        },
        after(index));
}

// The experts of a token with the largest scores, of equal ones the first, best first; their weights are probabilities.
void Forward::choose(const PnLayer& layer, int token) {
    const int count = layer.num_experts, most = config_.experts_per_token, of_token = most + layer.has_shared;
    const float* scores = model_.routed.as<float>() + int64_t(token) * layer.router->rows;
    int* chosen = model_.chosen.data() + token * of_token;
    float* weights = model_.expert_weights.data() + token * of_token;
    for (int expert = 0, held = 0; expert < count; ++expert) {
        int at = held;
        while (at > 0 && scores[expert] > scores[chosen[at - 1]]) --at;
        if (at >= most) continue;
        held = std::min(held + 1, most);
        for (int behind = held - 1; behind > at; --behind) chosen[behind] = chosen[behind - 1];
        chosen[at] = expert;
    }
    const float largest = scores[chosen[0]];
    float sum = 0.0f;
    for (int at = 0; at < most; ++at) weights[at] = std::exp(scores[chosen[at]] - largest);
    if (config_.are_experts_normed)
        for (int at = 0; at < most; ++at) sum += weights[at];
    else
        for (int expert = 0; expert < count; ++expert) sum += std::exp(scores[expert] - largest);
    for (int at = 0; at < most; ++at) weights[at] /= sum;
    if (layer.has_shared) chosen[most] = count, weights[most] = 1.0f / (1.0f + std::exp(-scores[padded_rows(count)]));
}

// Allocates nothing, as all work of a pool's threads: `reserve` has made room.
void Forward::sort_by_expert(const PnLayer& layer) {
    const int of_token = config_.experts_per_token + layer.has_shared, num_rows = num_tokens_ * of_token;
    const size_t num_experts = size_t(layer.num_experts + layer.has_shared);
    std::vector<int>& next = model_.next_of_expert;
    std::fill(next.begin(), next.begin() + std::ptrdiff_t(num_experts) + 1, 0);
    for (int at = 0; at < num_rows; ++at) ++next[size_t(model_.chosen[size_t(at)]) + 1];
    model_.groups.clear();
    for (size_t expert = 0; expert < num_experts; ++expert) {
        const int count = next[expert + 1];
        next[expert + 1] += next[expert];
        if (!count) continue;
        model_.group_of_expert[expert] = int(model_.groups.size());
        model_.groups.push_back({int(expert), next[expert], count});
    }
    for (int at = 0; at < num_rows; ++at) {
        const size_t expert = size_t(model_.chosen[size_t(at)]);
        const int row = next[expert]++;
        model_.place_of[size_t(at)] = row;
        model_.sorted_token[size_t(row)] = at / of_token;
        model_.group_of[size_t(row)] = model_.group_of_expert[expert];
    }
    if (pass_.experts_read) *pass_.experts_read += int32_t(model_.groups.size()) - layer.has_shared;
}

// A group's rows of x as the matrix takes them: they begin `row_stride` elements times their place, one behind the other. Planes of
// groups have spare rows between them.
Rows Forward::group_rows(int at, const PnMatrix& matrix, const Buffer& x, int row_stride) const {
    const ExpertGroup& group = model_.groups[size_t(at)];
    uint8_t* planes = model_.planes.as<uint8_t>() + (group.first + at * kSpareRows) * plane_bytes(row_stride);
    return rows_of(matrix, kernels_, element(x, int64_t(group.first) * row_stride),
                   int64_t(matrix.padded_cols()) * model_.element_bytes(), group.count, planes);
}

}  // namespace pn
