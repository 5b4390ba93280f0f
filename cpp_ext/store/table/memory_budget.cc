#include "store/table/memory_budget.h"

#include <algorithm>
#include <sstream>

namespace sparserow {
namespace {

constexpr double kMiB = 1u << 20;
constexpr std::uint64_t kFreeShare = 8;  // of the limit, that the reserve leaves

Status over_budget(const std::string& table, std::uint64_t budget, std::uint64_t used, std::uint64_t needed) {
  std::ostringstream text;
  text.precision(1);
  text << std::fixed << "table " << table << ": memory budget of " << static_cast<double>(budget) / kMiB
       << " MiB reached (" << static_cast<double>(used) / kMiB << " MiB used or promised, "
       << static_cast<double>(needed) / kMiB
       << " MiB needed); nothing was applied; raise memory_budget_bytes, add shards, or drop tables";
  return {Code::kResourceExhausted, text.str()};
}

}  // namespace

Status MemoryBudget::promise(const std::string& table, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t before = taken();
  if (bytes > 0 && before + bytes > limit_) return over_budget(table, limit_, before, bytes);
  promised_.fetch_add(bytes, std::memory_order_relaxed);
  return Status::ok();
}

Status MemoryBudget::exceeded_by(const std::string& table, std::uint64_t bytes) const {
  return over_budget(table, limit_, taken(), bytes);
}

bool MemoryBudget::try_reserve(std::uint64_t bytes, std::uint64_t most) noexcept {
  const std::lock_guard lock(mutex_);
  if (reserved() + bytes > most) return false;
  if (limit_ > 0 && taken() + reserved() + bytes > limit_ - limit_ / kFreeShare) return false;
  reserved_.fetch_add(bytes, std::memory_order_relaxed);
  return true;
}

std::uint64_t MemoryBudget::excess_of_reserve() const noexcept {
  const std::uint64_t all = taken() + reserved();
  return limit_ == 0 || all <= limit_ ? 0 : std::min(all - limit_, reserved());
}

}  // namespace sparserow
