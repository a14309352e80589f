// Sorting (token, choice) rows by expert, from raw addresses.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "api/api.hpp"
#include "host/sort_rows.hpp"

namespace py = pybind11;

namespace perseus::api {
namespace {

py::list sort_by_expert(
    uintptr_t ids_address, int id_bytes, int64_t num_tokens, int64_t num_choices, int64_t first_expert,
    int64_t num_local, uintptr_t table_address) {
    const host::Ids ids{reinterpret_cast<const void*>(ids_address), id_bytes, num_tokens, num_choices};
    const host::SortTable table(reinterpret_cast<int64_t*>(table_address), ids, num_local);
    host::sort_rows(ids, first_expert, num_local, table);
    py::list hit;
    for (int64_t expert = 0; expert < num_local; ++expert) {
        const int64_t first = table.offsets[expert], end = table.offsets[expert + 1];
        if (first < end) hit.append(py::make_tuple(expert, first, end));
    }
    return hit;
}

}  // namespace

void register_routing(py::module_& m) {
    m.def(
        "sort_by_expert", &sort_by_expert, py::kw_only{}, py::arg("ids"), py::arg("id_bytes"), py::arg("num_tokens"),
        py::arg("num_choices"), py::arg("first_expert"), py::arg("num_local"), py::arg("table"),
        R"(Stable counting sort of (token, choice) rows by local expert; rows of other experts are skipped.

ids: address of dense int32 or int64 [num_tokens, num_choices]. table: address of int64, written: offsets
[num_local + 1], the segment of each expert; then three arrays of num_tokens * num_choices: the token and the row of
each slot (up to offsets[num_local]), and the slot of each row (-1 for a skipped one).
Returns [(local expert, first slot, end slot)] of the experts that have rows.)");
}

}  // namespace perseus::api
