// What went wrong, for pn_last_error: the message of the calling thread. A literal: it is kept, not copied.
#pragma once
#include <cstdint>

namespace pn {

int32_t fail(const char* message);  // -1
template <class T = void>
struct Null {
    template <class U>
    operator U*() const {
        return nullptr;
    }
};
inline Null<> fail_null(const char* message) {
    fail(message);
    return {};
}

}  // namespace pn
