// Files of checkpoints and versions for Python, read whole and hashed. No call has the GIL meanwhile.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "shared_errors.h"
#include "util/file_reader.h"

namespace py = pybind11;

namespace sparserow::bindings {
namespace {

// An array over a file's memory, which goes back to the reader when the array and its views are gone.
py::array_t<std::uint8_t> bytes_of(FileReader::File file) {
  auto owned = std::make_unique<FileReader::File>(std::move(file));
  const auto* const data = reinterpret_cast<const std::uint8_t*>(owned->bytes.data());
  const auto count = static_cast<py::ssize_t>(owned->bytes.size());
  py::capsule owner(owned.get(), [](void* memory) { delete static_cast<FileReader::File*>(memory); });
  (void)owned.release();
  return py::array_t<std::uint8_t>({count}, data, owner);
}

py::tuple read(FileReader& reader, const std::string& path, std::uint64_t size) {
  std::optional<Result<FileReader::File>> got;
  {
    const py::gil_scoped_release released;
    got.emplace(reader.read(path, size));
  }
  FileReader::File file = value_or_raise(std::move(*got));
  const std::uint64_t found = file.size;
  const std::uint64_t xxh3 = file.xxh3;
  return py::make_tuple(bytes_of(std::move(file)), found, xxh3);
}

}  // namespace

void bind_files(py::module_& module) {
  py::class_<FileReader>(module, "FileReader").def(py::init<>()).def("read", &read, py::arg("path"), py::arg("size"));
}

}  // namespace sparserow::bindings
