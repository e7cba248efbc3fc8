// One token of a distribution. The logits are read twice (the largest, then exponentials with sums of 256); only where a filter
// cuts are the likeliest gathered and sorted.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <new>
#include <vector>

#include "error.h"
#include "model.h"
#include "sampling.h"
#include "simd.h"

namespace pn {

namespace {

bool likelier(const Choice& a, const Choice& b) { return a.weight != b.weight ? a.weight > b.weight : a.id < b.id; }

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

void keep_likeliest(Weights& weights, int top_k, float top_p, std::vector<Choice>& choices) {
    if (top_k > 0 && top_k < weights.size) {
        weights.gather_most(top_k, choices);
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

// Whether one of sixteen is not below `least`; in vectors that every processor has, since most have none.
bool has_any(const float* from, float least) {
    typedef Lanes<4> Four;
    Four::Ints any = {};
    for (int at = 0; at < kWide; at += 4) {
        Four::Floats values;
        memcpy(&values, from + at, sizeof values);
        any |= values >= least;
    }
    int64_t halves[2];
    memcpy(halves, &any, sizeof halves);
    return (halves[0] | halves[1]) != 0;
}

}  // namespace

void Weights::resize(int new_size) {
    const size_t parts = size_t((new_size + kSummed - 1) / kSummed);
    size = new_size;
    each.resize(size_t(new_size)), sums.resize(parts), largest.resize(parts), ranked.resize(parts);
}

double Weights::total() const {
    double sum = 0;
    for (const float part : sums) sum += double(part);
    return sum;
}

void Weights::gather(float least, std::vector<Choice>& into) const {
    into.clear();
    for (int begin = 0; begin < size; begin += kSummed) {
        if (largest[size_t(begin / kSummed)] < least) continue;
        for (int first = begin; first < std::min(begin + kSummed, size); first += kWide) {
            const float* from = each.data() + first;
            const int count = std::min(kWide, size - first);
            if (count == kWide && !has_any(from, least)) continue;
            for (int at = 0; at < count; ++at)
                if (from[at] >= least && from[at] > 0) into.push_back({from[at], first + at});
        }
    }
}

// So many parts have something as large as the count-th largest of their largest.
void Weights::gather_most(int count, std::vector<Choice>& into) {
    if (size_t(count) <= largest.size()) {
        std::copy(largest.begin(), largest.end(), ranked.begin());
        std::nth_element(ranked.begin(), ranked.begin() + (count - 1), ranked.end(), std::greater<float>());
        if (const float least = ranked[size_t(count - 1)]; least > 0) return gather(least, into);
    }
    gather_until(into, [&] { return into.size() >= size_t(count); });
}

void Ranking::reserve(int size) {
    weights_.resize(size);
    choices_.reserve(size_t(size));
}

void Ranking::row(const float* logits, int count, float inverse, int32_t* ids, float* logs) {
    const Kernels& kernels = *kernels_for(PN_F32);
    float most = 0;
    kernels.argmax(logits, weights_.size, INFINITY, &most);  // its place does not matter
    if (!std::isfinite(most)) {
        std::fill(ids, ids + count, 0);
        std::fill(logs, logs + count, NAN);
        return;
    }
    kernels.exponentials(logits, weights_.size, most, inverse, 0.0f, weights_.each.data(), weights_.sums.data(),
                         weights_.largest.data());
    weights_.gather_most(count, choices_);
    for (int id = 0; choices_.size() < size_t(count); ++id)  // what weighs nothing comes last
        if (weights_.each[size_t(id)] <= 0) choices_.push_back({0, id});
    std::partial_sort(choices_.begin(), choices_.begin() + count, choices_.end(), likelier);
    const float total = float(std::log(weights_.total()));
    for (int at = 0; at < count; ++at) {
        ids[at] = choices_[size_t(at)].id;
        logs[at] = (logits[ids[at]] - most) * inverse - total;
    }
}

}  // namespace pn

using namespace pn;

int32_t pn_likeliest(const float* logits, int32_t rows, int32_t size, int32_t count, float inverse, int32_t* ids,
                     float* logs) {
    if (size < 1 || count < 1 || count > size || !(inverse > 0))
        return fail("the likeliest need a count within the vocabulary");
    try {
        thread_local Ranking ranking;
        ranking.reserve(size);
        for (int row = 0; row < rows; ++row)
            ranking.row(logits + int64_t(row) * size, count, inverse, ids + int64_t(row) * count,
                        logs + int64_t(row) * count);
        return 0;
    } catch (const std::bad_alloc&) {
        return fail("out of memory");
    }
}

int32_t pn_draw(const float* logits, int32_t size, float temperature, float min_p, int32_t top_k, float top_p,
                double draw) {
    const Kernels& kernels = *kernels_for(PN_F32);
    float most = 0;
    if (size < 1) return fail("a distribution needs a token");
    kernels.argmax(logits, size, INFINITY, &most);  // its place does not matter
    if (!std::isfinite(most) || !(temperature > 0))
        return fail("the largest logit is not a finite number, or the temperature not above 0");
    try {
        thread_local Weights weights;
        thread_local std::vector<Choice> choices;
        weights.resize(size);
        kernels.exponentials(logits, size, most, 1.0f / std::max(temperature, 1e-10f), min_p, weights.each.data(),
                             weights.sums.data(), weights.largest.data());
        if ((top_k < 1 || top_k >= size) && top_p >= 1) return draw_of_all(weights, draw);
        keep_likeliest(weights, top_k, top_p, choices);
        std::sort(choices.begin(), choices.end(), [](const Choice& a, const Choice& b) { return a.id < b.id; });
        const int index = passes(0, int(choices.size()), draw * mass_of(choices),
                                 [&](int at) { return double(choices[size_t(at)].weight); });
        return choices[size_t(index)].id;
    } catch (const std::bad_alloc&) {
        return fail("out of memory");
    }
}
