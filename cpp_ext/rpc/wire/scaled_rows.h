// Rows of 16 bits on the wire from a worker to a shard, each with the power of two that brings its largest value close
// to the end of float16's range.
//
// Gradients of one commit differ by more than float16 spans: a mean over 65,536 samples gives rare keys gradients below
// its smallest number, a sum gives frequent ones gradients beyond its largest. A value is off by at most 2^-11 of
// itself (bfloat16: 2^-8), or by 2^-39 of the row's largest value where that is more. No finite value becomes infinite.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "util/dtype.h"

namespace sparserow::rpc {

// The exponents that there are: 2^-e times a float of 16 bits that was scaled by 2^e is a normal float32 at both ends.
inline constexpr int kLeastExponent = -113;
inline constexpr int kMostExponent = 126;

[[nodiscard]] bool are_exponents(std::span<const std::int8_t> exponents) noexcept;

// Writes rows (n, dim) as `dtype`, of 16 bits, and the exponent of each. NaN and infinities stay what they are.
void scale_rows(Dtype dtype, const float* rows, std::size_t n, std::size_t dim, std::int8_t* exponents,
                std::byte* scaled) noexcept;

// The rows (n, dim) again. The exponents must be allowed.
void unscale_rows(Dtype dtype, const std::byte* scaled, std::span<const std::int8_t> exponents, std::size_t dim,
                  float* rows) noexcept;

}  // namespace sparserow::rpc
