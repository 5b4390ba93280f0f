// The yardstick of `sparserow bench engine`: Adagrad on flat arrays.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "shared_arrays.h"
#include "shared_errors.h"

namespace py = pybind11;

namespace sparserow::bindings {
namespace {

constexpr std::size_t kPrefetchDistance = 8;
constexpr std::size_t kLineFloats = 16;

// The compiler makes one version per instruction set and the loader picks one, as for the store's kernels.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void update_row(const float* __restrict grad, float* __restrict weights, float* __restrict sums, std::uint32_t dim,
                float lr, float eps) noexcept {
  for (std::uint32_t i = 0; i < dim; ++i) {
    const float sum = sums[i] + grad[i] * grad[i];
    sums[i] = sum;
    weights[i] -= lr * (grad[i] / (__builtin_sqrtf(sum) + eps));
  }
}

// Always inlined: the compiler deems a function that only prefetches to be without effect, and drops its calls.
[[gnu::always_inline]] inline void prefetch_row(const float* row, std::uint32_t dim) noexcept {
  for (std::uint32_t i = 0; i < dim; i += kLineFloats) __builtin_prefetch(row + i, 1);
}

// For each i: row = rows[i] of weights and sums (row_count, dim); sums += g^2; weights -= lr * g / (sqrt(sums) +
// eps), in place, in order, with the rows of the next few indexes prefetched. No index, no versions, no locks.
void flat_adagrad(std::span<const std::int64_t> rows, const float* grads, float* weights, float* sums,
                  std::uint32_t dim, float lr, float eps) noexcept {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i + kPrefetchDistance < rows.size()) {
      const auto next = static_cast<std::size_t>(rows[i + kPrefetchDistance]) * dim;
      prefetch_row(weights + next, dim);
      prefetch_row(sums + next, dim);
    }
    const auto at = static_cast<std::size_t>(rows[i]) * dim;
    update_row(grads + i * dim, weights + at, sums + at, dim, lr, eps);
  }
}

}  // namespace

// With the same checks and without the GIL, as Store.apply() is.
void bind_flat_adagrad(py::module_& module) {
  module.def(
      "flat_adagrad",
      [](const py::array_t<std::int64_t, py::array::c_style>& rows, const py::array& grads,
         py::array_t<float, py::array::c_style>& weights, py::array_t<float, py::array::c_style>& sums, float lr,
         float eps) {
        if (rows.ndim() != 1 || weights.ndim() != 2 || sums.ndim() != 2 || weights.shape(0) != sums.shape(0) ||
            weights.shape(1) != sums.shape(1)) {
          raise_if_error({Code::kInvalidArgument, "flat_adagrad: rows (n); weights and sums of one shape (rows, dim)"});
        }
        const std::span<const std::int64_t> wanted(rows.data(), static_cast<std::size_t>(rows.size()));
        for (const std::int64_t row : wanted) {
          if (row < 0 || row >= weights.shape(0)) raise_if_error({Code::kInvalidArgument, "rows: out of range"});
        }
        const auto dim = static_cast<std::uint32_t>(weights.shape(1));
        const float* values = matrix_of(grads, "grads", wanted.size(), dim);
        float *weight = weights.mutable_data(), *sum = sums.mutable_data();
        const py::gil_scoped_release released;
        flat_adagrad(wanted, values, weight, sum, dim, lr, eps);
      },
      py::arg("rows"), py::arg("grads"), py::arg("weights").noconvert(), py::arg("sums").noconvert(), py::kw_only(),
      py::arg("lr"), py::arg("eps"));
}

}  // namespace sparserow::bindings
