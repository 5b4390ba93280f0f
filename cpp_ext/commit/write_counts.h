// How often each table of this shard was written, and by whom: so that a worker that knows what it wrote itself learns
// with one number whether anybody else wrote.
//
// Thread-safe; its mutex is a leaf. One entry a table that was written or asked about, and one for each worker that
// asked about it, until it is forgotten.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <unordered_map>

namespace sparserow::rpc {

class WriteCounts {
 public:
  // The session of a worker. What has no step is nobody's: a worker does not know of its key-level calls.
  struct Writer {
    std::uint32_t job_id = 0;
    std::uint32_t worker_id = 0;
    std::uint32_t epoch = 0;
    auto operator<=>(const Writer&) const = default;
  };

  WriteCounts();

  // After the write is in the store, and before anybody is told. writer: null is nobody.
  void add(std::uint32_t table_id, const Writer* writer);
  // Equal numbers at two times: in between nobody else has written to any of these tables. Of another shard process,
  // or another one of this shard, they differ.
  // writer: null is nobody, of whom nothing is remembered.
  [[nodiscard]] std::uint64_t by_others(std::span<const std::uint32_t> table_ids, const Writer* writer);
  void forget(const Writer& writer);

 private:
  struct Table {
    std::uint64_t all = 0;
    std::map<Writer, std::uint64_t> own;  // since the writer first asked
  };

  const std::uint64_t base_;  // random
  std::mutex mutex_;
  std::unordered_map<std::uint32_t, Table> tables_;  // guarded by mutex_
};

}  // namespace sparserow::rpc
