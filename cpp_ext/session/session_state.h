// What the bindings of one session share: the seam, the clock, the trace of a step's lookups, the counters.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "session/lookup.h"
#include "session/sequence_numbers.h"
#include "session/session_cache.h"
#include "session/session_counters.h"
#include "shards/shards.h"
#include "util/mutex.h"
#include "util/partition.h"
#include "util/status.h"

namespace sparserow {

class Binding;

struct SessionOptions {
  std::int64_t first_step = 0;
  std::uint64_t first_sequence = 1;
  bool clocked = true;    // false: async, pulls never wait
  bool grad_sum = false;  // true: the shards do not scale gradients by 1/N
  std::chrono::milliseconds deadline{30'000};
  CacheOptions cache;
  // Rows that a step's lookups without gradient have read are dropped before the next such lookup when all tables
  // together have more bytes, or a table's are older; 0: of any age. They are then read again by the same clock.
  std::uint64_t no_grad_bytes = std::uint64_t{128} << 20;
  std::chrono::milliseconds no_grad_age{0};
};

// A lookup as it happened, for a plan to be learnt from.
struct TracedLookup {
  std::string binding;
  const void* data = nullptr;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  std::uint32_t item_bytes = 8;
};

// Lookups of a session from start_trace() on, as long as the object is held. Thread-safe.
class LookupTrace {
 public:
  void add(TracedLookup lookup) {
    const MutexLock lock(mutex_);
    lookups_.push_back(std::move(lookup));
  }
  [[nodiscard]] std::vector<TracedLookup> lookups() const {
    const MutexLock lock(mutex_);
    return lookups_;
  }

 private:
  mutable Mutex mutex_;
  std::vector<TracedLookup> lookups_ SR_GUARDED_BY(mutex_);
};

// One call for rows, timed by std::chrono::steady_clock (Python's time.perf_counter_ns).
struct PullSpan {
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  std::int64_t step = 0;     // that was asked for; the session's where the pull had no clock
  std::uint64_t thread = 0;  // the operating system's id
};

enum class Phase : std::uint8_t { kOpen, kSealed, kPrepared };

// Thread-safe. Atomics are written by the thread that owns the session's steps, or are plain counters.
class SessionState {
 public:
  SessionState(std::shared_ptr<RowReader> shards, const SessionOptions& options);

  // FailedPrecondition after close(), after fork, or when a commit's outcome is unknown.
  Status check_usable() const;
  void mark_broken(const Status& cause);
  void close() noexcept { closed_.store(true); }
  [[nodiscard]] bool closed() const noexcept { return closed_.load(); }

  [[nodiscard]] RowReader& shards() const noexcept { return *shards_; }
  // Where the session writes. A session that only reads gets kFailedPrecondition from every write.
  [[nodiscard]] RowWriter& writer() const noexcept { return *writer_; }
  [[nodiscard]] const SessionOptions& options() const noexcept { return options_; }
  [[nodiscard]] CallOptions pull_options(bool train) const noexcept;

  // The partitioner and its lock: one scratch for all tables stays in cache.
  struct LockedPartitioner {
    std::unique_lock<Mutex> lock;
    Partitioner& partitioner;
  };
  LockedPartitioner partitioner() { return {std::unique_lock(partitioner_mutex_), partitioner_}; }

  void trace(const std::string& binding, const TensorView& view);
  std::shared_ptr<LookupTrace> start_trace();

  // What a step's lookups need: from the cache where there is one, else from the shards. Counts pulls and rows.
  // before_asking: waits for the commit in flight before the shards are asked.
  Status pull_step(std::span<const TablePull> tables, const CallOptions& options, bool before_asking);
  // As pull_step() where there is no cache; waits for the commit in flight.
  Status pull_past_cache(std::span<const TablePull> tables, const CallOptions& options);
  [[nodiscard]] SessionCache* cache() const noexcept { return cache_.get(); }
  // After rows were changed by key.
  void forget_cached(std::uint32_t table_id, std::span<const std::uint64_t> keys) {
    if (cache_) cache_->changed(table_id, keys);
  }

  // Every pull of rows from the shards goes through here. From record_pulls() on each leaves a span.
  Status pull(std::span<const TablePull> tables, const CallOptions& options);
  void record_pulls() noexcept { recording_pulls_.store(true); }
  std::vector<PullSpan> take_pull_spans();  // those since the last call

  // A commit that is decided while its last phase is still to be sent. A call that sends a later one, or
  // reads rows that should show it, waits. kDeadlineExceeded when it is not finished in time, else check_usable().
  void begin_commit();
  void end_commit() noexcept;
  [[nodiscard]] bool is_committing() const noexcept { return committing_.load(); }
  Status wait_for_commit() const;

  std::atomic<std::int64_t> step;
  std::atomic<Phase> phase{Phase::kOpen};
  std::atomic<bool> merged_this_step{false};
  std::atomic<std::uint64_t> staged_calls{0};  // backward calls of this step

  // A lookup with gradient fails with this text until the step ends.
  void refuse_lookups(const std::string& text);
  void allow_lookups() noexcept { refuses_lookups_.store(false); }
  // FailedPrecondition after refuse_lookups().
  Status check_lookup() const;

  // Tables of the session, whose rows without gradient share no_grad_bytes.
  void add_binding(const std::shared_ptr<Binding>& binding);
  // Drops those of all tables when they have too many bytes. The caller holds no lock of a Binding.
  void bound_no_grad_rows();
  std::atomic<std::uint64_t> no_grad_bytes{0};

  SequenceNumbers numbers;  // of every write

  SessionCounters counters;

 private:
  Status pull_and_count(std::span<const TablePull> tables, const CallOptions& options);

  std::shared_ptr<RowReader> shards_;
  RowWriter* const writer_;
  SessionOptions options_;
  std::unique_ptr<SessionCache> cache_;  // null: none
  std::uint64_t fork_generation_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> broken_{false};
  std::atomic<bool> tracing_{false};
  std::atomic<bool> recording_pulls_{false};
  std::atomic<bool> committing_{false};  // written under commit_mutex_

  mutable Mutex cause_mutex_;
  std::string cause_ SR_GUARDED_BY(cause_mutex_);
  std::string refusal_ SR_GUARDED_BY(cause_mutex_);
  std::atomic<bool> refuses_lookups_{false};
  Mutex bindings_mutex_;
  std::vector<std::weak_ptr<Binding>> bindings_ SR_GUARDED_BY(bindings_mutex_);
  Mutex trace_mutex_;
  std::vector<std::weak_ptr<LookupTrace>> traces_ SR_GUARDED_BY(trace_mutex_);
  Mutex spans_mutex_;
  std::vector<PullSpan> pull_spans_ SR_GUARDED_BY(spans_mutex_);
  mutable Mutex commit_mutex_;
  mutable CondVar commit_ended_;
  Mutex partitioner_mutex_;
  Partitioner partitioner_;  // guarded by partitioner_mutex_: partitioner() alone gives it, with the lock
};

}  // namespace sparserow
