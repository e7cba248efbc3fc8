// One token of a distribution. The logits are read twice (the largest, then exponentials with sums of 256); only where a filter
// cuts are the likeliest gathered and sorted.
#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "error.h"
#include "model.h"

namespace pn {

namespace {

struct Choice {
    float weight;
    int id;
};

bool likelier(const Choice& a, const Choice& b) { return a.weight != b.weight ? a.weight > b.weight : a.id < b.id; }

// Weights of a whole vocabulary, the largest 1, and the sums of each kSummed of them.
struct Weights {
    std::vector<float> each, sums;
    int size = 0;

    double total() const {
        double sum = 0;
        for (int index = 0; index * kSummed < size; ++index) sum += double(sums[size_t(index)]);
        return sum;
    }
    // Everything not below `least`, ids ascending; nothing weighs less than 0, so that no part of a sum exceeds it by more than rounding.
    void gather(float least, std::vector<Choice>& into) const {
        into.clear();
        for (int begin = 0; begin < size; begin += kSummed) {
            if (sums[size_t(begin / kSummed)] < 0.5f * least) continue;
            for (int id = begin; id < std::min(begin + kSummed, size); ++id)
                if (const float weight = each[size_t(id)]; weight >= least && weight > 0) into.push_back({weight, id});
        }
    }
    // The likeliest: a guess, lowered until `is_enough`.
    template <class Enough>
    void gather_until(std::vector<Choice>& into, Enough is_enough) const {
        for (const float least : {0.0625f, 0.00390625f, 0.000244140625f, 0.0000152587890625f, 0.0f}) {
            gather(least, into);
            if (is_enough() || least == 0) return;
        }
    }
};

// Where the running sum passes `wanted`; where rounding keeps it from that, the last that weighs anything.
template <class WeightAt>
int passes(int begin, int end, double wanted, WeightAt weight_at) {
    double sum = 0;
    int last = begin;
    for (int index = begin; index < end; ++index) {
        const double weight = weight_at(index);
        sum += weight;
        if (sum > wanted) return index;
        if (weight > 0) last = index;
    }
    return last;
}

int draw_of_all(const Weights& weights, double draw) {
    double wanted = draw * weights.total();
    const int num_sums = (weights.size + kSummed - 1) / kSummed;
    const int part = passes(0, num_sums, wanted, [&](int index) { return double(weights.sums[size_t(index)]); });
    for (int index = 0; index < part; ++index) wanted -= double(weights.sums[size_t(index)]);
    const int begin = part * kSummed, end = std::min(begin + kSummed, weights.size);
    return passes(begin, end, wanted, [&](int id) { return double(weights.each[size_t(id)]); });
}

double mass_of(const std::vector<Choice>& choices) {
    double sum = 0;
    for (const Choice& choice : choices) sum += double(choice.weight);
    return sum;
}

// The fewest of sorted choices that reach `mass`.
void keep(std::vector<Choice>& sorted, double mass) {
    double sum = 0;
    for (size_t count = 0; count < sorted.size(); ++count) {
        sum += double(sorted[count].weight);
        if (sum >= mass) return sorted.resize(count + 1);
    }
}

void keep_likeliest(const Weights& weights, int top_k, float top_p, std::vector<Choice>& choices) {
    if (top_k > 0 && top_k < weights.size) {
        weights.gather_until(choices, [&] { return choices.size() >= size_t(top_k); });
        if (size_t(top_k) < choices.size()) {
            std::nth_element(choices.begin(), choices.begin() + (top_k - 1), choices.end(), likelier);
            choices.resize(size_t(top_k));
        }
        std::sort(choices.begin(), choices.end(), likelier);
        if (top_p < 1) keep(choices, double(top_p) * mass_of(choices));
        return;
    }
    const double wanted = double(top_p) * weights.total();
    weights.gather_until(choices, [&] { return mass_of(choices) >= wanted; });
    std::sort(choices.begin(), choices.end(), likelier);
    keep(choices, wanted);
}

// The first `count` of the likeliest.
void likeliest(const Weights& weights, int count, std::vector<Choice>& choices) {
    weights.gather_until(choices, [&] { return choices.size() >= size_t(count); });
    for (int id = 0; choices.size() < size_t(count); ++id)  // what weighs nothing comes last
        if (weights.each[size_t(id)] <= 0) choices.push_back({0, id});
    std::partial_sort(choices.begin(), choices.begin() + count, choices.end(), likelier);
}

}  // namespace

}  // namespace pn

using namespace pn;

int32_t pn_likeliest(const float* logits, int32_t rows, int32_t size, int32_t count, float inverse, int32_t* ids, float* logs) {
    const Kernels& kernels = *kernels_for(PN_F32);
    if (size < 1 || count < 1 || count > size || !(inverse > 0))
        return fail("the likeliest need a count within the vocabulary");
    try {
        thread_local Weights weights;
        thread_local std::vector<Choice> choices;
        weights.size = size;
        weights.each.resize(size_t(size));
        weights.sums.resize(size_t((size + kSummed - 1) / kSummed));
        for (int row = 0; row < rows; ++row, logits += size, ids += count, logs += count) {
            float most = 0;
            kernels.argmax(logits, size, INFINITY, &most);
            if (!std::isfinite(most)) {
                std::fill(ids, ids + count, 0);
                std::fill(logs, logs + count, NAN);
                continue;
            }
            kernels.exponentials(logits, size, most, inverse, 0.0f, weights.each.data(), weights.sums.data());
            likeliest(weights, count, choices);
            const float total = float(std::log(weights.total()));
            for (int at = 0; at < count; ++at) {
                ids[at] = choices[size_t(at)].id;
                logs[at] = (logits[ids[at]] - most) * inverse - total;
            }
        }
        return 0;
    } catch (const std::bad_alloc&) {
        return fail("out of memory");
    }
}

int32_t pn_draw(const float* logits, int32_t size, float temperature, float min_p, int32_t top_k, float top_p, double draw) {
    const Kernels& kernels = *kernels_for(PN_F32);
    float most = 0;
    if (size < 1) return fail("a distribution needs a token");
    kernels.argmax(logits, size, INFINITY, &most);  // its place does not matter
    if (!std::isfinite(most) || !(temperature > 0))
        return fail("the largest logit is not a finite number, or the temperature not above 0");
    try {
        thread_local Weights weights;
        thread_local std::vector<Choice> choices;
        weights.size = size;
        weights.each.resize(size_t(size));
        weights.sums.resize(size_t((size + kSummed - 1) / kSummed));
        kernels.exponentials(logits, size, most, 1.0f / std::max(temperature, 1e-10f), min_p, weights.each.data(),
                             weights.sums.data());
        if ((top_k < 1 || top_k >= size) && top_p >= 1) return draw_of_all(weights, draw);
        keep_likeliest(weights, top_k, top_p, choices);
        std::sort(choices.begin(), choices.end(), [](const Choice& a, const Choice& b) { return a.id < b.id; });
        const int index =
            passes(0, int(choices.size()), draw * mass_of(choices), [&](int at) { return double(choices[size_t(at)].weight); });
        return choices[size_t(index)].id;
    } catch (const std::bad_alloc&) {
        return fail("out of memory");
    }
}
