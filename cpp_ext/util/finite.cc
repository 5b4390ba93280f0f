#include "util/finite.h"

#include <algorithm>

#include "util/cpu.h"

namespace sparserow {
namespace {

using Check = bool (*)(const float*, std::size_t) noexcept;

// Without its sign, a float that is not finite is at least infinity as a whole number.
[[gnu::always_inline]] inline bool check(const float* values, std::size_t n) noexcept {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < n; ++i)
    largest = std::max(largest, std::bit_cast<std::uint32_t>(values[i]) & 0x7fffffffu);
  return largest < 0x7f800000u;
}

bool check_baseline(const float* values, std::size_t n) noexcept { return check(values, n); }

#if defined(__x86_64__)
[[gnu::target("avx2")]] bool check_avx2(const float* values, std::size_t n) noexcept { return check(values, n); }

Check best_check() noexcept { return is_supported(Isa::kAvx2) ? check_avx2 : check_baseline; }
#else
Check best_check() noexcept { return check_baseline; }
#endif

}  // namespace

bool all_finite_of_many(const float* values, std::size_t n) noexcept {
  static const Check kCheck = best_check();
  return kCheck(values, n);
}

}  // namespace sparserow
