#include "shared_errors.h"

#include <stdexcept>
#include <string>

namespace py = pybind11;

namespace sparserow::bindings {
namespace {

// Never destroyed: the interpreter may be gone before static objects are.
py::object& error_factory() {
  static auto* factory = new py::object(py::none());  // NOLINT: see above
  return *factory;
}

}  // namespace

void bind_errors(py::module_& module) {
  module.def("set_error_factory", [](py::object factory) { error_factory() = std::move(factory); }, py::arg("factory"));
}

namespace {

py::object error_of(const Status& status) {
  if (error_factory().is_none()) {
    throw std::runtime_error(std::string(code_name(status.code())) + ": " + status.message());
  }
  return error_factory()(static_cast<int>(status.code()), status.message());
}

[[noreturn]] void throw_object(const py::object& error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw py::error_already_set();
}

}  // namespace

void raise_error(const Status& status) { throw_object(error_of(status)); }

void raise_write_error(const Status& status, bool may_be_applied) {
  const py::gil_scoped_acquire gil;
  const py::object error = error_of(status);
  error.attr("may_be_applied") = may_be_applied;
  throw_object(error);
}

}  // namespace sparserow::bindings
