// Jobs, clocks and exactly-once commits of one shard.
//
// A job is a set of live workers and one staleness. Every worker sends every shard one commit per step.
//   staleness 0    commits of a step are kept until every live worker's is there, reduced in rank order
//                  in float64 (commit/reduce.h), scaled by 1/N and applied once; a pull for step t waits for
//                  step t-1. With a quorum q a step takes the first q commits instead (docs/internals/consistency.md,
//                  rules 20 to 24); the others are kOutsideQuorum.
//   staleness k    commits are applied as they arrive; a pull for step t waits until every live worker's
//                  commit of step t-1-k is applied.
//   async          commits are applied as they arrive; pulls never wait.
// N is the number of workers that count for the commit's step; grad_sum turns the scaling off.
//
// Composed of commit/job_window.h (seen?), commit/job_clock.h (may it read? whose turn?) and commit/apply_commits.h.
//
// Exactly once: a commit is (job, worker, epoch, sequence). Each worker's last kWindow sequences are
// remembered with their answers, in any order of arrival: one that is there is answered again and changes
// nothing; one below the window is refused, because its answer is forgotten. A refused commit leaves no
// trace, so the same sequence may come again. ASSIGN and DELETE stand in the same window (write_once). An
// earlier epoch, a worker that left, or a job that is over, which is named, is kFenced. What such a worker
// repeats is answered as before: its window stays with the job, and then for ten minutes (commit/retired_windows.h).
// While RESOLVE may still apply what it prepared, its COMMIT is kUnavailable. So kFenced means that the
// commit is not applied here and will not be, as far as the windows reach. Commits without a step (key-level pushes)
// are applied at once, in every mode, and have no clock.
//
// Where a worker's clock starts: at its first_step, or at the first step not yet complete when it became a
// member; and never before the first step that it names itself (its first pull, or its first commit, from when it is
// prepared). With a quorum no worker names one: steps begin where the job's clock does.
//
// A commit that fails while it is applied, after a row changed or after it was prepared, fails its job: every later
// call of the job gets kDataLoss until the next generation (a restore). kResourceExhausted means that no part of it is
// applied.
//
// Memory: prepare() and commit() reserve before they answer, so what they accepted cannot fail for
// memory later. Kept gradients are bounded by kept_budget_bytes; past it commits are refused whole.
//
// Thread-safe. One mutex; nothing is applied, reduced or called back under it. Callbacks run on the
// thread that completed the condition.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "commit/apply_commits.h"
#include "commit/commit_cut.h"
#include "commit/job_clock.h"
#include "commit/lost_commits.h"
#include "commit/retired_windows.h"
#include "commit/write_counts.h"
#include "store/store.h"
#include "util/mutex.h"
#include "util/status.h"

namespace sparserow {

struct Member {
  std::uint32_t worker_id = 0;
  std::uint32_t epoch = 0;
  std::uint32_t rank = 0;              // order of reduction
  std::int64_t first_step = 0;         // it counts from here; at least the first step that is not complete
  std::int64_t until_step = kForever;  // else it has left, and counts up to here
  std::uint64_t final_sequence = 0;    // of one that left: its last commit accepted by any shard
  ProofDigest proof = {};              // of what its connections must show; zeros: none
};

struct JobSpec {
  std::uint32_t job_id = 0;  // not 0
  std::string name;
  std::optional<std::uint32_t> staleness = 0;  // nullopt: async
  std::vector<Member> members;                 // live workers, ids unique, and those that left and still count
  std::int64_t first_step = 0;                 // steps before it count as done; read when the clock is new
  std::uint32_t generation = 0;                // another one than before: the clock starts anew
  std::uint64_t operation = 0;                 // of the coordinator; an older one than before is refused
  std::uint32_t quorum = 0;                    // staleness 0: members of a step; 0: all workers
};

// What a shard reports about one worker when it is held.
struct WorkerReport {
  std::uint32_t worker_id = 0;
  std::uint32_t epoch = 0;
  std::uint64_t committed_sequence = 0;  // highest taken; 0: none
  std::int64_t committed_step = kNoStep;
  std::uint64_t prepared_sequence = 0;  // in doubt; 0: none
  std::uint64_t steps_taken = 0;        // as JobWindow counts them
  std::uint64_t writes_taken = 0;
};

struct CommitLogStats {
  std::uint64_t commits_accepted = 0;
  std::uint64_t commits_duplicate = 0;
  std::uint64_t commits_refused = 0;
  std::uint64_t commits_fenced = 0;
  std::uint64_t commits_outside = 0;  // PREPARE and COMMIT of a step that has its quorum without the worker
  std::uint64_t commits_lost = 0;  // taken before this shard was restored, and not sent again (commit/lost_commits.h)
  std::uint64_t steps_reduced = 0;
  std::uint64_t rows_applied = 0;
  std::uint64_t pulls_clocked = 0;
  std::uint64_t pulls_parked = 0;   // had to wait
  std::uint64_t staleness_sum = 0;  // over clocked pulls: steps between what was asked and what was applied
  std::uint64_t staleness_max = 0;
  std::uint64_t kept_bytes = 0;       // of gradients prepared or waiting for their step, now
  std::uint64_t pulls_waiting = 0;    // parked now
  std::uint64_t workers_visited = 0;  // in scans of all workers of a job, which no commit and no pull makes
};

class CommitLog {
 public:
  static constexpr std::uint64_t kWindow = JobWindow::kSequences;

  struct Options {
    std::uint64_t kept_budget_bytes = 4ull << 30;
    std::uint32_t parts = 1;             // a batch is applied in so many parts
    ParallelFor parallel_for = nullptr;  // null runs the parts in turn
  };
  CommitLog(Store& store, Options options);
  explicit CommitLog(Store& store) : CommitLog(store, Options{}) {}

  // Membership changes in two phases, so that N and the members of a step are equal on all shards.
  //
  // freeze: takes no new commit of the job (kUnavailable, to be sent again), ends the epochs in `fence`
  // (worker id, epoch) and reports every worker. An unknown job reports no worker. A freeze that decides
  // nothing has a lease: once it has ended, the job goes on as before, since the freezer may be gone.
  // kFailedPrecondition for an operation that is not newer than what was resolved.
  Result<std::vector<WorkerReport>> freeze(std::uint32_t job_id, std::uint64_t operation,
                                           const std::vector<WorkerKey>& fence,
                                           std::optional<std::chrono::milliseconds> lease = std::nullopt);
  // Resolves: creates a job or replaces its staleness and members, and takes commits again. What a member
  // that left has prepared is applied when it is its final sequence, else forgotten; after that no step waits
  // for it. A worker that is not named is dropped with all that it left. InvalidArgument for job id 0 or a
  // worker named twice, or a quorum with another staleness than 0; kFailedPrecondition for an older operation, or an
  // epoch that goes down.
  Status set_job(const JobSpec& spec);
  // kNotFound; kFailedPrecondition for an older operation. Parked pulls get kFenced.
  Status drop_job(std::uint32_t job_id, std::uint64_t operation = 0);

  // Takes a cut of frozen jobs: waits until all that belongs to it is applied and nothing else is. Then `take` runs
  // while nothing is written. Returns the windows of that instant; set_job goes on. kDeadlineExceeded names the worker
  // ids that were missing; kUnavailable: a change of members or another cut came between.
  Result<std::vector<JobImage>> cut(const std::vector<CutTarget>& targets,
                                    std::chrono::steady_clock::time_point deadline,
                                    const std::function<Status()>& take);
  // Windows of a cut, for the workers that the next set_job of the same generation names. Of an image that is `lossy`
  // each goes on from the first step that it names.
  void install(const std::vector<JobImage>& images);
  // Runs a write that has no sequence, so it cannot be repeated safely. It waits while a cut is taken.
  Result<std::uint64_t> write_unnamed(const std::function<Result<std::uint64_t>()>& write);

  Status prepare(Commit commit);                              // reserves; replaces an earlier try
  Result<CommitResult> commit(Commit commit, bool prepared);  // prepared: blocks come from prepare()
  // Another write by a worker, of this sequence: `write` returns how many rows it wrote. It is called once, without
  // the mutex, when the sequence is new; when it fails it has left no trace. Reports do not show it.
  Result<CommitResult> write_once(const WorkerKey& worker, std::uint32_t job_id, std::uint64_t sequence,
                                  const std::function<Result<std::uint64_t>()>& write);
  // Bytes of keys and gradients that a COMMIT of this worker may have applied: what it has prepared, and what waits for
  // its step.
  [[nodiscard]] std::uint64_t pending_bytes(std::uint32_t job_id, const WorkerKey& worker) const;
  // Ok also when there is nothing to forget.
  // Finishes the sequence: PREPARE of it does nothing any more, COMMIT of it is refused.
  Status abort(std::uint32_t job_id, std::uint32_t worker_id, std::uint32_t worker_epoch, std::uint64_t sequence);
  // Sequences of writes by key that were acknowledged once and that their worker holds no more: those that this shard
  // does not know are lost, and counted, each once.
  Status note_lost(std::uint32_t job_id, const WorkerKey& key, std::span<const std::uint64_t> sequences);

  // Calls `ready(status)` at once or later: Ok when a pull of `step` may read, kDeadlineExceeded with
  // the worker ids it waited for, kFenced, kUnavailable (not known yet).
  void when_readable(std::uint32_t job_id, std::uint32_t worker_id, std::uint32_t worker_epoch, std::int64_t step,
                     std::chrono::steady_clock::time_point deadline, std::function<void(Status)> ready,
                     const void* owner = nullptr);
  // Drops the parked pulls of one owner without an answer: their connection is gone.
  void forget(const void* owner);
  // Fails parked pulls whose deadline passed. The server calls it on a timer.
  void expire(std::chrono::steady_clock::time_point now);
  // Answers every parked pull with `status` (drain, stop).
  void fail_parked(const Status& status);

  // Counts a write to the store that is no commit; those are counted here. writer: null for one without a step.
  void count_write(std::uint32_t table_id, const WriteCounts::Writer* writer = nullptr) {
    writes_.add(table_id, writer, [this](std::uint32_t id) { return applier_.has_table(id); });
  }
  // WriteCounts::by_others for a worker. A fenced worker counts as an unnamed writer.
  [[nodiscard]] std::uint64_t writes_by_others(std::span<const std::uint32_t> table_ids, std::uint32_t job_id,
                                               const WorkerKey& worker);
  // "namespace/job"; nullopt for a job that this shard does not know.
  [[nodiscard]] std::optional<std::string> job_name(std::uint32_t job_id) const;
  // The proof of a live worker, zeros when it needs none; nullopt for a worker that this shard does not know.
  [[nodiscard]] std::optional<ProofDigest> proof_of(std::uint32_t job_id, const WorkerKey& worker) const;
  [[nodiscard]] CommitLogStats stats() const;
  // Which commits commits_lost counts.
  [[nodiscard]] std::vector<LostRange> lost() const;
  // The lowest step that still takes members here, for a worker that is outside of a step's quorum; kNoStep for a job
  // that is gone.
  [[nodiscard]] std::int64_t open_step(std::uint32_t job_id) const;
  // For a pull of `step` that reads now: step - 1 minus the step up to which all commits are applied. 0 for a job
  // that is gone.
  [[nodiscard]] std::uint64_t steps_behind(std::uint32_t job_id, std::int64_t step) const;
  // By job id: the highest step that a worker has committed, -1 before the first.
  [[nodiscard]] std::map<std::uint32_t, std::int64_t> highest_steps() const;

 private:
  using JobPtr = std::shared_ptr<Job>;

  Result<JobPtr> find(std::uint32_t job_id) const SR_REQUIRES(mutex_);
  Status refused(Status status) SR_REQUIRES(mutex_);  // counts it
  Status admit_or_refuse(const Job& job, const Commit& commit) SR_REQUIRES(mutex_);
  Status check_admitted(const Commit& commit) const SR_REQUIRES(mutex_);
  static Result<std::uint64_t> without_exceptions(const std::function<Result<std::uint64_t>()>& write);
  static Status fail(Job& job, const std::string& what, const std::string& how, const Status& cause);
  Status charge(std::uint64_t bytes) SR_REQUIRES(mutex_);
  Result<std::optional<CommitResult>> seen(const JobPtr& job, const Commit& commit) SR_REQUIRES(mutex_);
  Result<CommitResult> answered(const Result<std::optional<CommitResult>>& seen) SR_REQUIRES(mutex_);
  std::optional<Result<CommitResult>> settled(const Commit& commit) SR_REQUIRES(mutex_);
  // What `outcomes` gets is delivered without the mutex.
  Result<CommitResult> accept_for_step(const JobPtr& job, Kept kept, std::vector<PullOutcome>& outcomes)
      SR_REQUIRES(mutex_);
  Result<CommitResult> apply_now(const JobPtr& job, Kept kept, bool prepared, std::vector<PullOutcome>& outcomes)
      SR_REQUIRES(mutex_);
  Status apply_unlocked(const JobPtr& job, Kept kept, bool prepared) SR_REQUIRES(mutex_);
  void count_writes(std::span<const Kept> commits);
  void end_worker(std::uint32_t job_id, const JobPtr& job, const Member& member) SR_REQUIRES(mutex_);
  Status end_workers(const JobPtr& job, const JobSpec& spec) SR_REQUIRES(mutex_);
  void take_members(Job& job, const JobSpec& spec, bool is_lossy) SR_REQUIRES(mutex_);
  void count_lost(std::uint32_t job_id, const WorkerKey& worker, bool is_steps,
                  const std::vector<JobWindow::Range>& ranges) SR_REQUIRES(mutex_);
  void retire(std::uint32_t job_id, Job& job, const WorkerKey& worker) SR_REQUIRES(mutex_);
  [[nodiscard]] JobPtr frozen_job(const CutTarget& target) const SR_REQUIRES(mutex_);
  [[nodiscard]] const WindowImage* saved_window(std::uint32_t job_id, std::uint32_t generation,
                                                const WorkerKey& key) const SR_REQUIRES(mutex_);
  Status check_operation(std::uint32_t job_id, std::uint64_t operation) const SR_REQUIRES(mutex_);
  bool is_frozen(Job& job) SR_REQUIRES(mutex_);  // not beyond the hold's lease: what it held goes on
  JobPtr begin_clock(const JobSpec& spec, std::vector<PullOutcome>& outcomes) SR_REQUIRES(mutex_);
  void advance(const JobPtr& job) SR_REQUIRES(mutex_);
  void note_staleness(const Job& job, std::int64_t step) SR_REQUIRES(mutex_);
  void collect_readable(Job& job, std::vector<PullOutcome>& outcomes) SR_REQUIRES(mutex_);

  const std::uint64_t kept_budget_bytes_;
  const CommitApplier applier_;
  WriteCounts writes_;
  mutable Mutex mutex_;
  CondVar answered_;
  std::unordered_map<std::uint32_t, JobPtr> jobs_ SR_GUARDED_BY(mutex_);
  struct Dropped {
    std::uint64_t operation = 0;
    std::string name;
    std::map<std::uint32_t, std::uint32_t> epochs;
  };
  // Jobs that were dropped: their epochs do not go down. Of more than kMostDropped the oldest are forgotten; their
  // worker ids never come again.
  static constexpr std::size_t kMostDropped = 1'024;
  std::unordered_map<std::uint32_t, Dropped> dropped_ SR_GUARDED_BY(mutex_);
  LostCommits lost_ SR_GUARDED_BY(mutex_);
  RetiredWindows retired_ SR_GUARDED_BY(mutex_);  // of workers that their jobs have forgotten
  std::unordered_map<std::uint32_t, JobImage> saved_ SR_GUARDED_BY(mutex_);  // of a restore, by job id
  std::uint32_t applying_ SR_GUARDED_BY(mutex_) = 0;                         // writes under way, without the mutex
  bool is_cutting_ SR_GUARDED_BY(mutex_) = false;
  CommitLogStats stats_ SR_GUARDED_BY(mutex_);
};

}  // namespace sparserow
