// The body of uniform_fill.h. Include it with SPARSEROW_ISA defined; no include guard, but one inclusion per source.
#include "store/table/uniform_fill.h"
#include "util/random.h"

namespace sparserow::SPARSEROW_ISA {

void fill_uniform(std::uint64_t stream, float low, float width, float high, float* row, std::uint32_t dim) noexcept {
  for (std::uint32_t i = 0; i < dim; ++i) {
    const auto unit = static_cast<float>(static_cast<std::int32_t>(random_bits(stream, i) >> 40)) * 0x1p-24f;
    const float value = low + width * unit;
    row[i] = value < high ? value : low;  // rounding may reach the bound, which is excluded
  }
}

extern const UniformFill kUniformFill;
const UniformFill kUniformFill = fill_uniform;

}  // namespace sparserow::SPARSEROW_ISA
