// The yardstick of `sparserow bench engine`: Adagrad on flat arrays, for _server.flat_adagrad.
#pragma once

#include <cstdint>
#include <span>

namespace sparserow::bindings {

// For each i: row = rows[i] of weights and sums (row_count, dim); sums += g^2; weights -= lr * g / (sqrt(sums) +
// eps), in place, in order, with the rows of the next few indexes prefetched. No index, no versions, no locks.
void flat_adagrad(std::span<const std::int64_t> rows, const float* grads, float* weights, float* sums,
                  std::uint32_t dim, float lr, float eps) noexcept;

}  // namespace sparserow::bindings
