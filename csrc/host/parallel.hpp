// How does host code use more than one core? The OpenMP runtime, which torch has loaded and keeps warm.
#pragma once

#include <cstdint>

namespace perseus::host {

// Runs task(i) for i in [0, count) on up to num_threads threads. A thread takes runs of neighbouring tasks, long ones
// first: neighbours read neighbouring memory, so its reads are one stream (5-25 % faster than task by task for 1 and 4
// tokens; EPYC 9005, two cores, measured 2026-11-30), and the short last runs even out unequal tasks. Tasks must not
// throw. Without OpenMP (a build without -fopenmp) they run in order on the calling thread.
template <typename Task>
void parallel_for(int64_t count, int num_threads, const Task& task) {
    if (count <= 1 || num_threads <= 1) {
        for (int64_t i = 0; i < count; ++i) task(i);
        return;
    }
#pragma omp parallel for schedule(guided) num_threads(num_threads)
    for (int64_t i = 0; i < count; ++i) task(i);
}

}  // namespace perseus::host
