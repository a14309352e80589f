// Where do the inner loops keep rows that they read again and again? In memory aligned to a cache line: a vector load
// that straddles two lines costs two.
#pragma once

#include <cstdint>
#include <new>

namespace perseus::host {

// count elements, not initialised.
template <typename T>
class Aligned {
public:
    explicit Aligned(int64_t count)
        : data_(static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{kCacheLine}))) {}
    ~Aligned() { ::operator delete(data_, std::align_val_t{kCacheLine}); }
    Aligned(const Aligned&) = delete;
    Aligned& operator=(const Aligned&) = delete;

    T* get() const { return data_; }

private:
    static constexpr std::size_t kCacheLine = 64;  // bytes
    T* data_;
};

}  // namespace perseus::host
