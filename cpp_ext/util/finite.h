// Whether floats are finite, fast enough for every gradient and row that comes in.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace sparserow {

// True when every float is finite: an exponent of all ones is NaN or Inf. Branch-free, so it vectorises.
inline bool all_finite(const float* values, std::size_t n) noexcept {
  std::uint32_t bad = 0;
  for (std::size_t i = 0; i < n; ++i) {
    bad |= static_cast<std::uint32_t>((std::bit_cast<std::uint32_t>(values[i]) & 0x7f800000u) == 0x7f800000u);
  }
  return bad == 0;
}

}  // namespace sparserow
