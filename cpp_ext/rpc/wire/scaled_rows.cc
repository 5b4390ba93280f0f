#include "rpc/wire/scaled_rows.h"

#include <algorithm>
#include <array>
#include <bit>

namespace sparserow::rpc {
namespace {

constexpr int kTarget = 14;  // the largest value of a scaled row is in [2^14, 2^15): float16 ends at 65,504
constexpr std::uint32_t kInfinite = 0x7f800000u;
constexpr std::size_t kAtOnce = 256;  // floats between two conversions

float power_of_two(int exponent) noexcept {  // in [-126, 127]
  return std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 127) << 23);
}

// The bits of the largest finite magnitude of a row.
std::uint32_t largest_of(const float* row, std::size_t dim) noexcept {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < dim; ++i) {
    const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(row[i]) & 0x7fffffffu;
    largest = std::max(largest, magnitude < kInfinite ? magnitude : 0u);
  }
  return largest;
}

int exponent_for(std::uint32_t largest) noexcept {
  if (largest == 0) return 0;
  return std::min(kTarget - (static_cast<int>(largest >> 23) - 127), kMostExponent);
}

// A finite value whose rounding would be beyond float32 once it is scaled back becomes the largest one that is not.
float held_back(float value, Dtype dtype) noexcept {
  const std::uint32_t most = dtype == Dtype::kFloat16 ? 0x7f7fe000u : 0x7f7f0000u;
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude <= most || magnitude >= kInfinite) return value;
  return std::bit_cast<float>((bits & 0x80000000u) | most);
}

}  // namespace

bool are_exponents(std::span<const std::int8_t> exponents) noexcept {
  return std::all_of(exponents.begin(), exponents.end(),
                     [](int each) { return each >= kLeastExponent && each <= kMostExponent; });
}

void scale_rows(Dtype dtype, const float* rows, std::size_t n, std::size_t dim, std::int8_t* exponents,
                std::byte* scaled) noexcept {
  std::array<float, kAtOnce> values;
  for (std::size_t i = 0; i < n; ++i, rows += dim) {
    const int exponent = exponent_for(largest_of(rows, dim));
    const float factor = power_of_two(exponent);
    exponents[i] = static_cast<std::int8_t>(exponent);
    for (std::size_t begin = 0; begin < dim; begin += kAtOnce) {
      const std::size_t count = std::min(kAtOnce, dim - begin);
      if (exponent == kLeastExponent) {
        for (std::size_t c = 0; c < count; ++c) values[c] = held_back(rows[begin + c], dtype) * factor;
      } else {
        for (std::size_t c = 0; c < count; ++c) values[c] = rows[begin + c] * factor;
      }
      convert_from_float(dtype, values.data(), scaled, count);
      scaled += count * size_of(dtype);
    }
  }
}

void unscale_rows(Dtype dtype, const std::byte* scaled, std::span<const std::int8_t> exponents, std::size_t dim,
                  float* rows) noexcept {
  convert_to_float(dtype, scaled, rows, exponents.size() * dim);
  for (const std::int8_t exponent : exponents) {
    const float factor = power_of_two(-exponent);
    for (std::size_t c = 0; c < dim; ++c) rows[c] *= factor;
    rows += dim;
  }
}

}  // namespace sparserow::rpc
