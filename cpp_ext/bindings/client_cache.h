// Binds the row cache's CPU storage.
#pragma once

#include <pybind11/pybind11.h>

namespace sparserow::bindings {

void bind_cache(pybind11::module_& module);

}  // namespace sparserow::bindings
