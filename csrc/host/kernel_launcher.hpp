// How does one call site of a CUDA kernel launch? Parameters are kept as bytes; a launch sets the addresses that moved.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "host/check.hpp"
#include "host/cuda_driver.hpp"

namespace perseus::host {

// Blocks of words that are zero between launches, and the record of the first deadline that expired. Launches that
// share a block must be ordered: those of one stream, or those that one graph capture took from one stream. A graph is
// never known to be dead, so no block is given back.
class ControlBlocks {
public:
    ControlBlocks(uintptr_t words, size_t stride_bytes, size_t capacity, uintptr_t error, const std::string& driver)
        : driver_(Driver::of(driver)),
          words_(words),
          stride_bytes_(stride_bytes),
          capacity_(capacity),
          error_(reinterpret_cast<uint32_t*>(error)) {}

    uintptr_t address(uintptr_t stream) {
        const std::pair key{stream, driver_.capture_id(reinterpret_cast<void*>(stream))};
        const std::lock_guard lock(mutex_);
        const auto known = index_of_.find(key);
        if (known != index_of_.end()) return words_ + known->second * stride_bytes_;
        const size_t index = index_of_.size();
        if (index == capacity_) {
            throw DriverError(
                "at most " + std::to_string(capacity_) +
                " streams and graphs can be served by one process, got one more; re-use streams and graphs");
        }
        index_of_.emplace(key, index);
        return words_ + index * stride_bytes_;
    }

    size_t num_used() const {
        const std::lock_guard lock(mutex_);
        return index_of_.size();
    }

    // Whether a kernel wrote its record. The device writes it at any time.
    bool expired() const { return std::atomic_ref(*error_).load(std::memory_order_relaxed) != 0; }

private:
    const Driver& driver_;
    const uintptr_t words_;
    const size_t stride_bytes_, capacity_;
    uint32_t* const error_;
    std::map<std::pair<uintptr_t, uint64_t>, size_t> index_of_;  // (stream, capture)
    mutable std::mutex mutex_;
};

// An address that is known at the launch only: that of one of the launch's bases, and an offset in bytes.
struct Place {
    size_t base;
    uint64_t offset;
};

struct Patch {
    size_t at;  // byte of the parameters where the address is written
    Place place;
};

struct PlacedMap {
    Place place;
    TensorMapShape shape;
};

// A launch brings num_addresses addresses: its bases 0 .. num_addresses - 1. Two more bases follow.
struct LauncherConfig {
    void* function;
    void* context;
    std::string params;  // bytes of the first kernel parameter
    std::vector<Patch> patches;
    std::vector<PlacedMap> maps;  // the kernel parameters after the first
    size_t num_addresses;
    uint32_t grid, threads, shared_bytes;

    size_t control_base() const { return num_addresses; }   // the control block of stream and capture
    size_t fixed_base() const { return num_addresses + 1; }  // zero: the offset is the whole address
};

class KernelLauncher {
public:
    static constexpr size_t kMaxParamBytes = 1024, kMaxMaps = 6, kMaxAddresses = 14;

    KernelLauncher(LauncherConfig config, std::shared_ptr<ControlBlocks> control, const std::string& driver)
        : driver_(Driver::of(driver)), config_(std::move(config)), control_(std::move(control)) {
        PERSEUS_CHECK(
            config_.params.size() <= kMaxParamBytes && config_.maps.size() <= kMaxMaps &&
                config_.num_addresses <= kMaxAddresses,
            "a kernel can have ", kMaxParamBytes, " bytes of parameters, ", kMaxMaps, " tensor maps and ",
            kMaxAddresses, " addresses, got ", config_.params.size(), ", ", config_.maps.size(), " and ",
            config_.num_addresses, "; raise the limits in kernel_launcher.hpp");
        for (const Patch& patch : config_.patches) {
            PERSEUS_CHECK(
                patch.at + sizeof(uint64_t) <= config_.params.size(), "an address must lie in the ",
                config_.params.size(), " bytes of the parameters, got one at ", patch.at, "; check the offsets");
            check_base(patch.place.base);
        }
        for (const PlacedMap& map : config_.maps) {
            const size_t rank = map.shape.sizes.size();
            PERSEUS_CHECK(
                map.shape.box.size() == rank && map.shape.strides_bytes.size() + 1 == rank,
                "a tensor map of ", rank, " axes must have as many box sizes and one stride less, got ",
                map.shape.box.size(), " and ", map.shape.strides_bytes.size(), "; pass one of each per axis");
            check_base(map.place.base);
            const bool is_fixed = map.place.base == config_.fixed_base();
            encoded_.push_back({is_fixed ? map.place.offset : kNowhere, {}});
            if (is_fixed) encoded_.back().map = driver_.encode(map.shape, map.place.offset);
        }
    }

    // False, and nothing is launched, where an earlier launch left a record of an expired deadline.
    bool launch(uintptr_t stream, std::span<const uintptr_t> addresses) {
        PERSEUS_CHECK(
            addresses.size() == config_.num_addresses, "a launch must bring ", config_.num_addresses,
            " addresses, got ", addresses.size(), "; pass one per base");
        if (control_ && control_->expired()) return false;
        driver_.use_context(config_.context);
        Bases bases{};
        std::copy(addresses.begin(), addresses.end(), bases.begin());
        if (control_) bases[config_.control_base()] = control_->address(stream);

        // Copies of this launch: other threads may be launching the same call site.
        alignas(16) std::array<char, kMaxParamBytes> params;
        std::copy(config_.params.begin(), config_.params.end(), params.begin());
        for (const auto& [at, place] : config_.patches) {
            const uint64_t address = bases[place.base] + place.offset;
            std::memcpy(params.data() + at, &address, sizeof(address));
        }
        std::array<TensorMap, kMaxMaps> maps;
        copy_maps(bases, maps);
        std::array<void*, 1 + kMaxMaps> arguments{params.data()};
        for (size_t i = 0; i < config_.maps.size(); ++i) arguments[1 + i] = &maps[i];

        const LaunchConfig launch_config{
            .grid = {config_.grid, 1, 1},
            .block = {config_.threads, 1, 1},
            .shared_bytes = config_.shared_bytes,
            .stream = reinterpret_cast<void*>(stream),
            .attributes = nullptr,
            .num_attributes = 0,
        };
        driver_.launch(launch_config, config_.function, arguments.data());
        return true;
    }

private:
    static constexpr uintptr_t kNowhere = ~uintptr_t{0};
    using Bases = std::array<uintptr_t, kMaxAddresses + 2>;

    struct EncodedMap {
        uintptr_t address;  // that `map` was encoded for
        TensorMap map;
    };

    void check_base(size_t base) const {
        const bool is_known = base < config_.num_addresses || base == config_.fixed_base() ||
                              (base == config_.control_base() && control_);
        PERSEUS_CHECK(
            is_known, "a base must be one of ", config_.num_addresses, " addresses, ", config_.control_base(),
            " (control block, where there is one) or ", config_.fixed_base(), " (none), got ", base,
            "; check the patches and tensor maps");
    }

    // The allocator returns the same few addresses: most launches find the map of the one before.
    void copy_maps(const Bases& bases, std::array<TensorMap, kMaxMaps>& maps) {
        const std::lock_guard lock(mutex_);
        for (size_t i = 0; i < encoded_.size(); ++i) {
            const auto& [place, shape] = config_.maps[i];
            const uintptr_t address = bases[place.base] + place.offset;
            if (encoded_[i].address != address) encoded_[i] = {address, driver_.encode(shape, address)};
            maps[i] = encoded_[i].map;
        }
    }

    const Driver& driver_;
    const LauncherConfig config_;
    const std::shared_ptr<ControlBlocks> control_;
    std::vector<EncodedMap> encoded_;
    std::mutex mutex_;  // of encoded_
};

}  // namespace perseus::host
