// Adds the session, the merged pull and the key-level calls to the module `_client`.
#pragma once

#include <pybind11/pybind11.h>

namespace sparserow::bindings {

// After the classes of shards/shards.h are bound.
void bind_session(pybind11::module_& module);

}  // namespace sparserow::bindings
