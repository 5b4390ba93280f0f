// The seam between a worker's session and the shards that hold its rows.
//
// Two implementations: rpc::Client (the data plane, rpc/client/client.h) and rpc::LocalShards (an in-process
// store: the C++ tests, and `bench train`'s in-process reference). Both obey the same contract tests.
//
// Keys in every request are unique per table and grouped by shard: shard s owns
// keys[shard_begin[s] .. shard_begin[s+1]). Partitioner (util/partition.h) makes such groups.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include "schema/schema.h"
#include "store/store.h"
#include "util/status.h"

namespace sparserow::rpc {

struct TablePull {
  std::uint32_t table_id = 0;
  std::uint32_t schema_version = 1;
  std::uint32_t dim = 0;
  std::span<const std::uint64_t> keys;         // (n) unique, grouped by shard
  std::span<const std::uint32_t> shard_begin;  // (shards + 1)
  float* rows = nullptr;                       // (n, dim) float32, written in the order of keys
  std::uint64_t* versions = nullptr;           // (n) or null
  std::uint8_t* found = nullptr;               // (n) or null

  // Conditional: rows holds the rows of these versions already (kNoVersion where it does not), and only rows
  // whose version differs now are written, with their versions and found; what is equal stays as it is. May
  // be the same memory as versions, which must not be null then. Servers that cannot: FailedPrecondition.
  const std::uint64_t* known = nullptr;  // (n) or null
  std::uint8_t* changed = nullptr;       // (n) or null; of a conditional pull: 1 where it wrote, else 0
};

struct TablePush {
  std::uint32_t table_id = 0;
  std::uint32_t schema_version = 1;
  std::uint32_t dim = 0;
  float lr = 0.0f;
  std::span<const std::uint64_t> keys;         // (n) unique, grouped by shard
  std::span<const std::uint32_t> shard_begin;  // (shards + 1)
  const float* grads = nullptr;                // (n, dim) float32 in the order of keys
};

struct CallOptions {
  std::chrono::milliseconds deadline{30'000};
  std::int64_t step = kNoStep;  // the job's clock; kNoStep for eval, admin and key-level calls

  // Of assign and erase. A worker's own, taken from the same numbers as its commits': done once however often it is
  // sent, and refused when its epoch is over. 0, for who is no worker: nobody's; a copy that comes late counts.
  std::uint64_t sequence = 0;

  // Of a pull: (shards) or null. Equal numbers of two pulls that name the same tables: from before the first one read
  // its rows until the second did, nobody wrote to them but this worker by its steps. Servers that cannot:
  // FailedPrecondition.
  std::uint64_t* writes_of_others = nullptr;
};

struct CommitOptions {
  std::chrono::milliseconds deadline{30'000};
  std::uint64_t sequence = 0;  // > every earlier one of this worker
  std::int64_t step = kNoStep;
  bool grad_sum = false;  // true: no 1/N scaling

  // Of a commit in one phase, or null. Set when it fails: whether a shard may have applied it all the same. False means
  // that no copy of it was ever taken.
  bool* may_be_applied = nullptr;
};

class Shards {
 public:
  virtual ~Shards() = default;
  [[nodiscard]] virtual std::uint32_t shard_count() const noexcept = 0;
  // Owner of a slot: (slot_count) shard indexes. Valid as long as this object.
  [[nodiscard]] virtual std::span<const std::uint16_t> slot_owner() const noexcept = 0;

  // One frame per shard for all tables. On failure the content of rows is unspecified.
  virtual Status pull(std::span<const TablePull> tables, const CallOptions& options) = 0;
  // Tells the shards which keys will be pulled; of each pull the table, keys and shard_begin alone count. Answers with
  // how many of them are being brought to memory, which is what a hint may come to nothing in: an error is 0.
  virtual std::uint64_t hint(std::span<const TablePull> /*tables*/, std::chrono::milliseconds /*deadline*/) {
    return 0;
  }
  // Two phases. prepare: every shard holds the gradients and has reserved memory, nothing is applied.
  // commit: applies them, exactly once however often it is retried. abort: forgets them.
  virtual Status prepare(std::span<const TablePush> tables, const CommitOptions& options) = 0;
  virtual Status commit_prepared(const CommitOptions& options) = 0;
  virtual Status abort(const CommitOptions& options) = 0;
  // One phase: prepare and commit in one frame. Atomic on one shard; on several, each shard by itself.
  virtual Status commit(std::span<const TablePush> tables, const CommitOptions& options) = 0;
  // TablePush.grads holds rows; lr is ignored.
  virtual Status assign(std::span<const TablePush> tables, const CallOptions& options) = 0;
  // keys grouped by shard as in TablePush; returns how many rows existed.
  virtual Result<std::uint64_t> erase(std::uint32_t table_id, std::span<const std::uint64_t> keys,
                                      std::span<const std::uint32_t> shard_begin, const CallOptions& options) = 0;
  // One page of one shard's rows; see Store::scan.
  virtual Result<ScanPage> scan(std::uint32_t shard, std::uint32_t table_id, std::uint64_t cursor,
                                std::uint32_t max_rows, bool with_state, const CallOptions& options) = 0;

  // While a shard is being restored calls wait longer than their deadlines: until this time.
  virtual void extend(std::chrono::milliseconds /*grace*/) {}
  [[nodiscard]] virtual std::chrono::steady_clock::time_point grace() const { return {}; }
  // Commits so far are over: none is sent again.
  virtual void forget_held() {}
};

}  // namespace sparserow::rpc
