// _client: rows of a table in arrays of the caller, and the end of the sums of a step's gradients.
#include "bindings/client_flat.h"

#include <pybind11/stl.h>

#include <algorithm>

#include "bindings/client_schema.h"
#include "bindings/shared_arrays.h"
#include "bindings/shared_errors.h"
#include "commit/flat_rows.h"
#include "util/finite.h"
#include "util/row_norm.h"

namespace sparserow::bindings {
namespace {

namespace py = pybind11;

using Blocks = std::vector<std::pair<py::array, py::array>>;

std::vector<GradBlock> blocks_of(const Blocks& blocks, std::uint32_t dim) {
  std::vector<GradBlock> out;
  for (const auto& [rows, grads] : blocks) {
    const auto keys = keys_of(rows);
    out.push_back({.dim = dim, .keys = keys, .grads = matrix_of(grads, "grads", keys.size(), dim)});
  }
  return out;
}

// A writable, C-contiguous array of these sizes.
template <class T>
T* memory_of(py::array& array, const char* name, std::size_t rows, std::size_t columns) {
  if (!py::isinstance<py::array_t<T, py::array::c_style>>(array) || !array.writeable() ||
      static_cast<std::size_t>(array.size()) != rows * columns) {
    raise_if_error(must_be(name, "a writable contiguous array with a value for each row and column"));
  }
  return static_cast<T*>(array.mutable_data());
}

FlatArrays arrays_of(const FlatRows& self, py::array& weights, py::array& state, py::array& counts) {
  const auto rows = static_cast<std::size_t>(counts.size());
  return {memory_of<float>(weights, "weights", rows, self.dim()),
          memory_of<float>(state, "state", rows, self.state_floats()),
          memory_of<std::uint32_t>(counts, "update_counts", rows, 1), rows};
}

// (rows with NaN or Inf, the first of them, rows that were shortened)
std::tuple<std::uint64_t, std::uint64_t, std::uint64_t> seal_rows(py::array& grads, float scale, float clip_row_norm) {
  if (grads.ndim() != 2) raise_if_error(must_be("grads", "two-dimensional"));
  const auto rows = static_cast<std::size_t>(grads.shape(0));
  const auto dim = static_cast<std::uint32_t>(grads.shape(1));
  auto* row = memory_of<float>(grads, "grads", rows, dim);
  const py::gil_scoped_release unlocked;
  std::uint64_t bad = 0;
  std::uint64_t first = 0;
  std::uint64_t clipped = 0;
  for (std::size_t i = 0; i < rows; ++i, row += dim) {
    if (scale != 1.0f) {
      for (std::uint32_t c = 0; c < dim; ++c) row[c] *= scale;
    }
    if (!all_finite(row, dim)) {
      if (bad++ == 0) first = i;
    } else if (clip_norm(row, dim, clip_row_norm)) {
      ++clipped;
    }
  }
  return {bad, first, clipped};
}

}  // namespace

void bind_flat_rows(py::module_& module) {
  py::class_<FlatRows>(module, "FlatRows")
      .def(py::init([](std::uint32_t id, std::uint32_t version, std::string name, std::uint32_t dim, int dtype,
                       std::uint64_t seed, const py::tuple& init, const py::dict& optimizer, const py::dict& policy) {
             return value_or_raise(
                 FlatRows::create(schema_of(id, version, std::move(name), dim, dtype, seed, init, optimizer, policy)));
           }),
           py::kw_only(), py::arg("id"), py::arg("version"), py::arg("name"), py::arg("dim"), py::arg("dtype"),
           py::arg("seed"), py::arg("init"), py::arg("optimizer"), py::arg("policy"))
      .def_property_readonly("state_floats", &FlatRows::state_floats)
      .def(
          "initial",
          [](const FlatRows& self, const py::array& keys) {
            const auto wanted = keys_of(keys);
            std::vector<float> rows(wanted.size() * self.dim());
            {
              const py::gil_scoped_release unlocked;
              self.fill_initial(wanted, rows.data());
            }
            return array_of(std::move(rows), {static_cast<py::ssize_t>(wanted.size()), self.dim()});
          },
          py::arg("keys"))
      .def(
          "initial_state",
          [](const FlatRows& self, const py::array& weights) {
            const auto rows = static_cast<std::size_t>(weights.ndim() == 2 ? weights.shape(0) : 0);
            const float* given = matrix_of(weights, "weights", rows, self.dim());
            std::vector<float> state(rows * self.state_floats());
            {
              const py::gil_scoped_release unlocked;
              self.fill_state(rows, given, state.data());
            }
            return array_of(std::move(state), {static_cast<py::ssize_t>(rows), self.state_floats()});
          },
          py::arg("weights"))
      .def(
          "apply",
          [](const FlatRows& self, const Blocks& blocks, std::uint32_t workers, bool grad_sum, float lr,
             py::array weights, py::array state, py::array update_counts) {
            const auto wanted = blocks_of(blocks, self.dim());
            const FlatArrays arrays = arrays_of(self, weights, state, update_counts);
            Status status = Status::ok();
            {
              const py::gil_scoped_release unlocked;
              status = self.apply(wanted, workers, grad_sum, lr, arrays);
            }
            raise_if_error(status);
          },
          py::arg("blocks"), py::kw_only(), py::arg("workers"), py::arg("grad_sum"), py::arg("lr"), py::arg("weights"),
          py::arg("state"), py::arg("update_counts"));
  module.def(
      "are_finite",
      [](const std::vector<std::pair<std::uintptr_t, std::size_t>>& parts) {
        const py::gil_scoped_release unlocked;
        return std::all_of(parts.begin(), parts.end(), [](const auto& part) {
          return all_finite(reinterpret_cast<const float*>(part.first), part.second);
        });
      },
      py::arg("parts"));
  module.def("seal_rows", &seal_rows, py::arg("grads"), py::kw_only(), py::arg("scale"), py::arg("clip_row_norm"));
}

}  // namespace sparserow::bindings
