#include "store/table/memory_shares.h"

#include <algorithm>
#include <utility>

namespace sparserow {

std::shared_ptr<NamespaceMemory> MemoryShares::of_table(const std::string& full_name) {
  const std::string name = full_name.substr(0, full_name.find('/'));
  const MutexLock lock(mutex_);
  std::erase_if(namespaces_, [](const auto& entry) { return entry.second.expired(); });
  std::shared_ptr<NamespaceMemory> memory = namespaces_[name].lock();
  if (memory == nullptr) namespaces_[name] = memory = std::make_shared<NamespaceMemory>(name);
  recount();
  return memory;
}

void MemoryShares::set(std::map<std::string, double> shares) {
  const MutexLock lock(mutex_);
  shares_ = std::move(shares);
  recount();
}

// With mutex_. A namespace whose last table goes later leaves its part to the others at the next call.
void MemoryShares::recount() {
  std::uint64_t without_share = 0;
  for (const auto& [name, memory] : namespaces_) without_share += shares_.contains(name) ? 0 : 1;
  common_part_ = limit_ / kCommonShare / std::max<std::uint64_t>(without_share, 1);
  std::uint64_t parts = without_share * common_part_;
  for (const auto& [name, share] : shares_) parts += part_of(name);
  most_parts_.store(parts, std::memory_order_relaxed);
}

// With mutex_.
std::uint64_t MemoryShares::part_of(const std::string& name) const {
  const auto found = shares_.find(name);
  if (found == shares_.end()) return common_part_;
  return static_cast<std::uint64_t>(found->second * static_cast<double>(limit_));
}

std::uint64_t MemoryShares::bytes_for_others(const NamespaceMemory& one, std::uint64_t bytes) const {
  const MutexLock lock(mutex_);
  if (one.taken() + bytes <= part_of(one.name)) return 0;
  std::uint64_t kept = 0;
  const auto keep = [&](const std::string& name, std::uint64_t taken) SR_REQUIRES(mutex_) {
    const std::uint64_t part = name == one.name ? 0 : part_of(name);
    kept += part - std::min(part, taken);
  };
  for (const auto& [name, memory] : namespaces_) {
    const std::shared_ptr<NamespaceMemory> other = memory.lock();
    if (other != nullptr && !shares_.contains(name)) keep(name, other->taken());
  }
  for (const auto& [name, share] : shares_) {  // of a namespace without tables too
    const auto found = namespaces_.find(name);
    const std::shared_ptr<NamespaceMemory> other = found == namespaces_.end() ? nullptr : found->second.lock();
    keep(name, other == nullptr ? 0 : other->taken());
  }
  return kept;
}

bool MemoryShares::is_within_part(const NamespaceMemory& one) const {
  const MutexLock lock(mutex_);
  return one.taken() <= part_of(one.name);
}

}  // namespace sparserow
