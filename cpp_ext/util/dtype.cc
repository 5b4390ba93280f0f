#include "util/dtype.h"

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
  }
}

}  // namespace sparserow
