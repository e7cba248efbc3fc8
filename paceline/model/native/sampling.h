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
