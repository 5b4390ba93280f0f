// Initial rows: a pure function of (seed, table id, key, column), the same bits on every machine.
//
// Uniform values have 24 random bits. Normal values come from the Box-Muller transform (Box & Muller 1958)
// in double precision with our own log, sine and cosine, as libm's differ between machines in the last bit.
#pragma once

#include <cstdint>

#include "schema/schema.h"
#include "store/table/uniform_fill.h"

namespace sparserow {

class InitialRows {
 public:
  explicit InitialRows(const TableSchema& schema, Isa isa = best_isa()) noexcept;

  // Writes the row as float32, before it is rounded to the stored dtype.
  void fill(std::uint64_t key, float* row) const noexcept;  // (dim)

 private:
  enum class Shape : std::uint8_t { kConstant, kUniform, kNormal };

  void fill_normal(std::uint64_t stream, float* row) const noexcept;

  UniformFill fill_uniform_;
  Shape shape_;
  std::uint32_t dim_;
  std::uint64_t seed_;  // of (table seed, table id)
  float a_;             // value, lower bound or mean
  float b_;             // upper bound or standard deviation
};

}  // namespace sparserow
