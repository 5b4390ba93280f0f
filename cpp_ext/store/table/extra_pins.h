// Pins of rows beyond those that fit beside a row (row_meta.h): of a row that more than 511 prepared commits write.
// They are taken back first, so that the pins beside the row hold it as long as any is left. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <unordered_map>

#include "util/mutex.h"

namespace sparserow {

class ExtraPins {
 public:
  // hash: of the row.
  void add(std::uint64_t hash) {
    const MutexLock lock(mutex_);
    ++pins_[hash];
    count_.fetch_add(1, std::memory_order_relaxed);
  }

  // False when the row has none.
  bool take(std::uint64_t hash) noexcept {
    if (count_.load(std::memory_order_relaxed) == 0) return false;
    const MutexLock lock(mutex_);
    const auto found = pins_.find(hash);
    if (found == pins_.end()) return false;
    if (--found->second == 0) pins_.erase(found);
    count_.fetch_sub(1, std::memory_order_relaxed);
    return true;
  }

 private:
  std::atomic<std::uint64_t> count_ = 0;
  Mutex mutex_;  // leaf
  std::unordered_map<std::uint64_t, std::uint64_t> pins_ SR_GUARDED_BY(mutex_);
};

}  // namespace sparserow
