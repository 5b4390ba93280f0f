#include "rpc/commit_log.h"

namespace sparserow::rpc {

CommitLog::CommitLog(Store& store, Options options)
    : kept_budget_bytes_(options.kept_budget_bytes), applier_(store, options.parts, std::move(options.parallel_for)) {}

Result<CommitLog::JobPtr> CommitLog::find(std::uint32_t job_id) const {
  const auto found = jobs_.find(job_id);
  if (found != jobs_.end()) return found->second;
  return Status(Code::kNotFound, "job " + std::to_string(job_id) + " is not known to this shard; register the worker");
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
  ++(status.code() == Code::kFenced ? stats_.commits_fenced : stats_.commits_refused);
  return status;
}

// What is known about a sequence: its answer, once the thread that applies it is done; nullopt when it is new.
Result<std::optional<CommitResult>> CommitLog::seen(Lock& lock, JobWorker& worker, const Commit& commit) {
  const std::uint64_t sequence = commit.sequence;
  if (worker.window.is_forgotten(sequence)) {
    return Status(Code::kFailedPrecondition, "sequence " + std::to_string(sequence) + " of worker " +
                                                 std::to_string(commit.worker_id) +
                                                 " is older than what this shard remembers (" +
                                                 std::to_string(worker.window.forgotten_below()) + " and later)");
  }
  while (true) {
    const JobWindow::Answer* answer = worker.window.find(sequence);
    if (answer == nullptr) return std::optional<CommitResult>();
    if (answer->done) {
      ++stats_.commits_duplicate;
      return std::optional(CommitResult{answer->rows, true});
    }
    answered_.wait(lock);  // bounded: its applier holds no lock and waits for nobody
    if (worker.epoch != commit.worker_epoch) {
      return Status(Code::kFenced, "worker " + std::to_string(commit.worker_id) + " was replaced meanwhile");
    }
  }
}

Status CommitLog::prepare(Commit commit) {
  {
    const Lock lock(mutex_);
    const auto job = find(commit.job_id);
    if (!job.is_ok()) return refused(job.status());
    Status status = job.value()->admit(commit.worker_id, commit.worker_epoch);
    if (!status.is_ok()) return refused(std::move(status));
  }
  if (commit.sequence == 0) return Status(Code::kInvalidArgument, "sequence: 0 is not allowed");
  auto kept = applier_.reserve(std::move(commit));  // outside of the lock: it looks every key up
  Lock lock(mutex_);
  if (!kept.is_ok()) return refused(kept.status());
  const Commit& held = kept.value().commit;
  const auto job = find(held.job_id);
  if (!job.is_ok()) return refused(job.status());
  Status status = job.value()->admit(held.worker_id, held.worker_epoch);
  if (!status.is_ok()) return refused(std::move(status));
  JobWorker& worker = job.value()->workers[held.worker_id];
  const auto answer = seen(lock, worker, held);
  if (!answer.is_ok() || answer.value()) return answer.status();
  if (worker.window.prepared_sequence() > held.sequence) {
    return refused(Status(Code::kFailedPrecondition,
                          "sequence " + std::to_string(held.sequence) +
                              " is superseded: " + std::to_string(worker.window.prepared_sequence()) + " is prepared"));
  }
  stats_.kept_bytes -= worker.window.drop_prepared();
  if (status = charge(kept.value().bytes); !status.is_ok()) return refused(std::move(status));
  worker.window.hold(std::move(kept).value());
  return Status::ok();
}

Result<CommitResult> CommitLog::commit(Commit commit, bool prepared) {
  Lock lock(mutex_);
  if (commit.sequence == 0) return refused(Status(Code::kInvalidArgument, "sequence: 0 is not allowed"));
  Kept kept;
  if (!prepared) {
    // First look: a duplicate must not reserve. Second look after reserving: members may have changed.
    const auto job = find(commit.job_id);
    if (!job.is_ok()) return refused(job.status());
    Status status = job.value()->admit(commit.worker_id, commit.worker_epoch);
    if (!status.is_ok()) return refused(std::move(status));
    const auto answer = seen(lock, job.value()->workers[commit.worker_id], commit);
    if (!answer.is_ok()) return answer.status();
    if (answer.value()) return *answer.value();
    lock.unlock();
    auto reserved = applier_.reserve(std::move(commit));
    lock.lock();
    if (!reserved.is_ok()) return refused(reserved.status());
    kept = std::move(reserved).value();
  } else {
    kept.commit = std::move(commit);
  }
  const auto job = find(kept.commit.job_id);
  if (!job.is_ok()) return refused(job.status());
  Status status = job.value()->admit(kept.commit.worker_id, kept.commit.worker_epoch);
  if (!status.is_ok()) return refused(std::move(status));
  JobWorker& worker = job.value()->workers[kept.commit.worker_id];
  const auto answer = seen(lock, worker, kept.commit);
  if (!answer.is_ok()) return answer.status();
  if (answer.value()) return *answer.value();
  if (prepared) {
    const Commit asked = std::move(kept.commit);
    auto held = worker.window.take_prepared(asked.sequence);
    if (!held) {
      return refused(Status(Code::kFailedPrecondition, "sequence " + std::to_string(asked.sequence) + " of worker " +
                                                           std::to_string(asked.worker_id) +
                                                           " was not prepared on this shard"));
    }
    kept = std::move(*held);
    kept.commit.step = asked.step;
    kept.commit.grad_sum = asked.grad_sum;
    stats_.kept_bytes -= kept.bytes;
  }
  const bool waits_for_step = job.value()->staleness == 0u && kept.commit.step != kNoStep;
  return waits_for_step ? accept_for_step(lock, job.value(), std::move(kept))
                        : apply_now(lock, job.value(), std::move(kept));
}

Result<CommitResult> CommitLog::accept_for_step(Lock& lock, const JobPtr& job, Kept kept) {
  const std::uint32_t worker_id = kept.commit.worker_id;
  const std::int64_t step = kept.commit.step;
  JobWorker& worker = job->workers[worker_id];
  worker.name_step(step);
  if (step <= worker.last_step) {
    return refused(Status(Code::kFailedPrecondition, "step " + std::to_string(step) + " of worker " +
                                                         std::to_string(worker_id) + " is already committed up to " +
                                                         std::to_string(worker.last_step) + " under another sequence"));
  }
  if (Status status = charge(kept.bytes); !status.is_ok()) return refused(std::move(status));
  const std::uint64_t rows = rows_of(kept.commit);
  worker.last_step = step;
  worker.window.finish(kept.commit.sequence, rows);
  ++stats_.commits_accepted;
  job->steps[step].emplace(worker_id, std::move(kept));
  advance(lock, job);
  std::vector<PullOutcome> outcomes;
  collect_readable(*job, outcomes);
  lock.unlock();
  deliver(outcomes);
  return CommitResult{rows, false};
}

Result<CommitResult> CommitLog::apply_now(Lock& lock, const JobPtr& job, Kept kept) {
  const std::uint32_t epoch = kept.commit.worker_epoch;
  const std::uint64_t sequence = kept.commit.sequence;
  const std::int64_t step = kept.commit.step;
  const std::uint64_t rows = rows_of(kept.commit);
  JobWorker& worker = job->workers[kept.commit.worker_id];
  if (step != kNoStep) worker.name_step(step);
  worker.window.begin(sequence);
  const std::uint32_t live = job->live_count();
  lock.unlock();
  const Status status = applier_.apply(kept, live);
  kept = Kept{};  // gives the reservations back before others look at the budget
  lock.lock();

  if (worker.epoch == epoch) {
    if (status.is_ok()) {
      worker.window.finish(sequence, rows);
      if (step != kNoStep) worker.last_step = std::max(worker.last_step, step);
    } else {
      worker.window.take_back(sequence);
    }
  }
  if (status.is_ok()) {
    ++stats_.commits_accepted;
    stats_.rows_applied += rows;
  } else {
    ++stats_.commits_refused;
  }
  std::vector<PullOutcome> outcomes;
  collect_readable(*job, outcomes);
  answered_.notify_all();
  lock.unlock();
  deliver(outcomes);
  if (!status.is_ok()) return status;
  return CommitResult{rows, false};
}

// Reduces and applies every step that has all its commits, in order; one thread at a time per job.
void CommitLog::advance(Lock& lock, const JobPtr& job) {
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
    const std::uint32_t live = std::max(1u, job->live_count());
    lock.unlock();
    const Status status = applier_.apply_step(commits, live);
    commits.clear();
    lock.lock();
    stats_.kept_bytes -= bytes;
    stats_.rows_applied += rows;
    ++stats_.steps_reduced;
    if (!status.is_ok() && job->failure.is_ok()) {
      job->failure = Status(Code::kDataLoss, "step " + std::to_string(*step) + " of job '" + job->name +
                                                 "' was acknowledged and could not be applied: " + status.message());
    }
    job->completed = std::max(job->completed, *step);
  }
  job->skip_empty_steps();
  job->advancing = false;
}

Status CommitLog::abort(std::uint32_t job_id, std::uint32_t worker_id, std::uint32_t epoch, std::uint64_t sequence) {
  const Lock lock(mutex_);
  const auto job = find(job_id);
  if (!job.is_ok()) return job.status();
  SR_RETURN_IF_ERROR(job.value()->admit(worker_id, epoch));
  if (const auto dropped = job.value()->workers[worker_id].window.take_prepared(sequence)) {
    stats_.kept_bytes -= dropped->bytes;
  }
  return Status::ok();
}

CommitLogStats CommitLog::stats() const {
  const Lock lock(mutex_);
  CommitLogStats stats = stats_;
  for (const auto& [job_id, job] : jobs_) stats.pulls_waiting += job->parked.size();
  return stats;
}

std::uint64_t CommitLog::steps_behind(std::uint32_t job_id, std::int64_t step) const {
  const Lock lock(mutex_);
  const auto found = jobs_.find(job_id);
  return found == jobs_.end() ? 0 : found->second->steps_behind(step);
}

std::map<std::uint32_t, std::int64_t> CommitLog::highest_steps() const {
  const Lock lock(mutex_);
  std::map<std::uint32_t, std::int64_t> steps;
  for (const auto& [job_id, job] : jobs_) steps[job_id] = job->highest_step();
  return steps;
}

}  // namespace sparserow::rpc
