// The host extension perseus_compile._C: plain C++ on raw addresses, no torch headers.
#include <pybind11/pybind11.h>

#include "api/api.hpp"

PYBIND11_MODULE(_C, m) {
    m.doc() = "Host code of perseus_compile. Addresses come from Tensor.data_ptr(); callers keep the tensors alive.";
    perseus::api::register_routing(m);
    perseus::api::register_experts(m);
    perseus::api::register_cuda_launch(m);
}
