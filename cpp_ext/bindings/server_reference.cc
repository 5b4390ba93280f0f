#include "server_reference.h"

#include <cmath>
#include <cstddef>

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

}  // namespace

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

}  // namespace sparserow::bindings
