// Jobs, clocks and exactly-once commits of one shard.
//
// A job is a set of live workers and one staleness. Every worker sends every shard one commit per step.
//   staleness 0    commits of a step are kept until every live worker's is there, reduced in rank order
//                  in float64, scaled by 1/N and applied once; a pull for step t waits for step t-1.
//   staleness k    commits are applied as they arrive; a pull for step t waits until every live worker's
//                  commit of step t-1-k is applied.
//   async          commits are applied as they arrive; pulls never wait.
// A commit is (job, worker, epoch, sequence): one whose sequence is not above the worker's last is
// answered again and changes nothing; another epoch is kFenced. Commits without a step (key-level
// pushes) are applied at once and have no clock.
//
// Thread-safe. Callbacks run on the thread that completed the condition, outside of the lock.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "rpc/frame.h"
#include "store/store.h"
#include "util/status.h"

namespace sparserow::rpc {

struct Member {
  std::uint32_t worker_id = 0;
  std::uint32_t epoch = 0;
  std::uint32_t rank = 0;  // order of reduction
};

struct JobSpec {
  std::uint32_t job_id = 0;
  std::string name;
  std::optional<std::uint32_t> staleness = 0;  // nullopt: async
  std::vector<Member> members;                 // live workers
};

// One table's gradients within a commit, owned (the body of a received frame) or borrowed.
struct GradBlock {
  std::uint32_t table_id = 0;
  float lr = 0.0f;
  std::span<const std::uint64_t> keys;  // (n) unique
  const float* grads = nullptr;         // (n, dim) float32
};

struct Commit {
  std::uint32_t job_id = 0;
  std::uint32_t worker_id = 0;
  std::uint32_t worker_epoch = 0;
  std::uint64_t sequence = 0;
  std::int64_t step = kNoStep;
  bool grad_sum = false;
  std::vector<GradBlock> blocks;
  std::shared_ptr<void> owner;  // keeps the bytes behind blocks alive
};

struct CommitResult {
  std::uint64_t applied_rows = 0;
  bool duplicate = false;
};

struct CommitLogStats {
  std::uint64_t commits_accepted = 0;
  std::uint64_t commits_duplicate = 0;
  std::uint64_t commits_refused = 0;
  std::uint64_t commits_fenced = 0;
  std::uint64_t rows_applied = 0;
  std::uint64_t pulls_parked = 0;
};

class CommitLog {
 public:
  // Runs `work(part)` for part in [0, parts) and returns when all are done; null runs them in turn.
  using ParallelFor = std::function<void(std::uint32_t parts, const std::function<void(std::uint32_t)>& work)>;
  CommitLog(Store& store, ParallelFor parallel_for = nullptr);
  ~CommitLog();

  // Creates or replaces a job's staleness and members. A member that left no longer holds the clock:
  // steps that only waited for it are reduced and applied, and its kept commits are dropped.
  Status set_job(const JobSpec& spec);
  Status drop_job(std::uint32_t job_id);

  Status prepare(Commit commit);                              // reserves; replaces an earlier try
  Result<CommitResult> commit(Commit commit, bool prepared);  // prepared: blocks come from prepare()
  Status abort(std::uint32_t job_id, std::uint32_t worker_id, std::uint32_t worker_epoch, std::uint64_t sequence);

  // Calls `ready(status)` at once or later: Ok when a pull of `step` may read, kDeadlineExceeded with
  // the worker ids it waited for, kFenced, kNotFound (job). Never calls under the lock.
  void when_readable(std::uint32_t job_id, std::uint32_t worker_id, std::uint32_t worker_epoch, std::int64_t step,
                     std::chrono::steady_clock::time_point deadline, std::function<void(Status)> ready);
  // Fails parked pulls whose deadline passed. The server calls it on a timer.
  void expire(std::chrono::steady_clock::time_point now);

  [[nodiscard]] CommitLogStats stats() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sparserow::rpc
