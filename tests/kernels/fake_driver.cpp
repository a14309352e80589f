// A CUDA driver without a device: notes what it is asked for. Built and read by fake_driver.py.
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr int kMaxMaps = 4, kMaxParamBytes = 512;

// What it makes of a tensor map: the numbers that it was made from.
struct FakeMap {
    uint64_t address, rank, dtype, swizzle;
    uint64_t sizes[4], strides[3];
    uint32_t box[4];
};
static_assert(sizeof(FakeMap) <= 128);

struct Launch {
    uint64_t function, stream, context;
    uint32_t grid[3], block[3], shared_bytes, num_attributes;
    uint8_t params[kMaxParamBytes];
    FakeMap maps[kMaxMaps];
};

// CUlaunchConfig as in cuda.h
struct Config {
    uint32_t grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
    void* stream;
    void* attributes;
    uint32_t num_attributes;
};

struct State {
    std::mutex mutex;
    std::vector<Launch> launches;
    std::map<uint64_t, uint64_t> capture_of_stream;
    int num_maps = 0, num_param_bytes = 0, num_encoded = 0, misaligned = 0;
    int launch_result = 0, encode_result = 0;
};

State state;
thread_local void* current_context = nullptr;

}  // namespace

extern "C" {

// ---- what the tests call

void fake_reset(int num_param_bytes, int num_maps) {
    const std::lock_guard lock(state.mutex);
    state.launches.clear();
    state.capture_of_stream.clear();
    state.num_param_bytes = num_param_bytes;
    state.num_maps = num_maps;
    state.num_encoded = state.misaligned = state.launch_result = state.encode_result = 0;
}
void fake_capture(uint64_t stream, uint64_t id) {
    const std::lock_guard lock(state.mutex);
    state.capture_of_stream[stream] = id;
}
void fake_fail(int launch_result, int encode_result) {
    const std::lock_guard lock(state.mutex);
    state.launch_result = launch_result;
    state.encode_result = encode_result;
}
int fake_num_encoded() { return state.num_encoded; }
int fake_num_misaligned() { return state.misaligned; }
int fake_num_launches() { return static_cast<int>(state.launches.size()); }
int fake_launch_bytes() { return sizeof(Launch); }
void fake_read_launch(int index, void* to) { std::memcpy(to, &state.launches.at(index), sizeof(Launch)); }

// ---- the driver

int cuGetErrorString(int result, const char** text) {
    *text = result == 700 ? "an illegal memory access was encountered" : nullptr;
    return *text ? 0 : 1;
}

int cuCtxGetCurrent(void** context) {
    *context = current_context;
    return 0;
}

int cuCtxSetCurrent(void* context) {
    current_context = context;
    return 0;
}

int cuStreamGetCaptureInfo_v2(
    void* stream, int* status, uint64_t* id, void** graph, const void*** dependencies, size_t* num_dependencies) {
    if (graph || dependencies || num_dependencies) return 1;
    const std::lock_guard lock(state.mutex);
    const auto found = state.capture_of_stream.find(reinterpret_cast<uint64_t>(stream));
    *status = found == state.capture_of_stream.end() ? 0 : 1;
    *id = *status ? found->second : 12345;  // outside a capture the number means nothing
    return 0;
}

int cuTensorMapEncodeTiled(
    void* to, int dtype, uint32_t rank, void* address, const uint64_t* sizes, const uint64_t* strides,
    const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle, int, int) {
    FakeMap map{reinterpret_cast<uint64_t>(address), rank, static_cast<uint64_t>(dtype),
                static_cast<uint64_t>(swizzle), {}, {}, {}};
    for (uint32_t axis = 0; axis < rank; ++axis) {
        map.sizes[axis] = sizes[axis];
        map.box[axis] = box[axis];
        if (axis + 1 < rank) map.strides[axis] = strides[axis];
        if (element_strides[axis] != 1 || interleave != 0) return 1;
    }
    std::this_thread::yield();  // let another thread in between
    const std::lock_guard lock(state.mutex);
    if (state.encode_result) return state.encode_result;
    if (reinterpret_cast<uint64_t>(to) % 64) ++state.misaligned;
    ++state.num_encoded;
    std::memcpy(to, &map, sizeof(map));
    return 0;
}

int cuLaunchKernelEx(const void* config, void* function, void** arguments, void** extra) {
    if (extra) return 1;
    Config asked;
    std::memcpy(&asked, config, sizeof(asked));
    const std::lock_guard lock(state.mutex);
    if (state.launch_result) return state.launch_result;
    Launch launch{};
    launch.function = reinterpret_cast<uint64_t>(function);
    launch.stream = reinterpret_cast<uint64_t>(asked.stream);
    launch.context = reinterpret_cast<uint64_t>(current_context);
    const std::array grid{asked.grid_x, asked.grid_y, asked.grid_z};
    const std::array block{asked.block_x, asked.block_y, asked.block_z};
    std::memcpy(launch.grid, grid.data(), sizeof(launch.grid));
    std::memcpy(launch.block, block.data(), sizeof(launch.block));
    launch.shared_bytes = asked.shared_bytes;
    launch.num_attributes = asked.num_attributes;
    std::memcpy(launch.params, arguments[0], state.num_param_bytes);
    for (int i = 0; i < state.num_maps; ++i) {
        if (reinterpret_cast<uint64_t>(arguments[1 + i]) % 64) ++state.misaligned;
        std::memcpy(&launch.maps[i], arguments[1 + i], sizeof(FakeMap));
    }
    state.launches.push_back(launch);
    return 0;
}

}  // extern "C"
