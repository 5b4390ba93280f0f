// The storage of a row cache that Python gives (cpp_ext/device/device_storage.py).
#pragma once

#include <pybind11/pybind11.h>

#include "session/row_storage.h"

namespace sparserow::bindings {

// make: called as make(bytes, dim) for an object with probe(table_id, keys, oldest, found, versions, rows),
// put(table_id, keys, versions, rows, validated) and drop(table_id, keys), whose arrays are views that end with the
// call. Needs the GIL; what it gives does not.
[[nodiscard]] MakeStorage storage_of(pybind11::object make);

}  // namespace sparserow::bindings
