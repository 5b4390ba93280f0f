// Adds the class FlatRows and the function seal_rows to the module _client.
#pragma once

#include <pybind11/pybind11.h>

namespace sparserow::bindings {

void bind_flat_rows(pybind11::module_& module);

}  // namespace sparserow::bindings
