#include "store/table/index_probe.h"

namespace sparserow {

namespace baseline {
extern const IndexProbeTable kIndexProbes;
}
#if defined(__x86_64__)
namespace avx2 {
extern const IndexProbeTable kIndexProbes;
}
namespace avx512 {
extern const IndexProbeTable kIndexProbes;
}
#endif

const IndexProbeTable& index_probes_of(Isa isa) noexcept {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return avx512::kIndexProbes;
    case Isa::kAvx2:
      return avx2::kIndexProbes;
#endif
    default:
      return baseline::kIndexProbes;
  }
}

}  // namespace sparserow
