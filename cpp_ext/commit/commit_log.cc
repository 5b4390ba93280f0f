#include "commit/commit_log.h"

#include <algorithm>

#include "util/not_allowed.h"

namespace sparserow {
namespace {

Status step_taken(const Commit& commit) {
  return Status(Code::kFailedPrecondition, "step " + std::to_string(commit.step) + " of worker " +
                                               std::to_string(commit.worker_id) +
                                               " is already committed under another sequence");
}

std::uint64_t clock_of(const Job& job, const Commit& commit) noexcept {
  return std::uint64_t{job.generation} << 32 | commit.job_id;
}

}  // namespace

// A write that throws has failed: its waiters must go on.
Result<std::uint64_t> CommitLog::without_exceptions(const std::function<Result<std::uint64_t>()>& write) {
  try {
    return write();
  } catch (const std::bad_alloc&) {
    return Status(Code::kResourceExhausted, "the system refuses memory for this write");
  } catch (const std::exception& error) {
    return Status(Code::kInternal, std::string("a write failed: ") + error.what());
  }
}

CommitLog::CommitLog(Store& store, Options options)
    : kept_budget_bytes_(options.kept_budget_bytes), applier_(store, options.parts, std::move(options.parallel_for)) {}

Result<CommitLog::JobPtr> CommitLog::find(std::uint32_t job_id) const {
  const auto found = jobs_.find(job_id);
  if (found != jobs_.end()) return found->second;
  const auto over = dropped_.find(job_id);
  const std::string which = over == dropped_.end() ? std::to_string(job_id) : "'" + over->second.name + "'";
  return Status(Code::kFenced, "job " + which +
                                   " is over: all its workers have left, or their leases have ended (worker_lease of "
                                   "the coordinator); connect anew to begin it again");
}

Status CommitLog::charge(std::uint64_t bytes) {
  if (stats_.kept_bytes + bytes > kept_budget_bytes_) {
    return Status(Code::kResourceExhausted, "kept commits: " + std::to_string(stats_.kept_bytes) +
                                                " bytes in use and " + std::to_string(bytes) +
                                                " needed; the budget is " + std::to_string(kept_budget_bytes_));
  }
  stats_.kept_bytes += bytes;
  return Status::ok();
}

Status CommitLog::refused(Status status) {
  const bool is_outside = status.code() == Code::kOutsideQuorum;
  ++(is_outside                       ? stats_.commits_outside
     : status.code() == Code::kFenced ? stats_.commits_fenced
                                      : stats_.commits_refused);
  return status;
}

Status CommitLog::admit_or_refuse(const Job& job, const Commit& commit) {
  Status status = job.admit(commit.worker_id, commit.worker_epoch);
  return status.is_ok() ? status : refused(std::move(status));
}

// Job::admit() of the commit's job; kFenced when the shard does not know the job.
Status CommitLog::check_admitted(const Commit& commit) const {
  const auto job = find(commit.job_id);
  return job.is_ok() ? job.value()->admit(commit.worker_id, commit.worker_epoch) : job.status();
}

Status CommitLog::prepare(Commit commit) {
  {
    const MutexLock lock(mutex_);
    const auto job = find(commit.job_id);
    if (!job.is_ok()) return refused(job.status());
    Status status = job.value()->admit(commit.worker_id, commit.worker_epoch);
    if (!status.is_ok()) return refused(std::move(status));
  }
  if (commit.sequence == 0) return not_allowed("sequence", commit.sequence, ">= 1");
  auto kept = applier_.reserve(std::move(commit));  // outside of the lock: it looks every key up
  const MutexLock lock(mutex_);
  if (!kept.is_ok()) return refused(kept.status());
  const Commit& reserved = kept.value().commit;
  const auto job = find(reserved.job_id);
  if (!job.is_ok()) return refused(job.status());
  Status status = job.value()->admit(reserved.worker_id, reserved.worker_epoch);
  if (!status.is_ok()) return refused(std::move(status));
  const auto answer = seen(job.value(), reserved);
  if (!answer.is_ok() || answer.value()) return answer.status();
  SR_RETURN_IF_ERROR(admit_or_refuse(*job.value(), reserved));  // seen() may have waited
  if (status = job.value()->check_quorum(reserved); !status.is_ok()) return refused(std::move(status));
  JobWorker& worker = job.value()->workers[{reserved.worker_id, reserved.worker_epoch}];
  if (reserved.step != kNoStep && worker.window.has_step(reserved.step)) return refused(step_taken(reserved));
  if (worker.window.prepared_sequence() > reserved.sequence) {
    return refused(Status(Code::kFailedPrecondition,
                          "sequence " + std::to_string(reserved.sequence) +
                              " is superseded: " + std::to_string(worker.window.prepared_sequence()) + " is prepared"));
  }
  stats_.kept_bytes -= worker.window.drop_prepared();
  if (status = charge(kept.value().bytes); !status.is_ok()) return refused(std::move(status));
  worker.window.set_prepared(std::move(kept).value());
  return Status::ok();
}

Result<CommitResult> CommitLog::commit(Commit commit, bool prepared) {
  MutexLock lock(mutex_);
  if (commit.sequence == 0) return refused(not_allowed("sequence", commit.sequence, ">= 1"));
  Kept kept;
  if (!prepared) {
    // The first check keeps a duplicate from reserving. The second one follows the reservation, which lets the mutex
    // go, so that members may have changed.
    if (Status status = check_admitted(commit); !status.is_ok()) {
      const auto known = settled(commit);
      return known ? *known : refused(std::move(status));
    }
    const auto answer = seen(find(commit.job_id).value(), commit);
    if (!answer.is_ok() || answer.value()) return answered(answer);
    lock.unlock();
    auto reserved = applier_.reserve(std::move(commit));
    lock.lock();
    if (!reserved.is_ok()) return refused(reserved.status());
    kept = std::move(reserved).value();
  } else {
    kept.commit = std::move(commit);
  }
  if (Status status = check_admitted(kept.commit); !status.is_ok()) {
    const auto known = settled(kept.commit);
    return known ? *known : refused(std::move(status));
  }
  const auto job = find(kept.commit.job_id);
  const auto answer = seen(job.value(), kept.commit);
  if (!answer.is_ok() || answer.value()) return answered(answer);
  SR_RETURN_IF_ERROR(admit_or_refuse(*job.value(), kept.commit));  // seen() may have waited
  if (Status status = job.value()->check_quorum(kept.commit); !status.is_ok()) return refused(std::move(status));
  if (is_cutting_ || (is_frozen(*job.value()) && !job.value()->is_within_cut(kept.commit))) {
    return refused(Status(Code::kUnavailable, "the members of job '" + job.value()->name + "' are being changed"));
  }
  JobWorker& worker = job.value()->workers[{kept.commit.worker_id, kept.commit.worker_epoch}];
  const std::int64_t step = kept.commit.step;
  if (step != kNoStep) {
    if (!job.value()->has_quorum()) {
      count_lost(kept.commit.job_id, {kept.commit.worker_id, kept.commit.worker_epoch}, true, worker.name_step(step));
      job.value()->enter_clock(worker);
    }
    if (worker.window.has_step(step)) {
      return refused(step_taken(kept.commit));
    }
  }
  if (prepared) {
    const Commit asked = std::move(kept.commit);
    auto prepared = worker.window.take_prepared(asked.sequence);
    if (!prepared) {
      return refused(Status(Code::kFailedPrecondition, "sequence " + std::to_string(asked.sequence) + " of worker " +
                                                           std::to_string(asked.worker_id) +
                                                           " was not prepared on this shard"));
    }
    kept = std::move(*prepared);
    kept.commit.step = asked.step;
    kept.commit.grad_sum = asked.grad_sum;
    stats_.kept_bytes -= kept.bytes;
  }
  const bool waits_for_step = job.value()->staleness == 0u && kept.commit.step != kNoStep;
  std::vector<PullOutcome> outcomes;
  Result<CommitResult> result = waits_for_step ? accept_for_step(job.value(), std::move(kept), outcomes)
                                               : apply_now(job.value(), std::move(kept), prepared, outcomes);
  lock.unlock();
  deliver(outcomes);
  return result;
}

Result<CommitResult> CommitLog::write_once(const WorkerKey& worker, std::uint32_t job_id, std::uint64_t sequence,
                                           const std::function<Result<std::uint64_t>()>& write) {
  MutexLock lock(mutex_);
  Commit named;
  named.job_id = job_id;
  named.worker_id = worker.first;
  named.worker_epoch = worker.second;
  named.sequence = sequence;
  if (Status status = check_admitted(named); !status.is_ok()) {
    const auto known = settled(named);
    return known ? *known : refused(std::move(status));
  }
  const auto job = find(job_id);
  const auto answer = seen(job.value(), named);
  if (!answer.is_ok() || answer.value()) return answered(answer);
  SR_RETURN_IF_ERROR(admit_or_refuse(*job.value(), named));  // seen() may have waited
  if (is_cutting_ || is_frozen(*job.value())) {
    return refused(Status(Code::kUnavailable, "the members of job '" + job.value()->name + "' are being changed"));
  }
  job.value()->workers[worker].window.begin_write(sequence);
  ++applying_;
  lock.unlock();
  const auto rows = without_exceptions(write);
  lock.lock();
  --applying_;
  if (const auto found = job.value()->workers.find(worker); found != job.value()->workers.end()) {
    JobWindow& window = found->second.window;
    rows.is_ok() ? window.finish_write(sequence, rows.value()) : window.take_back(sequence, kNoStep);
  } else {
    retired_.end(job_id, worker, sequence, rows.is_ok() ? std::optional(rows.value()) : std::nullopt);
  }
  answered_.notify_all();
  if (!rows.is_ok()) return rows.status();
  return CommitResult{.applied_rows = rows.value()};
}

Result<CommitResult> CommitLog::accept_for_step(const JobPtr& job, Kept kept, std::vector<PullOutcome>& outcomes) {
  if (Status status = charge(kept.bytes); !status.is_ok()) return refused(std::move(status));
  const WorkerKey key{kept.commit.worker_id, kept.commit.worker_epoch};
  const std::int64_t step = kept.commit.step;
  const std::uint64_t rows = rows_of(kept.commit);
  kept.commit.clock = clock_of(*job, kept.commit);
  JobWorker& worker = job->workers[key];
  worker.window.begin(kept.commit.sequence, step);
  worker.window.finish(kept.commit.sequence, step, rows);
  if (job->has_quorum()) worker.window.start_at(job->completed + 1);
  job->enter_clock(worker);
  ++stats_.commits_accepted;
  job->keep(key, std::move(kept));
  advance(job);
  collect_readable(*job, outcomes);
  return CommitResult{.applied_rows = rows};
}

Result<CommitResult> CommitLog::apply_now(const JobPtr& job, Kept kept, bool prepared,
                                          std::vector<PullOutcome>& outcomes) {
  const std::uint64_t rows = rows_of(kept.commit);
  Status status = apply_unlocked(job, std::move(kept), prepared);
  collect_readable(*job, outcomes);
  if (!status.is_ok()) return status;
  return CommitResult{.applied_rows = rows};
}

// Applies one commit; the mutex is free meanwhile. A prepared commit was promised, and a part of a commit is no commit:
// a failure of either fails the job.
Status CommitLog::apply_unlocked(const JobPtr& job, Kept kept, bool prepared) {
  const std::uint32_t job_id = kept.commit.job_id;
  const WorkerKey key{kept.commit.worker_id, kept.commit.worker_epoch};
  const std::uint64_t sequence = kept.commit.sequence;
  const std::int64_t step = kept.commit.step;
  const std::uint64_t rows = rows_of(kept.commit);
  kept.commit.clock = clock_of(*job, kept.commit);
  job->workers[key].window.begin(sequence, step);
  const std::uint32_t workers = std::max(1u, job->counted(step));
  ++applying_;
  ApplyOutcome outcome;
  {
    const MutexUnlock unlocked(mutex_);
    outcome = applier_.apply(kept, workers);
    count_writes({&kept, 1});
    kept = Kept{};  // gives the reservations back before other commits ask for room
  }
  auto& [status, has_changed] = outcome;
  --applying_;
  if (!status.is_ok() && (has_changed || prepared)) {
    status = fail(*job, "commit " + std::to_string(sequence) + " of worker " + std::to_string(key.first),
                  "failed while it was applied", status);
  }
  if (const auto worker = job->workers.find(key); worker != job->workers.end()) {
    JobWindow& window = worker->second.window;
    status.is_ok() ? window.finish(sequence, step, rows) : window.take_back(sequence, step);
    job->enter_clock(worker->second);
  } else {
    retired_.end(job_id, key, sequence, status.is_ok() ? std::optional(rows) : std::nullopt);
  }
  ++(status.is_ok() ? stats_.commits_accepted : stats_.commits_refused);
  if (status.is_ok()) stats_.rows_applied += rows;
  answered_.notify_all();
  return status;
}

// The job keeps its first failure, which every later call of the job gets.
Status CommitLog::fail(Job& job, const std::string& what, const std::string& how, const Status& cause) {
  Status failure(Code::kDataLoss, what + " of job '" + job.name + "' " + how + ": " + cause.message() +
                                      "; restore a checkpoint, or restart this shard");
  if (job.failure.is_ok()) job.failure = failure;
  return failure;
}

// Counts commits that were applied together. In a step of several workers each worker learns that others wrote.
void CommitLog::count_writes(std::span<const Kept> commits) {
  for (const Kept& kept : commits) {
    const Commit& commit = kept.commit;
    const WriteCounts::Writer writer{commit.job_id, commit.worker_id, commit.worker_epoch};
    for (const GradBlock& block : commit.blocks) {
      count_write(block.table_id, commit.step == kNoStep ? nullptr : &writer);
    }
  }
}

// Reduces and applies every step that has all its commits, in order; one thread at a time per job.
void CommitLog::advance(const JobPtr& job) {
  if (job->advancing) return;
  job->advancing = true;
  while (const auto step = job->next_complete_step()) {
    std::vector<Kept> commits = job->take_step(*step);
    std::uint64_t rows = 0;
    std::uint64_t bytes = 0;
    for (const Kept& kept : commits) {
      rows += rows_of(kept.commit);
      bytes += kept.bytes;
    }
    const std::uint32_t workers = std::max(1u, job->needed(*step));
    ++applying_;
    Status status;
    {
      const MutexUnlock unlocked(mutex_);
      status = applier_.apply_step(commits, workers).status;
      count_writes(commits);
      commits.clear();
    }
    --applying_;
    stats_.kept_bytes -= bytes;
    stats_.rows_applied += rows;
    ++stats_.steps_reduced;
    if (!status.is_ok()) {
      static_cast<void>(
          fail(*job, "step " + std::to_string(*step), "was acknowledged and could not be applied", status));
    }
    job->complete(*step);
  }
  job->skip_empty_steps();
  job->advancing = false;
  answered_.notify_all();
}

std::uint64_t CommitLog::pending_bytes(std::uint32_t job_id, const WorkerKey& worker) const {
  const MutexLock lock(mutex_);
  const auto job = jobs_.find(job_id);
  if (job == jobs_.end()) return 0;
  const auto found = job->second->workers.find(worker);
  const std::uint64_t bytes = found == job->second->workers.end() ? 0 : found->second.window.prepared_bytes();
  return bytes + job->second->kept_bytes;
}

Status CommitLog::abort(std::uint32_t job_id, std::uint32_t worker_id, std::uint32_t epoch, std::uint64_t sequence) {
  const MutexLock lock(mutex_);
  const auto job = find(job_id);
  if (!job.is_ok()) return job.status();
  SR_RETURN_IF_ERROR(job.value()->admit(worker_id, epoch));
  if (sequence == 0) return not_allowed("sequence", sequence, ">= 1");
  JobWindow& window = job.value()->workers[{worker_id, epoch}].window;
  if (const auto dropped = window.take_prepared(sequence)) stats_.kept_bytes -= dropped->bytes;
  window.abort(sequence);
  return Status::ok();
}

std::optional<std::string> CommitLog::job_name(std::uint32_t job_id) const {
  const MutexLock lock(mutex_);
  const auto found = jobs_.find(job_id);
  return found == jobs_.end() ? std::nullopt : std::optional(found->second->name);
}

std::optional<ProofDigest> CommitLog::proof_of(std::uint32_t job_id, const WorkerKey& worker) const {
  const MutexLock lock(mutex_);
  const auto job = jobs_.find(job_id);
  if (job == jobs_.end()) return std::nullopt;
  const auto found = job->second->workers.find(worker);
  return found == job->second->workers.end() ? std::nullopt : std::optional(found->second.proof);
}

CommitLogStats CommitLog::stats() const {
  const MutexLock lock(mutex_);
  CommitLogStats stats = stats_;
  for (const auto& [job_id, job] : jobs_) {
    stats.pulls_waiting += job->parked.size();
    stats.workers_visited += job->workers_visited;
  }
  return stats;
}

std::uint64_t CommitLog::steps_behind(std::uint32_t job_id, std::int64_t step) const {
  const MutexLock lock(mutex_);
  const auto found = jobs_.find(job_id);
  return found == jobs_.end() ? 0 : found->second->steps_behind(step);
}

std::int64_t CommitLog::open_step(std::uint32_t job_id) const {
  const MutexLock lock(mutex_);
  const auto found = jobs_.find(job_id);
  return found == jobs_.end() ? kNoStep : found->second->open_step();
}

std::map<std::uint32_t, std::int64_t> CommitLog::highest_steps() const {
  const MutexLock lock(mutex_);
  std::map<std::uint32_t, std::int64_t> steps;
  for (const auto& [job_id, job] : jobs_) steps[job_id] = job->highest_step();
  return steps;
}

}  // namespace sparserow
