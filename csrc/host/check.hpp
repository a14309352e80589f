// How does host code refuse bad values? PERSEUS_CHECK throws std::invalid_argument, a ValueError in Python.
#pragma once

#include <sstream>
#include <stdexcept>

namespace perseus::host {

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw std::invalid_argument(text.str());
}

}  // namespace perseus::host

// The text says what must hold, what came and what to do; its values are only formatted on failure.
#define PERSEUS_CHECK(condition, ...)                           \
    do {                                                        \
        if (!(condition)) ::perseus::host::fail(__VA_ARGS__);   \
    } while (0)
