// Which rows belong to which expert? A stable counting sort of (token, choice) rows by expert, for host and device.
//
// Names: a row is one (token, choice) pair, numbered token * K + choice. A segment is the run of sorted rows of one
// expert. A foreign row chose an expert that lives elsewhere; it is in no segment.
#pragma once

#include <stdint.h>

#ifndef PERSEUS_HOST_DEVICE
#ifdef __CUDACC__
#define PERSEUS_HOST_DEVICE __host__ __device__
#else
#define PERSEUS_HOST_DEVICE
#endif
#endif

namespace perseus::schedule {

constexpr int64_t kForeign = -1;

// The expert as an index into the local weights, or kForeign.
template <typename Id>
PERSEUS_HOST_DEVICE inline int64_t local_expert(Id id, int64_t first_expert, int64_t num_local) {
    const int64_t local = static_cast<int64_t>(id) - first_expert;
    return local >= 0 && local < num_local ? local : kForeign;
}

// Counts the rows of each local expert and turns the counts into row offsets.
//   offsets: [num_local + 1], segment e is [offsets[e], offsets[e + 1]); the last entry is the number of sorted rows.
template <typename Id>
PERSEUS_HOST_DEVICE inline void segment_offsets(
    const Id* ids, int64_t num_rows, int64_t first_expert, int64_t num_local, int64_t* offsets) {
    for (int64_t e = 0; e <= num_local; ++e) offsets[e] = 0;
    for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t expert = local_expert(ids[row], first_expert, num_local);
        if (expert != kForeign) ++offsets[expert + 1];
    }
    for (int64_t e = 0; e < num_local; ++e) offsets[e + 1] += offsets[e];
}

// Places every row into its segment, in row order.
//   cursors: [num_local], scratch.
//   order:   [num_rows], order[slot] is the row in that slot; entries from offsets[num_local] on are not written.
//   slots:   [num_rows], slots[row] is the slot of that row, or kForeign.
template <typename Id>
PERSEUS_HOST_DEVICE inline void place_rows(
    const Id* ids, int64_t num_rows, int64_t first_expert, int64_t num_local, const int64_t* offsets, int64_t* cursors,
    int64_t* order, int64_t* slots) {
    for (int64_t e = 0; e < num_local; ++e) cursors[e] = offsets[e];
    for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t expert = local_expert(ids[row], first_expert, num_local);
        slots[row] = expert == kForeign ? kForeign : cursors[expert]++;
        if (expert != kForeign) order[slots[row]] = row;
    }
}

}  // namespace perseus::schedule
