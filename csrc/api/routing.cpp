// Sorting (token, choice) rows by expert, from raw addresses.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

#include "api/api.hpp"
#include "host/check.hpp"
#include "perseus/schedule/expert_segments.hpp"

namespace py = pybind11;

namespace perseus::api {
namespace {

// Returns [(local expert, first slot, end slot)] of the experts that have rows.
py::list sort_by_expert(
    uintptr_t ids_address, int id_bytes, int64_t num_tokens, int64_t num_choices, int64_t first_expert,
    int64_t num_local, uintptr_t table_address) {
    PERSEUS_CHECK(id_bytes == 4 || id_bytes == 8, "ids must be int32 or int64, got ", id_bytes, " bytes per id; cast them");
    PERSEUS_CHECK(
        num_tokens >= 0 && num_choices >= 0 && num_local >= 0, "sizes must not be negative, got num_tokens=", num_tokens,
        ", num_choices=", num_choices, ", num_local=", num_local, "; pass the shape of ids and of the local weights");
    const int64_t num_rows = num_tokens * num_choices;
    auto* const offsets = reinterpret_cast<int64_t*>(table_address);
    int64_t* const tokens = offsets + num_local + 1;
    int64_t* const rows = tokens + num_rows;
    int64_t* const slots = rows + num_rows;
    const auto cursors = std::make_unique<int64_t[]>(num_local);
    const auto sort = [&](const auto* ids) {
        schedule::segment_offsets(ids, num_rows, first_expert, num_local, offsets);
        schedule::place_rows(ids, num_rows, first_expert, num_local, offsets, cursors.get(), rows, slots);
    };
    if (id_bytes == 4) {
        sort(reinterpret_cast<const int32_t*>(ids_address));
    } else {
        sort(reinterpret_cast<const int64_t*>(ids_address));
    }
    for (int64_t slot = 0; slot < offsets[num_local]; ++slot) tokens[slot] = rows[slot] / num_choices;

    py::list hit;
    for (int64_t expert = 0; expert < num_local; ++expert) {
        if (offsets[expert] < offsets[expert + 1]) hit.append(py::make_tuple(expert, offsets[expert], offsets[expert + 1]));
    }
    return hit;
}

}  // namespace

void register_routing(py::module_& m) {
    m.def(
        "sort_by_expert", &sort_by_expert, py::kw_only{}, py::arg("ids"), py::arg("id_bytes"), py::arg("num_tokens"),
        py::arg("num_choices"), py::arg("first_expert"), py::arg("num_local"), py::arg("table"),
        "Stable counting sort of (token, choice) rows by local expert; rows of other experts are skipped.\n\n"
        "ids: address of dense int32 or int64 [num_tokens, num_choices]. table: address of int64, written: offsets\n"
        "[num_local + 1], the segment of each expert; then three arrays of num_tokens * num_choices: the token and the row\n"
        "of each slot (up to offsets[num_local]), and the slot of each row (-1 for a skipped one).\n"
        "Returns [(local expert, first slot, end slot)] of the experts that have rows.");
}

}  // namespace perseus::api
