// Conversions of stored and wire dtypes against the compiler's own half precision type.
#include "util/dtype.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace sparserow {
namespace {

#if defined(__aarch64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
using Half = __fp16;  // because g++ has _Float16 there from version 13 on
#else
using Half = _Float16;
#endif

std::uint16_t reference_half(float value) { return std::bit_cast<std::uint16_t>(static_cast<Half>(value)); }

TEST_CASE("every float16 widens exactly") {
  for (std::uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const auto half = std::bit_cast<Half>(static_cast<std::uint16_t>(bits));
    const float expected = static_cast<float>(half);
    const float got = float16_to_float(static_cast<std::uint16_t>(bits));
    if (std::isnan(expected)) {
      REQUIRE(std::isnan(got));
    } else {
      REQUIRE(std::bit_cast<std::uint32_t>(got) == std::bit_cast<std::uint32_t>(expected));
    }
  }
}

TEST_CASE("float32 narrows to the nearest float16, ties to even") {
  std::mt19937 random(7);
  std::uniform_int_distribution<std::uint32_t> any;
  for (int i = 0; i < 2'000'000; ++i) {
    // Half of the samples lie around the ranges where rounding is delicate.
    const std::uint32_t exponent = i % 2 == 0 ? any(random) % 256 : 100 + any(random) % 45;
    const auto value = std::bit_cast<float>((any(random) & 0x807fffffu) | exponent << 23);
    if (std::isnan(value)) {
      REQUIRE(std::isnan(float16_to_float(float_to_float16(value))));
    } else {
      REQUIRE(float_to_float16(value) == reference_half(value));
    }
  }
  for (std::uint32_t bits = 0; bits < 0x7bff; ++bits) {  // exact ties between neighbours
    const float low = float16_to_float(static_cast<std::uint16_t>(bits));
    const float high = float16_to_float(static_cast<std::uint16_t>(bits + 1));
    const float middle = low + (high - low) / 2;
    REQUIRE(float_to_float16(middle) == reference_half(middle));
    REQUIRE(float_to_float16(-middle) == reference_half(-middle));
  }
}

TEST_CASE("bfloat16 keeps infinities and NaN and rounds to even") {
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK(bfloat16_to_float(float_to_bfloat16(infinity)) == infinity);
  CHECK(std::isnan(bfloat16_to_float(float_to_bfloat16(std::numeric_limits<float>::quiet_NaN()))));
  CHECK(std::isnan(bfloat16_to_float(float_to_bfloat16(std::bit_cast<float>(0x7f800001u)))));
  CHECK(float_to_bfloat16(std::bit_cast<float>(0x3f808000u)) == 0x3f80);  // tie, even below
  CHECK(float_to_bfloat16(std::bit_cast<float>(0x3f818000u)) == 0x3f82);  // tie, even above
  CHECK(float_to_bfloat16(std::bit_cast<float>(0x3f808001u)) == 0x3f81);
}

TEST_CASE("array conversions equal the scalar ones and need no alignment") {
  std::mt19937 random(11);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16}) {
    for (const std::size_t count : {0, 1, 7, 64, 129}) {
      std::vector<float> values(count), back(count);
      for (float& value : values) value = normal(random);
      std::vector<std::byte> stored(count * size_of(dtype) + 1);
      convert_from_float(dtype, values.data(), stored.data() + 1, count);
      convert_to_float(dtype, stored.data() + 1, back.data(), count);
      for (std::size_t i = 0; i < count; ++i) {
        const float expected = dtype == Dtype::kFloat32    ? values[i]
                               : dtype == Dtype::kBFloat16 ? bfloat16_to_float(float_to_bfloat16(values[i]))
                                                           : float16_to_float(float_to_float16(values[i]));
        REQUIRE(back[i] == expected);
      }
    }
  }
}

}  // namespace
}  // namespace sparserow
