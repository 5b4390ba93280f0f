#include "util/cpu.h"

namespace sparserow {

bool is_supported(Isa isa) noexcept {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::kBaseline:
      return true;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    case Isa::kAvx512:
      return is_supported(Isa::kAvx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  return false;
#else
  return isa == Isa::kBaseline;
#endif
}

Isa best_isa() noexcept {
  static const Isa best = is_supported(Isa::kAvx512) ? Isa::kAvx512
                          : is_supported(Isa::kAvx2) ? Isa::kAvx2
                                                     : Isa::kBaseline;
  return best;
}

}  // namespace sparserow
