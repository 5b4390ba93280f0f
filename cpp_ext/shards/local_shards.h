// Shards over stores of this process: no frames, no clock, one worker. For tests of the session, for programs
// that train on one machine without a server, and as `bench train`'s reference without RPC.
//
// Thread-safe. Of writes it knows those that go through it or another worker's. Obeys the contract of shards/shards.h;
// deadlines are not needed, nothing waits.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "shards/shards.h"
#include "store/store.h"
#include "util/mutex.h"

namespace sparserow {

class LocalShards final : public Shards {
 public:
  // Slots are dealt to stores in equal ranges. InvalidArgument when there are none or their slot counts differ.
  static Result<std::shared_ptr<LocalShards>> create(std::vector<std::shared_ptr<Store>> stores);
  // The same stores for another worker, whose sequences are its own.
  [[nodiscard]] std::shared_ptr<LocalShards> for_another_worker() const;

  [[nodiscard]] std::uint32_t shard_count() const noexcept override;
  [[nodiscard]] std::span<const std::uint16_t> slot_owner() const noexcept override { return slot_owner_; }
  Status pull(std::span<const TablePull> tables, const CallOptions& options) override;
  Status prepare(std::span<const TablePush> tables, const CommitOptions& options) override;
  Status commit_prepared(const CommitOptions& options) override;
  Status abort(const CommitOptions& options) override;
  Status commit(std::span<const TablePush> tables, const CommitOptions& options) override;
  Status assign(std::span<const TablePush> tables, const CallOptions& options) override;
  Result<std::uint64_t> erase(std::uint32_t table_id, std::span<const std::uint64_t> keys,
                              std::span<const std::uint32_t> shard_begin, const CallOptions& options) override;
  Result<ScanPage> scan(std::uint32_t shard, std::uint32_t table_id, std::uint64_t cursor, std::uint32_t max_rows,
                        bool with_state, const CallOptions& options) override;

 private:
  // A prepared table, owned until commit or abort.
  struct PreparedPush {
    TablePush push;  // its spans point into the members below
    std::vector<std::uint64_t> keys;
    std::vector<std::uint32_t> shard_begin;
    std::vector<float> grads;
  };

  LocalShards(std::vector<std::shared_ptr<Store>> stores, std::shared_ptr<std::atomic<std::uint64_t>> writes);
  void count_write(std::int64_t step);
  Status check(std::uint32_t table_id, std::uint32_t dim, std::span<const std::uint64_t> keys,
               std::span<const std::uint32_t> shard_begin) const;
  Result<std::vector<Store::Reservation>> reserve(std::span<const TablePush> tables);
  Status apply(std::span<const TablePush> tables, const CommitOptions& commit) SR_REQUIRES(mutex_);
  void remember_write(std::uint64_t sequence, std::uint64_t rows) SR_REQUIRES(mutex_);
  bool is_duplicate(const CommitOptions& options) const SR_REQUIRES(mutex_) {
    return options.sequence <= forgotten_sequence_ || committed_.contains(options.sequence);
  }
  void remember_commit(std::uint64_t sequence) SR_REQUIRES(mutex_);

  std::vector<std::shared_ptr<Store>> stores_;
  std::vector<std::uint16_t> slot_owner_;

  std::shared_ptr<std::atomic<std::uint64_t>> writes_;  // of every worker over these stores
  std::atomic<std::uint64_t> own_steps_ = 0;            // of them: commits of this worker's steps
  Mutex mutex_;
  std::set<std::uint64_t> committed_ SR_GUARDED_BY(mutex_);     // the last commits' sequences, which come in any order
  std::uint64_t forgotten_sequence_ SR_GUARDED_BY(mutex_) = 0;  // up to here they are taken for committed
  // The last assign and erase calls that had a sequence: their rows.
  std::map<std::uint64_t, std::uint64_t> by_key_ SR_GUARDED_BY(mutex_);
  std::uint64_t prepared_sequence_ SR_GUARDED_BY(mutex_) = 0;  // 0: nothing is prepared
  std::vector<std::unique_ptr<PreparedPush>> prepared_ SR_GUARDED_BY(mutex_);
  std::vector<Store::Reservation> reservations_ SR_GUARDED_BY(mutex_);
  // A commit whose first tables were applied, and another one not, has left it: no later commit is applied.
  Status half_applied_ SR_GUARDED_BY(mutex_);
};

}  // namespace sparserow
