// The seam between a worker's session and the shards that have its rows.
//
// rpc::Client (the data plane, rpc/client/client.h) and LocalShards (stores of this process) read and write; both
// obey the same contract tests. rpc::LookupShards and CachedLookups read the rows of a served model.
//
// Keys in every request are unique per table and grouped by shard: shard s owns
// keys[shard_begin[s] .. shard_begin[s+1]). Partitioner (util/partition.h) makes such groups.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "schema/schema.h"
#include "store/store.h"
#include "util/status.h"

namespace sparserow {

// Memory for rows that are pulled or pushed. A shard of this host may write and read there itself, so a call that
// failed may be followed by a late one: then nobody writes there, or relies on what is there, again.
class RowMemory {
 public:
  // owner: of `floats`.
  RowMemory(std::shared_ptr<void> owner, std::span<float> floats) : owner_(std::move(owner)), floats_(floats) {}
  [[nodiscard]] static std::shared_ptr<RowMemory> on_heap(std::size_t floats) {
    auto made = std::make_shared_for_overwrite<float[]>(floats);
    const std::span<float> all(made.get(), floats);
    return std::make_shared<RowMemory>(std::move(made), all);
  }
  [[nodiscard]] float* data() const noexcept { return floats_.data(); }
  [[nodiscard]] std::size_t size() const noexcept { return floats_.size(); }
  void abandon() noexcept { is_abandoned_ = true; }
  [[nodiscard]] bool is_abandoned() const noexcept { return is_abandoned_; }

 private:
  const std::shared_ptr<void> owner_;
  const std::span<float> floats_;
  std::atomic<bool> is_abandoned_{false};
};

struct TablePull {
  std::uint32_t table_id = 0;
  std::uint32_t schema_version = 1;
  std::uint32_t dim = 0;
  std::span<const std::uint64_t> keys;         // (n) unique, grouped by shard
  std::span<const std::uint32_t> shard_begin;  // (shards + 1)
  std::span<float> rows = {};                  // (n, dim) float32, written in the order of keys
  std::span<std::uint64_t> versions = {};      // (n) or empty
  std::span<std::uint8_t> found = {};          // (n) or empty

  // A conditional pull: `rows` has the rows of these versions already (kNoVersion where it does not). Only rows whose
  // version differs now are written, with their versions and found. `known` may be the same memory as `versions`,
  // which must not be empty then. kFailedPrecondition from servers that cannot compare versions.
  std::span<const std::uint64_t> known = {};  // (n) or empty
  std::span<std::uint8_t> changed = {};       // (n) or empty; a conditional pull sets 1 where it wrote, else 0

  std::string_view name = {};  // of the table, for messages; empty: they have its id

  std::shared_ptr<RowMemory> memory = {};  // that `rows` lie in, as make_rows() gave it; null: in other memory
};

// kInvalidArgument when an output of `pull` is neither empty nor as long as its keys, or rows are not (n, dim).
[[nodiscard]] Status check_outputs(const TablePull& pull);

struct TablePush {
  std::uint32_t table_id = 0;
  std::uint32_t schema_version = 1;
  std::uint32_t dim = 0;
  float lr = 0.0f;
  std::span<const std::uint64_t> keys;         // (n) unique, grouped by shard
  std::span<const std::uint32_t> shard_begin;  // (shards + 1)
  std::span<const float> grads = {};           // (n, dim) float32 in the order of keys

  std::shared_ptr<RowMemory> memory = {};  // that `grads` lie in, as make_rows() gave it; null: in other memory
};

struct CallOptions {
  std::chrono::milliseconds deadline{30'000};
  std::int64_t step = kNoStep;  // the job's clock; kNoStep for eval, admin and key-level calls

  // `sequence` numbers assign() and erase() within this worker, in the same series as its commits. The shard applies
  // each number once and refuses it after the worker's epoch has ended. 0 means: not a worker; then nothing protects
  // against a late duplicate.
  std::uint64_t sequence = 0;

  // (shards) or null; a pull sets one number per shard. Two pulls of the same tables that give equal numbers show that
  // only this worker's steps wrote to the tables between them. kFailedPrecondition from servers without such numbers.
  std::uint64_t* writes_of_others = nullptr;
};

struct CommitOptions {
  std::chrono::milliseconds deadline{30'000};
  std::uint64_t sequence = 0;  // > every earlier one of this worker
  std::int64_t step = kNoStep;
  bool grad_sum = false;  // true: no 1/N scaling

  // Null, or set when a commit of one phase fails: whether a shard may have applied it all the same. False means that
  // no shard ever took a copy of it.
  bool* may_be_applied = nullptr;

  // Null, or set by kOutsideQuorum: the lowest step that still takes members, as far as the shards have said. The step
  // of the commit has its members, and this worker is none of them; nothing of the commit is applied.
  std::int64_t* open_step = nullptr;
};

class RowWriter;

// Rows that can be read.
class RowReader {
 public:
  virtual ~RowReader() = default;
  [[nodiscard]] virtual std::uint32_t shard_count() const noexcept = 0;
  // Owner of a slot: (slot_count) shard indexes. Valid as long as this object.
  [[nodiscard]] virtual std::span<const std::uint16_t> slot_owner() const noexcept = 0;
  // The same rows, to be written; null: they are read only. Valid as long as this object.
  [[nodiscard]] virtual RowWriter* writer() noexcept { return nullptr; }

  // Memory for so many floats, from where pulls are quickest.
  [[nodiscard]] virtual std::shared_ptr<RowMemory> make_rows(std::size_t floats) { return RowMemory::on_heap(floats); }
  // One frame per shard for all tables. On failure the content of rows is unspecified.
  virtual Status pull(std::span<const TablePull> tables, const CallOptions& options) = 0;
  // Sends the shards the keys that will be pulled; only the table, keys and shard_begin of each pull count. Returns how
  // many of the keys are being fetched to memory. A hint may come to nothing: an error is 0.
  virtual std::uint64_t hint(std::span<const TablePull> /*tables*/, std::chrono::milliseconds /*deadline*/) {
    return 0;
  }
  // One page of one shard's rows; see Store::scan. kFailedPrecondition where rows are only looked up.
  virtual Result<ScanPage> scan(std::uint32_t /*shard*/, std::uint32_t /*table_id*/, std::uint64_t /*cursor*/,
                                std::uint32_t /*max_rows*/, bool /*with_state*/, const CallOptions& /*options*/) {
    return Status(Code::kFailedPrecondition, "rows of a served model are looked up by key; they cannot be scanned");
  }

  // While a shard is being restored calls wait longer than their deadlines: until this time.
  [[nodiscard]] virtual std::chrono::steady_clock::time_point grace() const { return {}; }
};

// Rows that can be changed.
class RowWriter {
 public:
  virtual ~RowWriter() = default;

  // Two phases. prepare: every shard keeps the gradients and has reserved memory, nothing is applied.
  // commit: applies them, exactly once however often it is retried. abort: forgets them.
  virtual Status prepare(std::span<const TablePush> tables, const CommitOptions& options) = 0;
  virtual Status commit_prepared(const CommitOptions& options) = 0;
  virtual Status abort(const CommitOptions& options) = 0;
  // One phase: prepare and commit in one frame. Atomic on one shard; on several, each shard by itself.
  virtual Status commit(std::span<const TablePush> tables, const CommitOptions& options) = 0;
  // TablePush.grads holds rows; lr is ignored.
  virtual Status assign(std::span<const TablePush> tables, const CallOptions& options) = 0;
  // keys are grouped by shard as in TablePush. Returns how many rows existed.
  virtual Result<std::uint64_t> erase(std::uint32_t table_id, std::span<const std::uint64_t> keys,
                                      std::span<const std::uint32_t> shard_begin, const CallOptions& options) = 0;
  // The commits so far are over: none is sent again.
  virtual void forget_buffered() {}
};

// Shards that a job trains on.
class Shards : public RowReader, public RowWriter {
 public:
  [[nodiscard]] RowWriter* writer() noexcept override { return this; }
};

}  // namespace sparserow
