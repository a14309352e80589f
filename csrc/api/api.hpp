// The topics of the extension; each registers its functions.
#pragma once

#include <pybind11/pybind11.h>

namespace perseus::api {

void register_routing(pybind11::module_& m);
void register_experts(pybind11::module_& m);
void register_cuda_launch(pybind11::module_& m);

}  // namespace perseus::api
