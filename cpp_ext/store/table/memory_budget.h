// The memory that a store may take: what its pools have, what was promised to batches that are not applied yet, and
// what the pools' reserve has (arena_reserve.h), which goes first.
//
// A limit of 0 is none. Thread-safe; the mutex makes check and promise one step; under it that of the shares is taken,
// which is a leaf.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "store/table/memory_shares.h"
#include "store/table/table.h"
#include "util/mutex.h"
#include "util/status.h"

namespace sparserow {

class MemoryBudget {
 public:
  MemoryBudget(std::uint64_t limit_bytes, const StorePools& pools)
      : limit_(limit_bytes), pools_(pools), shares_(limit_bytes) {}

  // kResourceExhausted names the table, the limit, and what is needed. by_share: also where the rest of the budget is
  // kept for other namespaces (memory_shares.h).
  Status promise(const std::string& table, NamespaceMemory& memory, std::uint64_t bytes, bool by_share);
  // Takes a promise back, when its rows are in the pools or will not come.
  void give_back(std::uint64_t bytes, NamespaceMemory& memory) noexcept {
    promised_.fetch_sub(bytes, std::memory_order_relaxed);
    memory.promised.fetch_sub(bytes, std::memory_order_relaxed);
  }
  [[nodiscard]] Status exceeded_by(const std::string& table, std::uint64_t bytes) const;

  // Without the reserve.
  [[nodiscard]] std::uint64_t taken() const noexcept {
    return pools_.used_bytes() + promised_.load(std::memory_order_relaxed);
  }

  // Charges memory of the reserve, unless it would be more than `most`, or an eighth of the limit would not stay free
  // of all that is taken.
  [[nodiscard]] bool try_reserve(std::uint64_t bytes, std::uint64_t most) noexcept;
  void unreserve(std::uint64_t bytes) noexcept { reserved_.fetch_sub(bytes, std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t reserved() const noexcept { return reserved_.load(std::memory_order_relaxed); }
  // What the reserve has beyond the limit since more was promised.
  [[nodiscard]] std::uint64_t excess_of_reserve() const noexcept;

  [[nodiscard]] std::uint64_t limit() const noexcept { return limit_; }
  [[nodiscard]] MemoryShares& shares() noexcept { return shares_; }

 private:
  const std::uint64_t limit_;
  const StorePools& pools_;
  MemoryShares shares_;
  std::atomic<std::uint64_t> promised_{0};
  std::atomic<std::uint64_t> reserved_{0};
  Mutex mutex_;
};

}  // namespace sparserow
