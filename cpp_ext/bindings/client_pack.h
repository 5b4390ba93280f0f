// Adds the class LookupPack to the module _client.
#pragma once

#include <pybind11/pybind11.h>

namespace sparserow::bindings {

void bind_pack(pybind11::module_& module);

}  // namespace sparserow::bindings
