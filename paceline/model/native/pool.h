// A small thread pool for one program at a time: every thread runs the same function and meets the others at barriers.
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace pn {

constexpr int kMaxThreads = 256;

// Hands out [0, count). Every thread has a part of its own, which it walks through from the front, so that it reads memory in order
// and writes what it wrote the last time; a finished thread takes from the back of other parts, so that a
// delayed thread holds up the others little.
class Share {
public:
    void reset() {
        for (std::atomic<uint64_t>& part : taken_) part.store(0, std::memory_order_relaxed);
    }
    // Where a thread begins.
    static int first(int count, int num_threads, int least, int thread) {
        const int num_parts = parts(num_threads);
        return begin_of((count + least - 1) / least, num_parts, thread % num_parts) * least;
    }
    // work(begin, end) for everything this thread gets, in pieces of `least` or more.
    template <class Work>
    void each(int count, int num_threads, int least, int thread, Work work) {
        const int num_parts = parts(num_threads), units = (count + least - 1) / least;
        for (int turn = 0; turn < num_parts; ++turn) {
            const int part = (thread + turn) % num_parts, begin = begin_of(units, num_parts, part);
            int from, to;
            while (take(part, begin_of(units, num_parts, part + 1) - begin, num_parts == 1, turn == 0, &from, &to))
                work((begin + from) * least, std::min((begin + to) * least, count));
        }
    }

private:
    static constexpr int kMostParts = 16;  // of more threads several have one together

    static int parts(int num_threads) { return std::min(num_threads, kMostParts); }
    static int begin_of(int units, int num_parts, int part) { return int(int64_t(units) * part / num_parts); }
    // [from, to) of a part of `size`, from its front when it is one's own; false when nothing is left.
    bool take(int part, int size, bool takes_all, bool is_own, int* from, int* to);

    alignas(64) std::atomic<uint64_t> taken_[kMostParts] = {};  // from the front, and in the lower half from the back
};

class Pool {
public:
    using Job = void (*)(void* context, int thread);

    explicit Pool(int num_threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return num_threads_; }
    // Runs job(context, thread) on every thread, the caller being thread 0, and returns when all are done. A job allocates no
    // memory: an exception of a thread would end the process.
    void run(Job job, void* context);
    // To be called by every thread of a running job: none goes on before all have come.
    void barrier();

private:
    void work(int thread);
    void close();  // ends and joins the threads
    void wait_for_job(unsigned seen);

    const int num_threads_;
    Job job_ = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<unsigned> generation_{0};  // counts jobs
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> phase_{0};
    alignas(64) std::atomic<int> running_{0};
    std::atomic<int> sleeping_{0};
    std::atomic<bool> is_closing_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> threads_;
};

}  // namespace pn
