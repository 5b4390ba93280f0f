// _client: the CPU storage of the row cache by itself, for its benchmark and for the tests that compare it with the
// Triton storage. A session uses its own, natively.
#include "bindings/client_cache.h"

#include <pybind11/numpy.h>

#include <vector>

#include "bindings/shared_dtype.h"
#include "bindings/shared_errors.h"
#include "session/row_cache.h"
#include "util/not_allowed.h"

namespace sparserow::bindings {
namespace {

namespace py = pybind11;

// A RowCache that knows its dim, for the shapes of its arrays.
struct NativeRowCache {
  using Keys = py::array_t<std::uint64_t, py::array::c_style>;
  using Rows = py::array_t<float, py::array::c_style>;

  std::uint32_t dim;
  RowCache rows;

  static std::unique_ptr<NativeRowCache> make(std::uint64_t capacity_bytes, std::uint32_t dim,
                                              const std::string& dtype);
  py::tuple probe(std::uint32_t table_id, const Keys& keys, std::int64_t oldest);
  void put(std::uint32_t table_id, const Keys& keys, const Keys& versions, const Rows& values, std::int64_t validated);
  void drop(std::uint32_t table_id, const Keys& keys) { rows.drop(table_id, span_of(keys)); }

 private:
  static std::span<const std::uint64_t> span_of(const Keys& keys) {
    return {keys.data(), static_cast<std::size_t>(keys.size())};
  }
};

std::unique_ptr<NativeRowCache> NativeRowCache::make(std::uint64_t capacity_bytes, std::uint32_t dim,
                                                     const std::string& dtype_name) {
  const Dtype dtype = dtype_of("RowCache.dtype", dtype_name);
  const std::uint64_t least = RowCache::kWays * RowCache::bytes_per_row(dim, dtype);
  if (dim == 0 || capacity_bytes < least) {
    raise_error(not_allowed("RowCache.capacity_bytes", capacity_bytes,
                            ">= " + std::to_string(least) + " with dim " + std::to_string(dim)));
  }
  return std::unique_ptr<NativeRowCache>(new NativeRowCache{dim, RowCache(capacity_bytes, dim, dtype)});
}

py::tuple NativeRowCache::probe(std::uint32_t table_id, const Keys& keys, std::int64_t oldest) {
  py::array_t<std::uint8_t> found(keys.size());
  Keys versions(keys.size());
  Rows values({keys.size(), static_cast<py::ssize_t>(dim)});
  {
    auto* states = reinterpret_cast<Cached*>(found.mutable_data());
    std::uint64_t* version_of = versions.mutable_data();
    float* to = values.mutable_data();
    const py::gil_scoped_release unlocked;
    rows.probe(table_id, span_of(keys), oldest, states, version_of, to);
  }
  return py::make_tuple(found, versions, values);
}

void NativeRowCache::put(std::uint32_t table_id, const Keys& keys, const Keys& versions, const Rows& values,
                         std::int64_t validated) {
  if (versions.size() != keys.size() || values.size() != keys.size() * static_cast<py::ssize_t>(dim)) {
    raise_error(Status(Code::kInvalidArgument, "put: versions must be (n) and rows (n, " + std::to_string(dim) +
                                                   ") for n = " + std::to_string(keys.size()) + " keys"));
  }
  const py::gil_scoped_release unlocked;
  rows.put(table_id, span_of(keys), versions.data(), values.data(), validated);
}

}  // namespace

void bind_cache(py::module_& module) {
  py::class_<NativeRowCache>(module, "NativeRowCache")
      .def(py::init(&NativeRowCache::make), py::kw_only(), py::arg("capacity_bytes"), py::arg("dim"),
           py::arg("dtype") = "float32")
      .def_property_readonly("sets", [](const NativeRowCache& self) { return self.rows.sets(); })
      .def_static(
          "bytes_per_row",
          [](std::uint32_t dim, const std::string& dtype) {
            return RowCache::bytes_per_row(dim, dtype_of("RowCache.dtype", dtype));
          },
          py::arg("dim"), py::arg("dtype") = "float32")
      .def("probe", &NativeRowCache::probe, py::arg("table_id"), py::arg("keys"), py::arg("oldest"))
      .def("put", &NativeRowCache::put, py::arg("table_id"), py::arg("keys"), py::arg("versions"), py::arg("rows"),
           py::arg("validated"))
      .def("drop", &NativeRowCache::drop, py::arg("table_id"), py::arg("keys"));
}

}  // namespace sparserow::bindings
