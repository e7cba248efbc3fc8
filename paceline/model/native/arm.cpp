// Detects an ARM processor's instructions beyond NEON, as reported by the system.
#include "kernels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace pn {

#if defined(__aarch64__) && defined(__linux__)

bool has_dotprod() { return getauxval(AT_HWCAP) >> 20 & 1; }  // HWCAP_ASIMDDP
bool has_i8mm() {
    constexpr unsigned long kSecondWord = 26;  // AT_HWCAP2
    return has_dotprod() && (getauxval(kSecondWord) >> 13 & 1);
}

#elif defined(__aarch64__) && defined(__APPLE__)

namespace {

bool has(const char* name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
}

}  // namespace

bool has_dotprod() { return has("hw.optional.arm.FEAT_DotProd"); }
bool has_i8mm() { return has_dotprod() && has("hw.optional.arm.FEAT_I8MM"); }

#else

bool has_dotprod() { return false; }
bool has_i8mm() { return false; }

#endif

}  // namespace pn
