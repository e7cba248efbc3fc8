// Memory for weights: many matrices share large pieces, so that even small ones lie in huge pages. Streaming through small
// pages costs twice the time: a processor does not prefetch across the end of one.
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "matrix.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace pn {

namespace {

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kSlab = 16 * kHugePage;

struct Slab {
    uint8_t* data;
    size_t size, used;
    int num_alive;
};

std::mutex mutex;
std::vector<Slab> slabs;

uint8_t* from_system(size_t bytes) {
    void* data = nullptr;
    if (posix_memalign(&data, bytes >= kHugePage ? kHugePage : 64, bytes) != 0) return nullptr;
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (bytes >= kHugePage) (void)madvise(data, bytes, MADV_HUGEPAGE);  // only advice: any answer will do
#endif
    memset(data, 0, bytes);
    return static_cast<uint8_t*>(data);
}

}  // namespace

#if defined(__SANITIZE_ADDRESS__)

void* allocate_weights(size_t bytes) { return from_system(bytes); }  // each on its own, fenced
void release_weights(void* data) { free(data); }

#else

void* allocate_weights(size_t bytes) {
    bytes = round_up(bytes, 64);
    std::lock_guard<std::mutex> lock(mutex);
    // Bytes of a slab are given out once, so they are still zero; it is freed when all its matrices are.
    for (Slab& slab : slabs) {
        if (slab.size - slab.used < bytes) continue;
        uint8_t* data = slab.data + slab.used;
        slab.used += bytes, ++slab.num_alive;
        return data;
    }
    const size_t size = round_up(bytes > kSlab ? bytes : kSlab, kHugePage);
    uint8_t* data = from_system(size);
    if (data) slabs.push_back({data, size, bytes, 1});
    return data;
}

void release_weights(void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    for (size_t index = 0; index < slabs.size(); ++index) {
        Slab& slab = slabs[index];
        if (data < slab.data || data >= slab.data + slab.size) continue;
        if (--slab.num_alive == 0) {
            free(slab.data);
            slabs.erase(slabs.begin() + std::ptrdiff_t(index));
        }
        return;
    }
}

#endif

void* allocate(size_t bytes) { return from_system(bytes ? bytes : 1); }
void release(void* data) { free(data); }

}  // namespace pn
