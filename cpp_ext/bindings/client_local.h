// Adds LocalShards to the module `_client`.
#pragma once

#include <pybind11/pybind11.h>

namespace sparserow::bindings {

// After the class RowReader is bound.
void bind_local_shards(pybind11::module_& module);

}  // namespace sparserow::bindings
