// Whether floats are finite, fast enough for every gradient and row that comes in.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace sparserow {

// 0 for a finite float: an exponent of all ones is NaN or Inf. Branch-free, so that loops over it vectorise.
inline std::uint32_t nonfinite_mask(float value) noexcept {
  return static_cast<std::uint32_t>((std::bit_cast<std::uint32_t>(value) & 0x7f800000u) == 0x7f800000u);
}

// True when every float is finite.
inline bool all_finite(const float* values, std::size_t n) noexcept {
  std::uint32_t bad = 0;
  for (std::size_t i = 0; i < n; ++i) bad |= nonfinite_mask(values[i]);
  return bad == 0;
}

}  // namespace sparserow
