// A small thread pool for one program at a time: every thread runs the same function and meets the others at barriers.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace pn {

constexpr int kMaxThreads = 256;

// Hands out [0, count) in shrinking pieces: large ones first, so that few are handed out, small ones last, so that a thread
// that was held up delays the others little.
class Share {
public:
    void reset() { next_.store(0, std::memory_order_relaxed); }
    // Takes [begin, end) of [0, count); false when nothing is left.
    bool take(int count, int num_threads, int least, int* begin, int* end);

private:
    alignas(64) std::atomic<int> next_{0};
};

class Pool {
public:
    using Job = void (*)(void* context, int thread);

    explicit Pool(int num_threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return num_threads_; }
    // Runs job(context, thread) on every thread, the caller being thread 0, and returns when all are done.
    void run(Job job, void* context);
    // To be called by every thread of a running job: none goes on before all have come.
    void barrier();

private:
    void work(int thread);
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
