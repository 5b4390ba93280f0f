// Status -> Python exception, once, at the edge of a binding.
//
// The native core imports nothing of the package, so the package registers how a code becomes an exception:
// set_error_factory(error_of), with error_of(number, message) -> Exception. Each extension module has a
// factory of its own. All functions but raise_if_error and value_or_raise need the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <utility>

#include "util/status.h"

namespace sparserow::bindings {

// Adds set_error_factory(factory) to `module`.
void bind_errors(pybind11::module_& module);

// Raises what the factory gives for `status`; RuntimeError before a factory is registered.
[[noreturn]] void raise_error(const Status& status);

// May be called without the GIL.
inline void raise_if_error(const Status& status) {
  if (status.is_ok()) return;
  const pybind11::gil_scoped_acquire gil;
  raise_error(status);
}

// As raise_error(), for a write; the exception's attribute `may_be_applied` is set. May be called without the GIL.
[[noreturn]] void raise_write_error(const Status& status, bool may_be_applied);

template <class T>
[[nodiscard]] T value_or_raise(Result<T> result) {
  raise_if_error(result.status());
  return std::move(result).value();
}

}  // namespace sparserow::bindings
