// Which experts does the routing code of the kernels choose? Reads a call from standard input, writes ids and weights.
//
// Input: RouteKernelParams without addresses (RouteParams), whether there is a correction bias (u32), then the bias and
// the logits [T, E], F32 or BF16. Output: ids i32 [T, K], weights F32 [T, K]. One warp, as 32 threads.
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "perseus/routing/route.cuh"

using namespace perseus;

template <typename T>
std::vector<T> read(size_t count) {
    std::vector<T> values(count);
    if (std::fread(values.data(), sizeof(T), count, stdin) != count) std::exit(1);
    return values;
}

int main() {
    RouteParams params = read<RouteParams>(1)[0];
    const bool has_bias = read<u32>(1)[0] != 0;
    const std::vector<float> bias = read<float>(has_bias ? params.num_experts : 0);
    const std::vector<u8> logits =
        read<u8>(size_t{params.num_tokens} * params.num_experts * (params.logits_are_bf16 ? 2 : 4));
    params.correction_bias = has_bias ? bias.data() : nullptr;
    std::vector<i32> ids(size_t{params.num_tokens} * params.top_k);
    std::vector<float> weights(ids.size());
    const RouteArrays arrays{logits.data(), ids.data(), weights.data()};
    std::vector<std::thread> lanes;
    for (u32 lane = 0; lane < 32; ++lane) {
        lanes.emplace_back([&, lane] {
            threadIdx.x = lane;
            for (u32 token = 0; token < params.num_tokens; ++token) {
                route_token<PERSEUS_CHECKED_PER_LANE>(params, arrays, token, RouteResult::kStore);
            }
        });
    }
    for (std::thread& lane : lanes) lane.join();
    std::fwrite(ids.data(), sizeof(i32), ids.size(), stdout);
    std::fwrite(weights.data(), sizeof(float), weights.size(), stdout);
}
