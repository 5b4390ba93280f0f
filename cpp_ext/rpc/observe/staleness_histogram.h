// How stale the pulls of each table were: for a pull of step t, t-1 minus the step up to which every worker's
// commits were applied when its rows were read.
//
// Thread-safe.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>

#include "util/gone_entries.h"
#include "util/mutex.h"

namespace sparserow::rpc {

class StalenessHistogram {
 public:
  // Upper bounds of the buckets, inclusive; one more bucket holds all above.
  static constexpr std::array<std::uint64_t, 15> kBounds = {0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512, 1024};

  struct Counts {
    std::array<std::uint64_t, kBounds.size() + 1> pulls{};
    std::uint64_t sum = 0;  // of all pulls' steps
  };

  // `exists(table id)` says which tables are kept when there are many: those that were dropped are forgotten.
  template <class Exists>
  void add(std::uint32_t table_id, std::uint64_t steps, Exists&& exists) {
    const auto bucket = static_cast<std::size_t>(std::ranges::lower_bound(kBounds, steps) - kBounds.begin());
    const MutexLock lock(mutex_);
    gone_.forget(by_table_, [&](const auto& entry) { return !exists(entry.first); });
    Counts& counts = by_table_[table_id];
    ++counts.pulls[bucket];
    counts.sum += steps;
  }

  [[nodiscard]] std::map<std::uint32_t, Counts> by_table() const {
    const MutexLock lock(mutex_);
    return by_table_;
  }

 private:
  mutable Mutex mutex_;
  GoneEntries gone_ SR_GUARDED_BY(mutex_);  // tables that were dropped
  std::map<std::uint32_t, Counts> by_table_ SR_GUARDED_BY(mutex_);
};

}  // namespace sparserow::rpc
