// Counts writes per table and per worker, so that one number shows a worker whether another one wrote.
//
// Thread-safe; its mutex is a leaf. One entry a table that was written or asked about, and one for each worker that
// asked about it, until it is forgotten: tables that were dropped are when there are many.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <unordered_map>

#include "util/gone_entries.h"
#include "util/mutex.h"

namespace sparserow {

class WriteCounts {
 public:
  // The session of a worker. Writes without a step have no writer: a worker does not know of its key-level calls.
  struct Writer {
    std::uint32_t job_id = 0;
    std::uint32_t worker_id = 0;
    std::uint32_t epoch = 0;
    auto operator<=>(const Writer&) const = default;
  };

  WriteCounts();

  // Counts a write, after it is in the store and before it is acknowledged. writer: null for one without a step.
  // `exists(table id)` says which tables are kept when there are many: those that were dropped are forgotten. Numbers
  // that were given before differ from all later ones.
  template <class Exists>
  void add(std::uint32_t table_id, const Writer* writer, Exists&& exists) {
    const MutexLock lock(mutex_);
    gone_.forget(tables_, [&](const auto& entry) SR_REQUIRES(mutex_) {
      if (exists(entry.first)) return false;
      base_ += entry.second.all + 1;
      return true;
    });
    Table& table = tables_[table_id];
    ++table.all;
    if (writer == nullptr) return;
    const auto own = table.own.find(*writer);
    if (own != table.own.end()) ++own->second;
  }
  // Two calls that give equal numbers show that only `writer` wrote to these tables between them. The numbers of two
  // processes always differ. writer: null counts every write, and leaves no entry.
  [[nodiscard]] std::uint64_t by_others(std::span<const std::uint32_t> table_ids, const Writer* writer);
  void forget(const Writer& writer);
  [[nodiscard]] std::size_t tables() const {
    const MutexLock lock(mutex_);
    return tables_.size();
  }

 private:
  struct Table {
    std::uint64_t all = 0;
    std::map<Writer, std::uint64_t> own;  // since the writer first asked
  };

  mutable Mutex mutex_;
  std::uint64_t base_ SR_GUARDED_BY(mutex_);  // random, and what was forgotten
  GoneEntries gone_ SR_GUARDED_BY(mutex_);
  std::unordered_map<std::uint32_t, Table> tables_ SR_GUARDED_BY(mutex_);
};

}  // namespace sparserow
