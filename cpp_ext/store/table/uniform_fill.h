// Uniform initial rows, compiled once per instruction set and chosen at run time; every set gives the same bits.
#pragma once

#include <cstdint>

#include "util/cpu.h"

namespace sparserow {

// row[i] = low + width * (24 random bits of column i of the stream, in [0, 1)), or low where rounding reaches `high`.
using UniformFill = void (*)(std::uint64_t stream, float low, float width, float high, float* row,
                             std::uint32_t dim) noexcept;

// Falls back to the baseline for a set that this build does not have. Use best_isa() for a set that runs here.
[[nodiscard]] UniformFill uniform_fill_of(Isa isa) noexcept;

}  // namespace sparserow
