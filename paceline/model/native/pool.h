// A small thread pool for one program at a time: every thread runs the same function and meets the others at barriers.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace pn {

constexpr int kMaxThreads = 256;

// Hands out [0, count): first a piece of its own to every thread, half of the work together, so that a thread knows beforehand
// where it will begin; then what is left in shrinking pieces, so that a thread that was held up delays the others little.
class Share {
public:
    void reset() { next_.store(0, std::memory_order_relaxed); }
    // Size of everyone's first piece; that of thread t begins at t times this.
    static int first_size(int count, int num_threads, int least) {
        const int size = num_threads == 1 ? count : count / (2 * num_threads);
        return size / least * least;
    }
    // work(begin, end) for everything this thread gets of [0, count), in pieces of `least` or more.
    template <class Work>
    void each(int count, int num_threads, int least, int thread, Work work) {
        const int size = first_size(count, num_threads, least);
        if (size) work(thread * size, (thread + 1) * size);
        for (int begin, end; take(count, num_threads, least, &begin, &end);) work(begin, end);
    }

private:
    // [begin, end) of what is left; false when nothing is.
    bool take(int count, int num_threads, int least, int* begin, int* end);

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
