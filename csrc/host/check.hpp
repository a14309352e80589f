// How does host code refuse bad values? PERSEUS_CHECK throws std::invalid_argument, a ValueError in Python.
#pragma once

#include <stdexcept>
#include <string>

namespace perseus::host {

// NOTE: no string streams: with torch 2.11's libraries loaded first, printing an integer to one crashed the process.
inline std::string text_of(const char* text) { return text; }
inline std::string text_of(const std::string& text) { return text; }
template <typename Integer>
std::string text_of(Integer value) {
    return std::to_string(value);
}

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    throw std::invalid_argument((text_of(parts) + ...));
}

}  // namespace perseus::host

// The text says what must hold, what came and what to do; its values are only formatted on failure.
#define PERSEUS_CHECK(condition, ...)                           \
    do {                                                        \
        if (!(condition)) ::perseus::host::fail(__VA_ARGS__);   \
    } while (0)
