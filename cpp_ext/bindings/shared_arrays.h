// Checked views of numpy arrays: exact dtype, shape and layout, never a silent conversion.
#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "shared_errors.h"
#include "util/not_allowed.h"

namespace sparserow::bindings {

// A C-contiguous, one-dimensional uint64 array.
[[nodiscard]] inline std::span<const std::uint64_t> keys_of(const pybind11::array& keys) {
  if (!pybind11::isinstance<pybind11::array_t<std::uint64_t, pybind11::array::c_style>>(keys) || keys.ndim() != 1) {
    raise_if_error(must_be("keys", "a one-dimensional contiguous uint64 array"));
  }
  return {static_cast<const std::uint64_t*>(keys.data()), static_cast<std::size_t>(keys.size())};
}

// A C-contiguous float32 array of shape (rows, columns).
[[nodiscard]] inline const float* matrix_of(const pybind11::array& matrix, const char* name, std::size_t rows,
                                            std::size_t columns) {
  if (!pybind11::isinstance<pybind11::array_t<float, pybind11::array::c_style>>(matrix) || matrix.ndim() != 2 ||
      static_cast<std::size_t>(matrix.shape(0)) != rows || static_cast<std::size_t>(matrix.shape(1)) != columns) {
    raise_if_error(must_be(
        name, "a contiguous float32 array of shape (" + std::to_string(rows) + ", " + std::to_string(columns) + ")"));
  }
  return static_cast<const float*>(matrix.data());
}

// An array that owns a vector's memory; dtype: of the elements, where T says only their bytes.
template <class T>
pybind11::array array_of(std::vector<T> values, std::vector<pybind11::ssize_t> shape, const char* dtype = nullptr) {
  auto owned = std::make_unique<std::vector<T>>(std::move(values));
  const T* data = owned->data();
  pybind11::capsule owner(owned.get(), [](void* memory) { delete static_cast<std::vector<T>*>(memory); });
  (void)owned.release();
  if (dtype != nullptr) return {pybind11::dtype(dtype), std::move(shape), data, owner};
  return pybind11::array_t<T>(std::move(shape), data, owner);
}

}  // namespace sparserow::bindings
