#include "pool.h"

#include <chrono>

#if defined(__x86_64__) || defined(__i386__)
#define PN_PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PN_PAUSE() asm volatile("yield")
#else
#define PN_PAUSE() ((void)0)
#endif

namespace pn {

namespace {

// Between passes the host works for some tens of microseconds: a worker that slept would cost as much to wake.
constexpr auto kSpin = std::chrono::microseconds(300);
// A barrier takes less than a microsecond, unless another program occupies the core of a late thread; yielding this core then helps
// it to finish sooner, and costs no more than a pause if no other program wants the core.
constexpr int kSpinsBeforeYield = 200;

void wait_a_little(int spins) {
    if (spins < kSpinsBeforeYield) PN_PAUSE();
    else std::this_thread::yield();
}

}  // namespace

bool Share::take(int part, int size, bool takes_all, bool is_own, int* from, int* to) {
    std::atomic<uint64_t>& taken = taken_[part];
    // Relaxed: only counts are exchanged here; barriers publish the work itself.
    uint64_t before = taken.load(std::memory_order_relaxed);
    while (true) {
        const int front = int(before >> 32), back = int(uint32_t(before)), left = size - front - back;
        if (left <= 0) return false;
        const int count = takes_all ? left : std::max(is_own ? left / 2 : left / 4, 1);
        const uint64_t more = is_own ? uint64_t(count) << 32 : uint64_t(count);
        if (!taken.compare_exchange_weak(before, before + more, std::memory_order_relaxed)) continue;
        *from = is_own ? front : size - back - count;
        *to = *from + count;
        return true;
    }
}

Pool::Pool(int num_threads) : num_threads_(num_threads) {
    try {
        for (int thread = 1; thread < num_threads; ++thread) threads_.emplace_back([this, thread] { work(thread); });
    } catch (...) {
        close();  // a destructor does not run, and a thread that is not joined ends the process
        throw;
    }
}

Pool::~Pool() { close(); }

void Pool::close() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        is_closing_.store(true);
        generation_.fetch_add(1);
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void Pool::run(Job job, void* context) {
    job_ = job, context_ = context;
    running_.store(num_threads_ - 1, std::memory_order_relaxed);
    generation_.fetch_add(1);  // sequentially consistent with `sleeping_`: a worker sees the job or we see the sleeper
    if (sleeping_.load() > 0) {
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
    job(context, 0);
    for (int spins = 0; running_.load(std::memory_order_acquire) > 0; ++spins) wait_a_little(spins);
}

void Pool::barrier() {
    if (num_threads_ == 1) return;
    const unsigned phase = phase_.load(std::memory_order_relaxed);  // before arriving: then it may change at once
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
        arrived_.store(0, std::memory_order_relaxed);  // before the phase, which lets the next barrier begin
        phase_.store(phase + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) wait_a_little(spins);
}

void Pool::wait_for_job(unsigned seen) {
    const auto until = std::chrono::steady_clock::now() + kSpin;
    for (int spins = 1; generation_.load(std::memory_order_acquire) == seen; ++spins) {
        wait_a_little(spins);
        if (spins % 64 == 0 && std::chrono::steady_clock::now() > until) {
            std::unique_lock<std::mutex> lock(mutex_);
            sleeping_.fetch_add(1);
            wake_.wait(lock, [&] { return generation_.load() != seen; });
            sleeping_.fetch_sub(1);
        }
    }
}

void Pool::work(int thread) {
    for (unsigned seen = 0;; ++seen) {  // `run` waits for all threads: none misses a job
        wait_for_job(seen);
        if (is_closing_.load()) return;
        job_(context_, thread);
        running_.fetch_sub(1, std::memory_order_release);
    }
}

}  // namespace pn
