#include "util/dtype.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace sparserow {
namespace {

template <float (*kConvert)(std::uint16_t) noexcept>
void widen(const std::byte* from, float* to, std::size_t count) noexcept {
  for (std::size_t i = 0; i < count; ++i) {
    std::uint16_t bits;
    std::memcpy(&bits, from + 2 * i, sizeof bits);
    to[i] = kConvert(bits);
  }
}

template <std::uint16_t (*kConvert)(float) noexcept>
void narrow(const float* from, std::byte* to, std::size_t count) noexcept {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint16_t bits = kConvert(from[i]);
    std::memcpy(to + 2 * i, &bits, sizeof bits);
  }
}

constexpr float kMostInt8 = 127.0f;

void widen_int8(const std::byte* from, float* to, std::size_t count) noexcept {
  float scale;
  std::memcpy(&scale, from, sizeof scale);
  const auto* codes = reinterpret_cast<const std::int8_t*>(from + sizeof scale);
  for (std::size_t i = 0; i < count; ++i) to[i] = scale * static_cast<float>(codes[i]);
}

void narrow_int8(const float* from, std::byte* to, std::size_t count) noexcept {
  float largest = 0.0f;
  for (std::size_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(from[i]));
  const float scale = largest / kMostInt8;
  std::memcpy(to, &scale, sizeof scale);
  auto* codes = reinterpret_cast<std::int8_t*>(to + sizeof scale);
  for (std::size_t i = 0; i < count; ++i) {
    const float code = scale > 0.0f ? std::nearbyint(from[i] / scale) : 0.0f;
    codes[i] = static_cast<std::int8_t>(std::clamp(code, -kMostInt8, kMostInt8));
  }
}

}  // namespace

void convert_to_float(Dtype dtype, const std::byte* from, float* to, std::size_t count) noexcept {
  switch (dtype) {
    case Dtype::kFloat32:
      if (count > 0) std::memcpy(to, from, count * sizeof(float));  // null pointers are fine when empty
      return;
    case Dtype::kBFloat16:
      widen<bfloat16_to_float>(from, to, count);
      return;
    case Dtype::kFloat16:
      widen<float16_to_float>(from, to, count);
      return;
    case Dtype::kInt8:
      widen_int8(from, to, count);
      return;
  }
}

void convert_from_float(Dtype dtype, const float* from, std::byte* to, std::size_t count) noexcept {
  switch (dtype) {
    case Dtype::kFloat32:
      if (count > 0) std::memcpy(to, from, count * sizeof(float));  // null pointers are fine when empty
      return;
    case Dtype::kBFloat16:
      narrow<float_to_bfloat16>(from, to, count);
      return;
    case Dtype::kFloat16:
      narrow<float_to_float16>(from, to, count);
      return;
    case Dtype::kInt8:
      narrow_int8(from, to, count);
      return;
  }
}

}  // namespace sparserow
