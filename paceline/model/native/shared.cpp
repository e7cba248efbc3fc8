// What all models share: the pool, the instruction set, the last error.
#include <unistd.h>

#if defined(PN_HAS_AMX) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#endif

#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "error.h"
#include "model.h"

#ifdef PN_HAS_AVXVNNI
#include <cpuid.h>
#endif

namespace pn {

namespace {

std::mutex turn_mutex;
std::unique_ptr<Pool> pool;
pid_t pool_owner = 0;

struct InstructionSet {
    const char* name;
    bool is_here;
    const Kernels* (*kernels)(int dtype);
};

// Written under the mutex; also read without it: by pn_matrix_rows and pn_likeliest, which run during passes.
std::atomic<int> wanted_threads{1};
std::atomic<const InstructionSet*> chosen_set{nullptr};  // null: the best
thread_local const char* last_error = "";                // a literal: to report a lack of memory needs none

#if defined(PN_HAS_AMX) && !defined(__linux__)
bool has_amx() { return false; }  // this system has no way to detect them
#elif defined(PN_HAS_AMX)
// Whether the processor has tiles of bytes and the kernel lets this process use them.
bool has_amx() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 24 & 1) || !(d >> 25 & 1)) return false;
    constexpr long kAskForState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
}
#endif

#ifdef PN_HAS_AVXVNNI
// Byte dot products on vectors of 256 bits.
bool has_avxvnni() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

// Instruction sets that the library was compiled with, best first; those for tests only come last.
const std::vector<InstructionSet>& instruction_sets() {
    static const std::vector<InstructionSet> all = [] {
        std::vector<InstructionSet> sets;
#if defined(PN_HAS_AVX512) || defined(PN_HAS_AVX2)
        __builtin_cpu_init();
#endif
#ifdef PN_HAS_AVX512
        const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                                __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
#ifdef PN_HAS_AVX512BF16
#ifdef PN_HAS_AMX
        sets.push_back({"amx", has_avx512 && __builtin_cpu_supports("avx512bf16") && has_amx(), amx_kernels});
#endif
        sets.push_back({"avx512bf16", has_avx512 && __builtin_cpu_supports("avx512bf16"), avx512bf16_kernels});
#endif
        sets.push_back({"avx512", has_avx512, avx512_kernels});
#endif
#ifdef PN_HAS_AVX2
        const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#ifdef PN_HAS_AVXVNNI
        sets.push_back({"avxvnni", has_avx2 && has_avxvnni(), avxvnni_kernels});
#endif
        sets.push_back({"avx2", has_avx2, avx2_kernels});
#endif
#ifdef PN_HAS_I8MM
        sets.push_back({"i8mm", has_i8mm(), i8mm_kernels});
#endif
#ifdef PN_HAS_DOTPROD
        sets.push_back({"dotprod", has_dotprod(), dotprod_kernels});
#endif
#ifdef PN_HAS_NEON
        sets.push_back({"neon", true, neon_kernels});
#endif
        sets.push_back({"portable", true, portable_kernels});
#if defined(PN_EMULATED) && defined(PN_HAS_AVX512)
        sets.push_back({"emulated-tiles", has_avx512, emulated_tiles_kernels});
#endif
#if defined(PN_EMULATED) && defined(PN_HAS_AVX2)
        sets.push_back({"emulated-avxvnni", has_avx2, emulated_avxvnni_kernels});
#endif
        return sets;
    }();
    return all;
}

// The one of that name, the best without; null when the processor or the library lacks it.
const InstructionSet* find_set(const char* name) {
    for (const InstructionSet& set : instruction_sets())
        if (set.is_here && (!name || strcmp(set.name, name) == 0)) return &set;
    return nullptr;
}

const InstructionSet& set_in_use() {
    const InstructionSet* set = chosen_set.load(std::memory_order_acquire);
    return set ? *set : *find_set(nullptr);
}

Pool& ready_pool() {
    if (pool && pool_owner != getpid()) (void)pool.release();  // a forked child has none of its parent's threads
    const int num_threads = wanted_threads.load();
    if (!pool || pool->size() != num_threads) {
        pool.reset();
        pool = std::make_unique<Pool>(num_threads);
        pool_owner = getpid();
    }
    return *pool;
}

}  // namespace

#if defined(PN_HAS_AVX512) || defined(PN_HAS_AVX2)
const bool asks_far = [] {
    __builtin_cpu_init();
    return bool(__builtin_cpu_is("amdfam17h")) || bool(__builtin_cpu_is("amdfam19h"));  // Zen to Zen 4
}();
#else
const bool asks_far = false;
#endif

int32_t fail(const char* message) {
    last_error = message;
    return -1;
}

Turn::Turn() : lock_(turn_mutex), pool(ready_pool()) {}

const Kernels* kernels_for(int dtype) { return set_in_use().kernels(dtype); }

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
const char* pn_last_error(void) { return last_error; }

const char* pn_available(void) {
    static const std::string names = [] {
        std::string all;
        for (const InstructionSet& set : instruction_sets())
            if (set.is_here) all += (all.empty() ? "" : ",") + std::string(set.name);
        return all;
    }();
    return names.c_str();
}

int32_t pn_use(const char* isa) {
    std::lock_guard<std::mutex> lock(turn_mutex);
    const InstructionSet* set = find_set(isa);
    if (!set) return fail("this instruction set is not available here");
    chosen_set.store(set, std::memory_order_release);
    return 0;
}

const char* pn_in_use(void) { return set_in_use().name; }

int32_t pn_set_threads(int32_t num_threads) {
    if (num_threads < 1 || num_threads > kMaxThreads) return fail("the number of threads must be between 1 and 256");
    std::lock_guard<std::mutex> lock(turn_mutex);
    wanted_threads = num_threads;
    return 0;
}

int32_t pn_num_threads(void) { return wanted_threads; }
int32_t pn_padded_head_dim(int32_t head_dim) { return padded_cols(head_dim); }
