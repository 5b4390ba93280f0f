#include "optim/kernels.h"

namespace sparserow {

namespace baseline {
extern const KernelTable kTable;
}
#if defined(__x86_64__)
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}
#endif

const KernelTable& kernels_of(Isa isa) noexcept {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return avx512::kTable;
    case Isa::kAvx2:
      return avx2::kTable;
#endif
    default:
      return baseline::kTable;
  }
}

}  // namespace sparserow
