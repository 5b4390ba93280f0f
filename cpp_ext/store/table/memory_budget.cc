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

Status over_share(const std::string& table, const NamespaceMemory& memory, std::uint64_t budget, std::uint64_t kept,
                  std::uint64_t needed) {
  std::ostringstream text;
  text.precision(1);
  text << std::fixed << "table " << table << ": namespace " << memory.name << " has "
       << static_cast<double>(memory.taken()) / kMiB << " MiB of the memory budget of "
       << static_cast<double>(budget) / kMiB << " MiB (" << static_cast<double>(needed) / kMiB << " MiB needed), and "
       << static_cast<double>(kept) / kMiB
       << " MiB are kept for other namespaces; nothing was applied; raise memory_budget_bytes or memory_share in the "
          "section quotas of the shards' security file, add shards, or drop tables";
  return {Code::kResourceExhausted, text.str()};
}

}  // namespace

Status MemoryBudget::promise(const std::string& table, NamespaceMemory& memory, std::uint64_t bytes, bool by_share) {
  const MutexLock lock(mutex_);
  const std::uint64_t before = taken();
  if (bytes > 0 && before + bytes > limit_) return over_budget(table, limit_, before, bytes);
  if (by_share && bytes > 0 && before + bytes + shares_.most_parts() > limit_) {
    const std::uint64_t kept = shares_.bytes_for_others(memory, bytes);
    if (before + bytes + kept > limit_) return over_share(table, memory, limit_, kept, bytes);
  }
  promised_.fetch_add(bytes, std::memory_order_relaxed);
  memory.promised.fetch_add(bytes, std::memory_order_relaxed);
  return Status::ok();
}

Status MemoryBudget::exceeded_by(const std::string& table, std::uint64_t bytes) const {
  return over_budget(table, limit_, taken(), bytes);
}

bool MemoryBudget::try_reserve(std::uint64_t bytes, std::uint64_t most) noexcept {
  const MutexLock lock(mutex_);
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
