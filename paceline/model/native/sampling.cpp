// The most probable tokens of a row of logits. The logits are read twice: for the largest, and for exponentials with sums of 256;
// only what may be among the most probable tokens is gathered and sorted.
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

// So many parts have something as large as the count-th largest of their largest; without that many parts, a guessed bound is
// lowered until enough tokens reach it.
void Weights::gather_most(int count, std::vector<Choice>& into) {
    if (size_t(count) <= largest.size()) {
        std::copy(largest.begin(), largest.end(), ranked.begin());
        std::nth_element(ranked.begin(), ranked.begin() + (count - 1), ranked.end(), std::greater<float>());
        if (const float least = ranked[size_t(count - 1)]; least > 0) return gather(least, into);
    }
    for (const float least : {0.0625f, 0.00390625f, 0.000244140625f, 0.0000152587890625f, 0.0f}) {
        gather(least, into);
        if (into.size() >= size_t(count)) return;
    }
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
    kernels.exponentials(logits, weights_.size, most, inverse, weights_.each.data(), weights_.sums.data(),
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
