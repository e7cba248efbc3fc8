// Candidates of a block's slots and what each scores behind another: DFlash 2's selector.
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "error.h"
#include "model.h"
#include "sampling.h"

namespace pn {

namespace {

constexpr int kSharedRows = 16;  // of fewer one thread is done as soon as two that have to meet

// Rows of a codebook as floats.
class Book {
public:
    Book(const void* data, const PnPick& pick) : data_(data), rank_(pick.rank), is_wide_(pick.book_dtype == PN_F32) {}
    void row(int token, float* out) const {
        if (is_wide_) {
            memcpy(out, static_cast<const float*>(data_) + int64_t(token) * rank_, size_t(rank_) * 4);
            return;
        }
        const uint16_t* from = static_cast<const uint16_t*>(data_) + int64_t(token) * rank_;
        for (int at = 0; at < rank_; ++at) out[at] = bfloat_to_float(from[at]);
    }
    // Rows of a codebook are far apart: all needed rows are prefetched before the first is read.
    void ask_for(int token) const {
        const int64_t bytes = int64_t(rank_) * (is_wide_ ? 4 : 2);
        const uint8_t* from = static_cast<const uint8_t*>(data_) + int64_t(token) * bytes;
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at);
    }

private:
    const void* data_;
    int rank_;
    bool is_wide_;
};

class Pick {
public:
    // What is kept from one pick to the next.
    struct Room {
        std::vector<Ranking> rankings;  // of each thread
        std::vector<std::vector<float>> gated;
        std::vector<float> logs, gates, before, behind;  // of each slot
        Buffer hidden, scratch;
    };

    Pick(const PnPick& pick, Pool& pool, Room& room)
        : pick_(pick), room_(room), pool_(pool), kernels_(*kernels_for(pick.dtype)), before_(pick.predecessors, pick),
          after_(pick.successors, pick), padded_((pick.count + kWide - 1) / kWide * kWide),
          num_threads_(pick.rows < kSharedRows ? 1 : pool.size()) {}

    int32_t prepare() {
        const size_t rows = size_t(pick_.rows), threads = size_t(num_threads_), rank = size_t(pick_.rank);
        room_.rankings.resize(std::max(room_.rankings.size(), threads));
        room_.gated.resize(std::max(room_.gated.size(), threads));
        for (size_t thread = 0; thread < threads; ++thread) {
            room_.rankings[thread].reserve(pick_.size);
            room_.gated[thread].resize(size_t(pick_.count) * rank);
        }
        room_.logs.resize(rows * size_t(padded_)), room_.gates.resize(rows * rank);
        room_.before.resize(rows * size_t(pick_.count) * rank), room_.behind.resize(rows * size_t(padded_) * rank);
        const int cols = pick_.gate->padded_cols();
        const size_t row_bytes = size_t(cols) * element();
        if (!room_.hidden.at_least(rows * row_bytes) || !room_.scratch.at_least(scratch_bytes(cols) * threads))
            return fail("out of memory");
        for (int row = 0; row < pick_.rows; ++row) {
            uint8_t* to = room_.hidden.as<uint8_t>() + size_t(row) * row_bytes;
            const int64_t from =
                row / pick_.slots * pick_.hidden_stride + row % pick_.slots * int64_t(pick_.gate->cols);
            memcpy(to, static_cast<const uint8_t*>(pick_.hidden) + from * int64_t(element()),
                   size_t(pick_.gate->cols) * element());
            memset(to + size_t(pick_.gate->cols) * element(), 0, row_bytes - size_t(pick_.gate->cols) * element());
        }
        return 0;
    }

    void run() {
        if (num_threads_ == 1) return work(0);
        pool_.run([](void* self, int thread) { static_cast<Pick*>(self)->work(thread); }, this);
    }

    int32_t status() const { return is_outside_ ? fail("a token is outside the codebooks") : 0; }

private:
    void work(int thread) {
        const Rows hidden = {room_.hidden.as<void>(), int64_t(size_t(pick_.gate->padded_cols()) * element())};
        gate_.each(pick_.gate->num_pieces(), num_threads_, 1, thread, [&](int begin, int end) {
            uint8_t* scratch = room_.scratch.as<uint8_t>() + scratch_bytes(pick_.gate->padded_cols()) * size_t(thread);
            const Columns to = {room_.gates.data(), pick_.rank, 0, pick_.rank, false, nullptr};
            multiply_pieces(kernels_, *pick_.gate, begin, end, hidden, pick_.rows, to, scratch);
        });
        choose_.each(pick_.rows, num_threads_, 1, thread, [&](int begin, int end) {
            for (int row = begin; row < end; ++row) choose(thread, row);
        });
        if (num_threads_ > 1) pool_.barrier();
        if (is_outside_) return;  // all threads or none: it was set before the barrier
        score_.each(pick_.rows, num_threads_, 1, thread, [&](int begin, int end) {
            for (int row = begin; row < end; ++row) score(thread, row);
        });
    }

    size_t element() const { return pick_.dtype == PN_F32 ? 4 : 2; }
    bool has_row(int token) const { return token >= 0 && token < pick_.vocabulary; }
    float* before(int row) const { return room_.before.data() + int64_t(row) * pick_.count * pick_.rank; }
    float* behind(int row) const { return room_.behind.data() + int64_t(row) * padded_ * pick_.rank; }
    float* logs(int row) const { return room_.logs.data() + int64_t(row) * padded_; }

    // A slot's candidates, and what the codebooks have of them.
    void choose(int thread, int row) {
        const int count = pick_.count, rank = pick_.rank;
        int32_t* chosen = pick_.chosen + int64_t(row) * count;
        int32_t* tokens = pick_.tokens + int64_t(row) * count;
        room_.rankings[size_t(thread)].row(pick_.logits + int64_t(row) * pick_.size, count, 1.0f, chosen, logs(row));
        const bool precede = (row + 1) % pick_.slots != 0;
        for (int place = 0; place < count; ++place) {
            tokens[place] = pick_.token_of ? pick_.token_of[chosen[place]] : chosen[place];
            if (!has_row(tokens[place])) return is_outside_.store(true);
            after_.ask_for(tokens[place]);
            if (precede) before_.ask_for(tokens[place]);
        }
        float* own = room_.gated[size_t(thread)].data();
        for (int place = 0; place < count; ++place) {
            after_.row(tokens[place], own);
            for (int at = 0; at < rank; ++at) behind(row)[at * padded_ + place] = own[at];
            if (precede) before_.row(tokens[place], before(row) + place * rank);
        }
    }

    // The token before a block's first slot is the anchor, for every candidate.
    void score(int thread, int row) {
        const int count = pick_.count, rank = pick_.rank;
        const bool is_first = row % pick_.slots == 0;
        float* gated = room_.gated[size_t(thread)].data();
        if (is_first) before_.row(pick_.anchors[row / pick_.slots], gated);
        const float *from = is_first ? gated : before(row - 1), *gates = room_.gates.data() + int64_t(row) * rank;
        const int num_before = is_first ? 1 : count;
        for (int place = 0; place < num_before; ++place)
            for (int at = 0; at < rank; ++at) gated[place * rank + at] = from[place * rank + at] * gates[at];
        float* scores = pick_.scores + int64_t(row) * count * count;
        kernels_.score({gated, behind(row), logs(row), num_before, rank, count, scores});
        for (int place = num_before; place < count; ++place) memcpy(scores + place * count, scores, size_t(count) * 4);
    }

    const PnPick& pick_;
    Room& room_;
    Pool& pool_;
    const Kernels& kernels_;
    const Book before_, after_;
    const int padded_, num_threads_;
    Share gate_, choose_, score_;
    std::atomic<bool> is_outside_{false};
};

const char* fault_of(const PnPick& pick) {
    if (pick.slots < 1 || pick.rows < 1 || pick.rows % pick.slots || pick.rank < 1 ||
        (pick.book_dtype != PN_F32 && pick.book_dtype != PN_BF16))
        return "candidates need whole blocks, and codebooks of a rank in float32 or bfloat16";
    if (pick.size < 1 || pick.count < 1 || pick.count > pick.size)
        return "the likeliest need a count within the vocabulary";
    if ((pick.dtype != PN_F32 && pick.dtype != PN_BF16) || pick.gate->rows != pick.rank ||
        pick.gate->parts.size() != 1 || pick.gate->parts[0].format != pick.dtype)
        return "the gate must be of the codebooks' rank, and float32 or bfloat16 as the hidden states are";
    for (int block = 0; block < pick.rows / pick.slots; ++block)
        if (pick.anchors[block] < 0 || pick.anchors[block] >= pick.vocabulary)
            return "a token is outside the codebooks";
    return nullptr;
}

}  // namespace

}  // namespace pn

using namespace pn;

int32_t pn_pick(const PnPick* pick) {
    if (const char* fault = fault_of(*pick)) return fail(fault);
    return in_turn([&](Pool& pool) {
        thread_local Pick::Room room;
        Pick work(*pick, pool, room);
        if (work.prepare() != 0) return -1;
        work.run();
        return work.status();
    });
}

int32_t pn_walk(const float* scores, int32_t slots, int32_t count, double inverse, int32_t* places, double* logs) {
    int before = 0, slot = 0;
    for (; slot < slots; ++slot, scores += int64_t(count) * count) {
        const float* row = scores + int64_t(before) * count;
        int best = 0;
        bool has_nan = false;
        for (int place = 0; place < count; ++place) {
            if (row[place] > row[best]) best = place;
            has_nan |= std::isnan(row[place]);
        }
        if (has_nan || !std::isfinite(row[best])) break;
        double sum = 0;
        for (int place = 0; place < count; ++place) sum += std::exp((double(row[place]) - double(row[best])) * inverse);
        places[slot] = before = best;
        logs[slot] = 0.0 - std::log(sum);
    }
    return slot;
}
