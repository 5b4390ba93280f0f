// Rows of a table by key, outside of steps: what `session.table(...)` does.
//
// Keys may repeat and come in any order. A call without keys does nothing. A write leaves only when an earlier push of
// the session is in doubt no more. Thread-safe: writes of several threads, and the session's steps, each have a number
// of their own.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "session/session.h"

namespace sparserow {

struct TableRef {
  std::uint32_t id = 0;
  std::uint32_t schema_version = 1;
  std::uint32_t dim = 0;
  std::string name = {};  // for messages
};

class TableAccess {
 public:
  TableAccess(std::shared_ptr<Session> session, TableRef table)
      : session_(std::move(session)), table_(std::move(table)) {}

  [[nodiscard]] const TableRef& table() const noexcept { return table_; }

  // Rows as they are now, without clock: (n, dim) float32 in the order of keys.
  Status pull(std::span<const std::uint64_t> keys, float* rows);
  // Applies gradients (n, dim) at once; those of a repeated key are summed first.
  PushOutcome push(std::span<const std::uint64_t> keys, const float* grads, float lr);
  // Sets weights (n, dim); of a repeated key the last counts.
  Status assign(std::span<const std::uint64_t> keys, const float* rows);
  // Returns how many rows existed.
  Result<std::uint64_t> erase(std::span<const std::uint64_t> keys);
  // One page of one shard; cursor 0 begins, next_cursor 0 ends.
  Result<ScanPage> scan(std::uint32_t shard, std::uint64_t cursor, std::uint32_t max_rows);

 private:
  Partition partition(std::span<const std::uint64_t> keys);
  TablePush push_of(const Partition& partition, const std::vector<float>& values, float lr) const;
  SessionState& state() const noexcept { return session_->state(); }

  std::shared_ptr<Session> session_;
  TableRef table_;
};

}  // namespace sparserow
