// Element types of rows, at rest and on the wire, with scalar conversions.
//
// State and gradient sums are always float32; a Dtype describes weights only. Conversions here are
// round-to-nearest-even; stochastic rounding of stored weights lives in optim/.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace sparserow {

// Values are part of the wire and disk contract.
enum class Dtype : std::uint8_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

[[nodiscard]] constexpr bool is_valid(Dtype dtype) noexcept { return static_cast<std::uint8_t>(dtype) <= 2; }
[[nodiscard]] constexpr std::size_t size_of(Dtype dtype) noexcept { return dtype == Dtype::kFloat32 ? 4 : 2; }

[[nodiscard]] inline float bfloat16_to_float(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

[[nodiscard]] inline std::uint16_t float_to_bfloat16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);  // quiet NaN
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

[[nodiscard]] inline float float16_to_float(std::uint16_t bits) noexcept {
  return static_cast<float>(std::bit_cast<_Float16>(bits));
}

[[nodiscard]] inline std::uint16_t float_to_float16(float value) noexcept {
  return std::bit_cast<std::uint16_t>(static_cast<_Float16>(value));
}

// Converts `count` elements; `from` and `to` do not overlap, neither needs alignment.
void convert_to_float(Dtype dtype, const std::byte* from, float* to, std::size_t count) noexcept;
void convert_from_float(Dtype dtype, const float* from, std::byte* to, std::size_t count) noexcept;

}  // namespace sparserow
