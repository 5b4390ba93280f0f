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

// As all_finite(), for more floats than a row has: with the widest instructions that this CPU has.
[[nodiscard]] bool all_finite_of_many(const float* values, std::size_t n) noexcept;

// True when every float is finite.
[[nodiscard]] inline bool all_finite(const float* values, std::size_t n) noexcept {
  constexpr std::size_t kRow = 128;
  if (n > kRow) return all_finite_of_many(values, n);
  std::uint32_t bad = 0;
  for (std::size_t i = 0; i < n; ++i) bad |= nonfinite_mask(values[i]);
  return bad == 0;
}

}  // namespace sparserow
