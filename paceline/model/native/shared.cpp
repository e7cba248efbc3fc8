// What all models share: the pool, the instruction set, the last error.
#include <unistd.h>

#include <cstring>
#include <mutex>
#include <string>

#include "error.h"
#include "model.h"

namespace pn {

namespace {

std::mutex turn_mutex;
std::unique_ptr<Pool> pool;
pid_t pool_owner = 0;
int wanted_threads = 1;
const char* chosen_isa = nullptr;
thread_local std::string last_error;

bool has_avx512() {
#ifdef PN_HAS_AVX512
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("fma");
#else
    return false;
#endif
}

bool has_avx2() {
#ifdef PN_HAS_AVX2
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return false;
#endif
}

const char* best_isa() { return has_avx512() ? "avx512" : has_avx2() ? "avx2" : "portable"; }

Pool& ready_pool() {
    if (pool && pool_owner != getpid()) (void)pool.release();  // a forked child has none of its parent's threads
    if (!pool || pool->size() != wanted_threads) {
        pool.reset();
        pool = std::make_unique<Pool>(wanted_threads);
        pool_owner = getpid();
    }
    return *pool;
}

}  // namespace

int32_t fail(const char* message) {
    last_error = message;
    return -1;
}

Turn::Turn() : pool((turn_mutex.lock(), ready_pool())) {}
Turn::~Turn() { turn_mutex.unlock(); }

const Kernels* kernels_for(int dtype) {
    const char* isa = chosen_isa ? chosen_isa : best_isa();
#ifdef PN_HAS_AVX512
    if (strcmp(isa, "avx512") == 0) return avx512_kernels(dtype);
#endif
#ifdef PN_HAS_AVX2
    if (strcmp(isa, "avx2") == 0) return avx2_kernels(dtype);
#endif
    (void)isa;
    return portable_kernels(dtype);
}

void* Buffer::at_least(size_t bytes) {
    if (bytes <= bytes_) return data_;
    release(data_);
    data_ = allocate(bytes);
    bytes_ = data_ ? bytes : 0;
    return data_;
}

}  // namespace pn

using namespace pn;

int32_t pn_abi_version(void) { return PN_ABI_VERSION; }
const char* pn_last_error(void) { return last_error.c_str(); }

const char* pn_available(void) {
    return has_avx512() ? (has_avx2() ? "avx512,avx2,portable" : "avx512,portable") : has_avx2() ? "avx2,portable" : "portable";
}

int32_t pn_use(const char* isa) {
    std::lock_guard<std::mutex> lock(turn_mutex);
    if (strcmp(isa, "avx512") == 0 && has_avx512()) chosen_isa = "avx512";
    else if (strcmp(isa, "avx2") == 0 && has_avx2()) chosen_isa = "avx2";
    else if (strcmp(isa, "portable") == 0) chosen_isa = "portable";
    else return fail("this instruction set is not available here");
    return 0;
}

const char* pn_in_use(void) { return chosen_isa ? chosen_isa : best_isa(); }

int32_t pn_set_threads(int32_t num_threads) {
    if (num_threads < 1 || num_threads > kMaxThreads) return fail("the number of threads must be between 1 and 256");
    std::lock_guard<std::mutex> lock(turn_mutex);
    wanted_threads = num_threads;
    return 0;
}

int32_t pn_num_threads(void) { return wanted_threads; }
int32_t pn_padded_head_dim(int32_t head_dim) { return padded_cols(head_dim); }
