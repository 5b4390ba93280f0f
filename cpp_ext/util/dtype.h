// Element types of rows, at rest and on the wire, with scalar conversions.
//
// State and gradient sums are always float32; a Dtype describes weights only. Conversions here are
// round-to-nearest-even; stochastic rounding of stored weights lives in optim/.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace sparserow {

// Values are part of the wire and disk contract. kInt8 is for rows at rest that are read and never trained: a row is
// its scale (float32, a hundred-and-twenty-seventh of its largest magnitude) and a signed byte per column.
enum class Dtype : std::uint8_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3 };

// Whether rows may be trained or sent as this dtype.
[[nodiscard]] constexpr bool is_valid(Dtype dtype) noexcept { return static_cast<std::uint8_t>(dtype) <= 2; }
// Whether rows may be stored as this dtype.
[[nodiscard]] constexpr bool is_storable(Dtype dtype) noexcept { return is_valid(dtype) || dtype == Dtype::kInt8; }
// The bytes of an element; not for kInt8, whose rows have a scale beside their elements.
[[nodiscard]] constexpr std::size_t size_of(Dtype dtype) noexcept { return dtype == Dtype::kFloat32 ? 4 : 2; }
[[nodiscard]] constexpr std::size_t row_bytes(Dtype dtype, std::size_t dim) noexcept {
  return dtype == Dtype::kInt8 ? sizeof(float) + dim : dim * size_of(dtype);
}

[[nodiscard]] inline float bfloat16_to_float(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

[[nodiscard]] inline std::uint16_t float_to_bfloat16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);  // quiet NaN
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Integer arithmetic without branches, so that loops over it vectorise on any instruction set.
[[nodiscard]] inline float float16_to_float(std::uint16_t bits) noexcept {
  const std::uint32_t sign = (bits & 0x8000u) << 16;
  const std::uint32_t magnitude = bits & 0x7fffu;
  const std::uint32_t normal = (magnitude << 13) + (112u << 23);
  const auto tiny = std::bit_cast<std::uint32_t>(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
  const std::uint32_t special = (magnitude << 13) | 0x7f800000u;
  const std::uint32_t finite = magnitude < 0x400u ? tiny : normal;
  return std::bit_cast<float>(sign | (magnitude < 0x7c00u ? finite : special));
}

[[nodiscard]] inline std::uint16_t float_to_float16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t rounded = ((magnitude + 0xfffu + ((magnitude >> 13) & 1u)) >> 13) - (112u << 10);
  // Below 2^-14 the unit is 2^-24, the unit of floats in [1/2, 1): an addition rounds to it.
  const float small = std::bit_cast<float>(magnitude < 0x38800000u ? magnitude : 0u);
  const std::uint32_t tiny = std::bit_cast<std::uint32_t>(small + 0.5f) - 0x3f000000u;
  const std::uint32_t finite = magnitude < 0x38800000u ? tiny : (rounded < 0x7c00u ? rounded : 0x7c00u);
  const std::uint32_t half = magnitude > 0x7f800000u ? 0x7e00u : (magnitude < 0x47800000u ? finite : 0x7c00u);
  return static_cast<std::uint16_t>(half | ((bits >> 16) & 0x8000u));
}

// Converts `count` elements, of kInt8 one row; `from` and `to` do not overlap, neither needs alignment.
void convert_to_float(Dtype dtype, const std::byte* from, float* to, std::size_t count) noexcept;
void convert_from_float(Dtype dtype, const float* from, std::byte* to, std::size_t count) noexcept;

}  // namespace sparserow
