// One pass through a decoder, of which every thread runs the same stages.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "model.h"

namespace pn {

using Clock = std::chrono::steady_clock;

// At least the calls of `share` in any layer, of which a mixed one has 22: each takes a Share, unchecked.
constexpr int kStagesPerLayer = 24;
constexpr int kAskedFor = 8192;      // bytes of the next weights
constexpr int kLeastHeadPieces = 4;  // sixteen rows each, that a thread takes at a time
constexpr int kOwnInputs = 16;       // tokens up to which every thread norms all of them
constexpr int kHeadPieces = 16;      // of the head that a thread makes at a time
constexpr int kGated = 256;          // rows of sixteen gated columns that it makes at a time, if there are so few

class Forward {
public:
    Forward(PnModel& model, const PnCache& cache, const PnPass& pass, Pool& pool)
        : model_(model), config_(model.config), cache_(cache), pass_(pass), pool_(pool),
          kernels_(*kernels_for(config_.dtype)) {}

    int32_t prepare();
    int32_t place_tokens(int index);
    void run(int thread);
    void finish();

private:
    // A matrix that a later stage begins with; gate and up are two parts that are walked through side by side.
    struct Next {
        const PnMatrix* matrix;
        int least, parts;
    };
    int32_t reserve();
    void layer(int thread, int index);
    void embed(int token);
    const Buffer& normed_input(int thread, const float* weight, int tapped_layer);
    const Buffer& beside_input(int thread);
    const Buffer& mixed_input(int thread, const PnMatrix* mix, const float* base, const Buffer& normed);
    void sublayer_output(int thread, PnStage stage, const PnMatrix& matrix, const float* bias, Rows input,
                         const float* base, const float* out_norm, Next next);
    void add_output(int token, float* output, const float* out_norm);
    void mlp(int thread, int index);
    void norm_whole(const PnLayer& layer, int item);
    Mix mix_of(int token, const float* base, int side) const;
    Rows rows_for(int thread, const PnMatrix& matrix, const Buffer& x, int cols, int count);
    void rotate(int index, int item);
    void attend(int thread, int index, const Task& task);
    void gate_up(int thread, const PnExpert& mlp, Rows input, int num_rows, uint8_t* out, int begin, int end);
    void gate_attended(int token);
    // delta.cpp
    int32_t prepare_delta();
    void delta(int thread, int index);
    void convolve(const PnLayer& layer, const PnMemory& memory, int token, int head);
    void weigh(const PnLayer& layer, int token);
    void delta_head(int thread, const PnMemory& memory, int row_index, int head);
    void settle(const PnMemory& memory, int row_index, int head, int first, int count, float* weights);
    void keep_trail(const PnMemory& memory, int row_index, int kind);
    // experts.cpp
    void experts(int thread, int index);
    void choose(const PnLayer& layer, int token);
    void sort_by_expert(const PnLayer& layer);
    Rows group_rows(int group, const PnMatrix& matrix, const Buffer& x, int row_stride) const;
    template <class Work>
    void each_piece(int begin, int end, int (*pieces_of)(const PnExpert&), const PnLayer& layer, Work work) const;
    void head(int thread, Rows input, int begin, int end);
    void tap(int token, int layer_index, bool is_normed);
    void product(int thread, const PnMatrix& matrix, int begin, int end, Rows x, float* y, int columns, bool accumulate,
                 const float* bias);

    template <class Work>
    void share(int thread, PnStage stage, int count, int least, Work work, Next next = {nullptr, 0, 0});
    void ask_for(const Next& next, int thread) const;
    Next after(int layer) const;
    // Half of it the other threads have just written, and it is far away: asked for at once.
    static void fetch(const void* from, int64_t bytes) {
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const uint8_t*>(from) + at);
    }
    // Pieces of the gated product that a thread makes at a time: to begin with tiles takes as long as a tenth of a piece.
    static int gate_pieces(int num_rows) { return std::max(kGated / num_rows, 2); }

    uint8_t* element(const Buffer& buffer, int64_t index) const {
        return buffer.as<uint8_t>() + index * model_.element_bytes();
    }
    uint8_t* cached(void* base, int layer_index, int row, int head) const {
        const int layer = model_.cache_layer[size_t(layer_index)];
        const int64_t at = layer * cache_.layer_stride + row * cache_.row_stride + head * cache_.head_stride;
        return static_cast<uint8_t*>(base) + at * model_.element_bytes();
    }
    float* hidden(int token) const { return model_.hidden.as<float>() + int64_t(token) * config_.hidden_size; }

    PnModel& model_;
    const PnConfig& config_;
    const PnCache& cache_;
    const PnPass& pass_;
    Pool& pool_;
    const Kernels& kernels_;
    int num_tokens_ = 0, max_end_ = 0;
    std::vector<int> first_token_,
        gone_;  // for every row of the pass: its first token, and the number of pending tokens committed
    Clock::time_point stage_began_;
    size_t next_share_[kMaxThreads] = {};  // every thread walks through the shares in the same order
};

// A stage. Whoever is done asks for the weights it will begin with at `next`, before it waits.
template <class Work>
void Forward::share(int thread, PnStage stage, int count, int least, Work work, Next next) {
    Share& pieces = model_.shares[next_share_[thread]++];
    pieces.each(count, pool_.size(), least, thread, work);
    if (next.matrix) ask_for(next, thread);
    pool_.barrier();
    if (thread == 0 && pass_.stage_s) {
        const Clock::time_point now = Clock::now();
        pass_.stage_s[stage] += std::chrono::duration<float>(now - stage_began_).count();
        stage_began_ = now;
    }
}

}  // namespace pn
