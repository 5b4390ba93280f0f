// Adds the keys of texts to the module _client.
#pragma once

#include <pybind11/pybind11.h>

namespace sparserow::bindings {

void bind_texts(pybind11::module_& module);

}  // namespace sparserow::bindings
