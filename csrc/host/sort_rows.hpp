// The sort of (token, choice) rows by expert as one table of integers.
#pragma once

#include <cstdint>
#include <vector>

#include "host/check.hpp"
#include "perseus/schedule/expert_segments.hpp"

namespace perseus::host {

// ids as they come from a tensor: dense [num_tokens, num_choices], int32 or int64.
struct Ids {
    const void* data;
    int bytes_per_id;
    int64_t num_tokens, num_choices;

    int64_t num_rows() const { return num_tokens * num_choices; }
};

// Where the arrays of the table start.
struct SortTable {
    int64_t* offsets;  // [num_local + 1], the segment of each expert
    int64_t* tokens;   // [num_rows], the token in each slot
    int64_t* rows;     // [num_rows], the row in each slot
    int64_t* slots;    // [num_rows], the slot of each row; -1 for a skipped one

    static int64_t size(const Ids& ids, int64_t num_local) { return num_local + 1 + 3 * ids.num_rows(); }

    SortTable(int64_t* table, const Ids& ids, int64_t num_local)
        : offsets(table),
          tokens(offsets + num_local + 1),
          rows(tokens + ids.num_rows()),
          slots(rows + ids.num_rows()) {}
};

inline void sort_rows(const Ids& ids, int64_t first_expert, int64_t num_local, const SortTable& table) {
    PERSEUS_CHECK(
        ids.bytes_per_id == 4 || ids.bytes_per_id == 8, "ids must be int32 or int64, got ", ids.bytes_per_id,
        " bytes per id; cast them");
    PERSEUS_CHECK(
        ids.num_tokens >= 0 && ids.num_choices >= 0 && num_local >= 0, "sizes must not be negative, got num_tokens=",
        ids.num_tokens, ", num_choices=", ids.num_choices, ", num_local=", num_local,
        "; pass the shape of ids and of the local weights");
    std::vector<int64_t> cursors(num_local);
    const auto sort = [&](const auto* data) {
        schedule::segment_offsets(data, ids.num_rows(), first_expert, num_local, table.offsets);
        schedule::place_rows(
            data, ids.num_rows(), first_expert, num_local, table.offsets, cursors.data(), table.rows, table.slots);
    };
    if (ids.bytes_per_id == 4) {
        sort(static_cast<const int32_t*>(ids.data));
    } else {
        sort(static_cast<const int64_t*>(ids.data));
    }
    for (int64_t slot = 0; slot < table.offsets[num_local]; ++slot) {
        table.tokens[slot] = table.rows[slot] / ids.num_choices;
    }
}

}  // namespace perseus::host
