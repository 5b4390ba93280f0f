#include "rpc/wire/scaled_rows.h"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

using namespace sparserow;
using namespace sparserow::rpc;

namespace {

struct Crossed {
  std::vector<float> rows;
  std::vector<std::int8_t> exponents;
};

Crossed cross(Dtype dtype, const std::vector<float>& rows, std::size_t dim) {
  const std::size_t n = rows.size() / dim;
  Crossed made{std::vector<float>(rows.size()), std::vector<std::int8_t>(n)};
  std::vector<std::byte> scaled(rows.size() * 2);
  scale_rows(dtype, rows.data(), n, dim, made.exponents.data(), scaled.data());
  REQUIRE(are_exponents(made.exponents));
  unscale_rows(dtype, scaled.data(), made.exponents, dim, made.rows.data());
  return made;
}

double error_allowed(Dtype dtype, float value, float largest) {
  const double own = std::ldexp(std::fabs(static_cast<double>(value)), dtype == Dtype::kFloat16 ? -11 : -8);
  return std::max({own, std::ldexp(static_cast<double>(largest), -39), std::ldexp(1.0, -149)});
}

constexpr Dtype kDtypes[] = {Dtype::kFloat16, Dtype::kBFloat16};
constexpr float kMost = std::numeric_limits<float>::max();
constexpr float kLeast = std::numeric_limits<float>::denorm_min();

}  // namespace

TEST_CASE("a row of any magnitude crosses within half a unit of 16 bits, and is finite when it was") {
  std::mt19937_64 random(20261127);
  for (const Dtype dtype : kDtypes) {
    for (const std::size_t dim : {1ul, 3ul, 64ul, 300ul}) {
      for (int turn = 0; turn < 400; ++turn) {
        const int top = static_cast<int>(random() % 277) - 149;  // of the row's largest value
        std::vector<float> row(dim);
        float largest = 0.0f;
        for (float& value : row) {
          const int below = static_cast<int>(random() % 60);
          const double magnitude = std::ldexp(1.0 + static_cast<double>(random() % 8388608) / 8388608.0, top - below);
          value = static_cast<float>(random() % 2 == 0 ? magnitude : -magnitude);
          if (!std::isfinite(value)) value = kMost;
          largest = std::max(largest, std::fabs(value));
        }
        const Crossed crossed = cross(dtype, row, dim);
        for (std::size_t i = 0; i < dim; ++i) {
          INFO("top " << top << ", value " << row[i] << ", got " << crossed.rows[i]);
          REQUIRE(std::isfinite(crossed.rows[i]));
          REQUIRE(std::fabs(static_cast<double>(crossed.rows[i]) - static_cast<double>(row[i])) <=
                  error_allowed(dtype, row[i], largest));
        }
      }
    }
  }
}

TEST_CASE("the ends of float32 and zeros cross") {
  for (const Dtype dtype : kDtypes) {
    const std::vector<float> exact{kLeast, -kLeast, 0x1p-126f, -0x1p127f, 0.0f, 1.0f, 0x1p-40f, -65504.0f * 0x1p40f};
    const Crossed crossed = cross(dtype, exact, 1);
    for (std::size_t i = 0; i + 1 < exact.size(); ++i) CHECK(crossed.rows[i] == exact[i]);
    const Crossed large = cross(dtype, {kMost, -kMost, 1.0f}, 3);
    CHECK(large.exponents[0] == kLeastExponent);
    CHECK(std::isfinite(large.rows[0]));
    CHECK(large.rows[1] == -large.rows[0]);
    CHECK(large.rows[0] >= 0.99f * kMost);
    const Crossed none = cross(dtype, {0.0f, -0.0f}, 2);
    CHECK(none.rows[0] == 0.0f);
    CHECK(std::signbit(none.rows[1]));
  }
}

TEST_CASE("rows beside each other have exponents of their own") {
  const Crossed crossed = cross(Dtype::kFloat16, {3.0f * 0x1p-45f, 0x1p-45f, 3.0f, 1.0f, 3.0f * 0x1p45f, 0x1p45f}, 2);
  CHECK(crossed.rows == std::vector<float>{3.0f * 0x1p-45f, 0x1p-45f, 3.0f, 1.0f, 3.0f * 0x1p45f, 0x1p45f});
}

TEST_CASE("NaN and infinities stay, and the other values of their row are scaled by the finite ones") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinite = std::numeric_limits<float>::infinity();
  for (const Dtype dtype : kDtypes) {
    const Crossed crossed = cross(dtype, {nan, infinite, -infinite, 0x1p-50f, kMost, nan, infinite, 1.0f}, 4);
    CHECK(std::isnan(crossed.rows[0]));
    CHECK(crossed.rows[1] == infinite);
    CHECK(crossed.rows[2] == -infinite);
    CHECK(crossed.rows[3] == 0x1p-50f);
    CHECK(std::isfinite(crossed.rows[4]));
    CHECK(std::isnan(crossed.rows[5]));
    CHECK(crossed.rows[6] == infinite);
  }
}
