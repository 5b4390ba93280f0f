// The L2 norm of one row's gradient, and its limit.
#pragma once

#include <cmath>
#include <cstdint>

namespace sparserow {

// Shortens a vector to an L2 norm of `most` where it is longer; returns whether it was. The norm is taken in float64:
// the square of a large float32 is not one.
inline bool clip_norm(float* values, std::uint32_t n, float most) noexcept {
  double squares = 0.0;
  for (std::uint32_t i = 0; i < n; ++i) squares += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  const double norm = std::sqrt(squares);
  if (norm <= static_cast<double>(most)) return false;
  const double shrink = static_cast<double>(most) / norm;
  for (std::uint32_t i = 0; i < n; ++i) values[i] = static_cast<float>(static_cast<double>(values[i]) * shrink);
  return true;
}

}  // namespace sparserow
