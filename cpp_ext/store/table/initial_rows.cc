#include "store/table/initial_rows.h"

#include <algorithm>
#include <cmath>

#include "util/random.h"

namespace sparserow {
namespace {

constexpr double kPi = 3.14159265358979323846;
constexpr double kLn2 = 0.69314718055994530942;

// Natural logarithm of x in (0, 1], to about 1e-15: x = m * 2^e with m in [0.707, 1.414), then
// log(m) = 2 artanh((m - 1) / (m + 1)) by its series.
double log_of(double x) noexcept {
  int exponent = 0;
  double mantissa = std::frexp(x, &exponent);
  if (mantissa < 0.70710678118654752) {
    mantissa *= 2;
    --exponent;
  }
  const double s = (mantissa - 1) / (mantissa + 1);
  const double square = s * s;
  double sum = 0;
  for (int term = 21; term >= 1; term -= 2) sum = sum * square + 1.0 / term;
  return 2 * s * sum + exponent * kLn2;
}

// Sine of x in [-pi/2, pi/2] by its Taylor series, to about 1e-15.
double sin_of(double x) noexcept {
  const double square = x * x;
  double sum = 0;
  for (int term = 21; term >= 1; term -= 2) sum = 1 - square / ((term + 1) * (term + 2)) * sum;
  return x * sum;
}

// Cosine of a full turn's part, turn in [0, 1).
double cos_turn(double turn) noexcept {
  const double from_half = std::abs(turn - 0.5);  // cos(2 pi turn) = sin(2 pi (from_half - 1/4)), [0, 1/2]
  return sin_of(2 * kPi * (from_half - 0.25));
}

double sin_turn(double turn) noexcept { return cos_turn(turn < 0.25 ? turn + 0.75 : turn - 0.25); }

}  // namespace

InitialRows::InitialRows(const TableSchema& schema, Isa isa) noexcept
    : fill_uniform_(uniform_fill_of(isa)),
      shape_(Shape::kConstant),
      dim_(schema.dim),
      seed_(random_bits(schema.seed, schema.id)),
      a_(schema.init.a),
      b_(schema.init.b) {
  const double fans = static_cast<double>(schema.init.b) + schema.dim;
  const auto gain = static_cast<double>(schema.init.a);
  switch (schema.init.kind) {
    case InitKind::kConstant:
      return;
    case InitKind::kUniform:
      shape_ = Shape::kUniform;
      return;
    case InitKind::kNormal:
      shape_ = Shape::kNormal;
      return;
    case InitKind::kXavierUniform:
      shape_ = Shape::kUniform;
      b_ = static_cast<float>(gain * std::sqrt(6.0 / fans));
      a_ = -b_;
      return;
    case InitKind::kXavierNormal:
      shape_ = Shape::kNormal;
      a_ = 0.0f;
      b_ = static_cast<float>(gain * std::sqrt(2.0 / fans));
      return;
  }
}

void InitialRows::fill(std::uint64_t key, float* row) const noexcept {
  const std::uint64_t stream = mix_bits(seed_ ^ mix_bits(key + 0x9e3779b97f4a7c15ull));
  switch (shape_) {
    case Shape::kConstant:
      std::fill_n(row, dim_, a_);
      return;
    case Shape::kUniform:
      fill_uniform_(stream, a_, b_ - a_, b_, row, dim_);
      return;
    case Shape::kNormal:
      fill_normal(stream, row);
      return;
  }
}

void InitialRows::fill_normal(std::uint64_t stream, float* row) const noexcept {
  for (std::uint32_t i = 0; i < dim_; i += 2) {
    const double unit = static_cast<double>((random_bits(stream, i) >> 11) + 1) * 0x1p-53;  // (0, 1]
    const double turn = static_cast<double>(random_bits(stream, i + 1) >> 11) * 0x1p-53;    // [0, 1)
    const double radius = std::sqrt(-2 * log_of(unit));
    row[i] = static_cast<float>(a_ + b_ * (radius * cos_turn(turn)));
    if (i + 1 < dim_) row[i + 1] = static_cast<float>(a_ + b_ * (radius * sin_turn(turn)));
  }
}

}  // namespace sparserow
