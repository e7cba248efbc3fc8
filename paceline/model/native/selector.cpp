// Candidates of a block's slots and what each scores behind another: DFlash 2's selector.
#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "api.h"
#include "error.h"

namespace pn {

namespace {

// Rows of a codebook as floats.
class Book {
public:
    Book(const void* data, int rank, int dtype) : data_(data), rank_(rank), dtype_(dtype) {}
    void row(int token, float* out) const {
        const int64_t first = int64_t(token) * rank_;
        if (dtype_ == PN_F32) {
            memcpy(out, static_cast<const float*>(data_) + first, size_t(rank_) * 4);
            return;
        }
        const uint16_t* from = static_cast<const uint16_t*>(data_) + first;
        for (int at = 0; at < rank_; ++at) {
            const uint32_t bits = uint32_t(from[at]) << 16;
            memcpy(out + at, &bits, 4);
        }
    }

private:
    const void* data_;
    int rank_, dtype_;
};

// Of one slot: successors lie side by side, [rank, count], so that a sum is made in the order of the rank for all at once.
class Slot {
public:
    Slot(const Book& successors, const std::vector<int>& tokens, int rank)
        : count_(int(tokens.size())), rank_(rank), behind_(size_t(rank) * tokens.size()), sums_(tokens.size()) {
        std::vector<float> row(static_cast<size_t>(rank));
        for (int place = 0; place < count_; ++place) {
            successors.row(tokens[size_t(place)], row.data());
            for (int at = 0; at < rank_; ++at) behind_[size_t(at) * size_t(count_) + size_t(place)] = row[size_t(at)];
        }
    }
    void score(const float* before, const float* gate, const float* logs, float* scores) {
        std::fill(sums_.begin(), sums_.end(), 0.0f);
        const float* successor = behind_.data();
        for (int at = 0; at < rank_; ++at, successor += count_) {
            const float weight = before[at] * gate[at];
            for (int place = 0; place < count_; ++place) sums_[size_t(place)] += weight * successor[place];
        }
        for (int place = 0; place < count_; ++place) scores[place] = logs[place] + sums_[size_t(place)];
    }

private:
    int count_, rank_;
    std::vector<float> behind_, sums_;
};

}  // namespace

}  // namespace pn

using namespace pn;

int32_t pn_pick(const float* logits, int32_t rows, int32_t size, int32_t count, int32_t slots, const int32_t* anchors,
                const int32_t* tokens, int32_t vocabulary, int32_t rank, int32_t dtype, const void* predecessors,
                const void* successors, const float* gates, int32_t* chosen, float* scores) {
    if (slots < 1 || rows % slots || rank < 1 || (dtype != PN_F32 && dtype != PN_BF16))
        return fail("candidates need whole blocks, and codebooks of a rank in float32 or bfloat16");
    try {
        const Book before(predecessors, rank, dtype), after(successors, rank, dtype);
        std::vector<float> logs(static_cast<size_t>(count)), row(static_cast<size_t>(rank));
        std::vector<int> candidates(static_cast<size_t>(count)), earlier;
        for (int at = 0; at < rows; ++at, logits += size, gates += rank, chosen += count) {
            if (pn_likeliest(logits, 1, size, count, 1.0f, chosen, logs.data()) != 0) return -1;
            if (at % slots == 0) earlier.assign(1, anchors[at / slots]);
            else earlier = candidates;
            for (int place = 0; place < count; ++place)
                candidates[size_t(place)] = tokens ? tokens[chosen[place]] : chosen[place];
            for (const std::vector<int>* each : {&earlier, &candidates})
                for (const int token : *each)
                    if (token < 0 || token >= vocabulary) return fail("a token is outside the codebooks");
            Slot slot(after, candidates, rank);
            for (int place = 0; place < count; ++place, scores += count) {
                if (place < int(earlier.size())) {
                    before.row(earlier[size_t(place)], row.data());
                    slot.score(row.data(), gates, logs.data(), scores);
                } else {
                    memcpy(scores, scores - count, size_t(count) * 4);
                }
            }
        }
        return 0;
    } catch (const std::bad_alloc&) {
        return fail("out of memory");
    }
}
