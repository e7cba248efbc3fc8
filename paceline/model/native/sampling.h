// The weights of a whole vocabulary, and which of them are the largest.
#pragma once
#include <vector>

#include "kernels.h"

namespace pn {

struct Choice {
    float weight;
    int id;
};

// Weights of one row of logits, the largest 1; of each kSummed of them the sum and the largest.
struct Weights {
    std::vector<float> each, sums, largest, ranked;
    int size = 0;

    void resize(int new_size);
    double total() const;
    // Everything that weighs something and not less than `least`, ids ascending.
    void gather(float least, std::vector<Choice>& into) const;
    // The `count` likeliest and perhaps more, or all that weigh something.
    void gather_most(int count, std::vector<Choice>& into);
    // A guess of what is the least wanted, lowered until `is_enough`.
    template <class Enough>
    void gather_until(std::vector<Choice>& into, Enough is_enough) const {
        for (const float least : {0.0625f, 0.00390625f, 0.000244140625f, 0.0000152587890625f, 0.0f}) {
            gather(least, into);
            if (is_enough() || least == 0) return;
        }
    }
};

// The likeliest of rows of logits, one row after another; its memory is kept.
class Ranking {
public:
    // For rows of `size`; nothing is allocated afterwards.
    void reserve(int size);
    // As pn_likeliest, of one row.
    void row(const float* logits, int count, float inverse, int32_t* ids, float* logs);

private:
    Weights weights_;
    std::vector<Choice> choices_;
};

}  // namespace pn
