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

void raise_error(const Status& status) {
  if (error_factory().is_none()) {
    throw std::runtime_error(std::string(code_name(status.code())) + ": " + status.message());
  }
  const py::object error = error_factory()(static_cast<int>(status.code()), status.message());
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw py::error_already_set();
}

}  // namespace sparserow::bindings
