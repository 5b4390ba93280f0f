// What an optimizer kernel reads and writes. Included by files compiled for several instruction sets, so it
// includes nothing that could emit shared inline code.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sparserow {

// One row to update. Pointers are 4-byte aligned and do not alias each other.
struct RowUpdate {
  std::byte* weights;          // (dim) in the table's dtype, updated in place
  float* state;                // (state_floats) float32, updated in place
  const float* grad;           // (dim) float32, summed over the step
  std::uint64_t key;           // for the rounding seed
  std::uint32_t update_count;  // of this row, this update included (first update: 1)
};

}  // namespace sparserow
