#include "store/table/uniform_fill.h"

namespace sparserow {

namespace baseline {
extern const UniformFill kUniformFill;
}
#if defined(__x86_64__)
namespace avx2 {
extern const UniformFill kUniformFill;
}
namespace avx512 {
extern const UniformFill kUniformFill;
}
#endif

UniformFill uniform_fill_of(Isa isa) noexcept {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return avx512::kUniformFill;
    case Isa::kAvx2:
      return avx2::kUniformFill;
#endif
    default:
      return baseline::kUniformFill;
  }
}

}  // namespace sparserow
