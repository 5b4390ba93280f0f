// The members of a job: the part of the commit log that the coordinator calls.
#include <algorithm>
#include <set>

#include "commit/commit_log.h"
#include "util/not_allowed.h"

namespace sparserow {
namespace {

Status check_members(const JobSpec& spec) {
  if (spec.job_id == 0) return not_allowed("job_id", spec.job_id, ">= 1; 0 means no job");
  if (spec.quorum != 0 && spec.staleness != 0u) {
    return not_allowed("quorum", spec.quorum, "0 unless staleness is 0");
  }
  std::set<WorkerKey> named;
  std::set<std::uint32_t> live;
  for (const Member& member : spec.members) {
    const bool twice = !named.insert({member.worker_id, member.epoch}).second ||
                       (member.until_step == kForever && !live.insert(member.worker_id).second);
    if (twice) {
      return Status(Code::kInvalidArgument, "members: worker " + std::to_string(member.worker_id) + " is named twice");
    }
  }
  return Status::ok();
}

// kFailedPrecondition when a live member has an earlier epoch than its worker had in this job.
Status check_epochs(const Job& job, const JobSpec& spec) {
  for (const Member& member : spec.members) {
    if (member.until_step != kForever) continue;
    const auto known = job.epochs.find(member.worker_id);
    if (known == job.epochs.end() || member.epoch >= known->second) continue;
    return Status(Code::kFailedPrecondition, "members: worker " + std::to_string(member.worker_id) + " has epoch " +
                                                 std::to_string(known->second) + " and cannot go down to " +
                                                 std::to_string(member.epoch));
  }
  return Status::ok();
}

// Answers the parked pulls of workers that left, so that these do not wait for their deadlines.
void unpark_gone(Job& job, std::vector<PullOutcome>& outcomes) {
  const auto is_gone = [&job](const ParkedPull& pull) { return !job.admit(pull.worker_id, pull.epoch).is_ok(); };
  for (ParkedPull& pull : job.parked.take_if(is_gone)) {
    outcomes.push_back({std::move(pull.ready), job.admit(pull.worker_id, pull.epoch)});
  }
}

}  // namespace

Status CommitLog::check_operation(std::uint32_t job_id, std::uint64_t operation) const {
  std::uint64_t newest = 0;
  if (const auto dropped = dropped_.find(job_id); dropped != dropped_.end()) newest = dropped->second.operation;
  if (const auto job = jobs_.find(job_id); job != jobs_.end()) newest = std::max(newest, job->second->operation);
  if (operation >= newest) return Status::ok();
  return Status(Code::kFailedPrecondition, "operation: " + std::to_string(operation) + " of job " +
                                               std::to_string(job_id) + " is older than " + std::to_string(newest));
}

Result<std::vector<WorkerReport>> CommitLog::freeze(std::uint32_t job_id, std::uint64_t operation,
                                                    const std::vector<WorkerKey>& fence,
                                                    std::optional<std::chrono::milliseconds> lease) {
  std::vector<PullOutcome> outcomes;
  std::vector<WorkerReport> reports;
  {
    const MutexLock lock(mutex_);
    SR_RETURN_IF_ERROR(check_operation(job_id, operation));
    const auto found = jobs_.find(job_id);
    if (found == jobs_.end()) return reports;
    Job& job = *found->second;
    if (job.resolved && operation == job.operation) {
      return Status(Code::kFailedPrecondition, "operation: " + std::to_string(operation) + " of job " +
                                                   std::to_string(job_id) + " is resolved already");
    }
    job.operation = operation;
    job.resolved = false;
    job.frozen_until.reset();
    if (lease) job.frozen_until = std::chrono::steady_clock::now() + *lease;
    job.cut.reset();  // this operation overtakes the cut of the one before
    answered_.notify_all();
    for (const WorkerKey& key : fence) {
      if (const auto worker = job.workers.find(key); worker != job.workers.end()) worker->second.fenced = true;
    }
    for (const auto& [key, worker] : job.workers) {
      reports.push_back({key.first, key.second, worker.window.committed_sequence(), worker.window.committed_step(),
                         worker.window.prepared_sequence(), worker.window.steps_taken(), worker.window.writes_taken()});
    }
    unpark_gone(job, outcomes);
  }
  deliver(outcomes);
  return reports;
}

bool CommitLog::is_frozen(Job& job) {
  if (job.resolved || !job.frozen_until || std::chrono::steady_clock::now() < *job.frozen_until) return !job.resolved;
  job.resolved = true;
  job.cut.reset();
  answered_.notify_all();
  return false;
}

// Ends the prepared commit of a worker that left: it is applied here if any shard has committed it, else forgotten.
void CommitLog::end_worker(std::uint32_t job_id, const JobPtr& job, const Member& member) {
  const WorkerKey key{member.worker_id, member.epoch};
  JobWorker& worker = job->workers[key];
  worker.rank = member.rank;
  worker.first_step = std::max(worker.first_step, member.first_step);
  worker.until_step = member.until_step;
  job->enter_clock(worker);
  auto in_doubt = worker.window.take_prepared(member.final_sequence);
  if (worker.is_restored && !worker.named_a_step) {
    const std::uint64_t last = member.final_sequence - (in_doubt ? 1 : 0);  // which is applied below
    count_lost(job_id, key, false, worker.window.unknown_in(worker.window.committed_sequence() + 1, last));
  }
  stats_.kept_bytes -= worker.window.drop_prepared();
  if (in_doubt) {
    const std::uint64_t sequence = in_doubt->commit.sequence;
    const std::int64_t step = in_doubt->commit.step;
    if (job->staleness == 0u && step != kNoStep) {  // its bytes stay charged
      worker.window.begin(sequence, step);
      worker.window.finish(sequence, step, rows_of(in_doubt->commit));
      ++stats_.commits_accepted;
      job->keep(key, std::move(*in_doubt));
    } else {
      stats_.kept_bytes -= in_doubt->bytes;
      static_cast<void>(apply_unlocked(job, std::move(*in_doubt), true));  // a failure fails the job
    }
  }
  const auto left = job->workers.find(key);  // another RESOLVE may have retired it while its commit was applied
  if (left == job->workers.end()) return;
  left->second.window.start_at(member.until_step + 1);
  job->enter_clock(left->second);
}

// Forgets a worker, but for the answers that it may still ask for.
void CommitLog::retire(std::uint32_t job_id, Job& job, const WorkerKey& worker) {
  retired_.add(job_id, worker, job.workers[worker].window, RetiredWindows::Clock::now());
  writes_.forget({job_id, worker.first, worker.second});
  stats_.kept_bytes -= job.drop(worker);
}

// Makes a job or its next generation: a clock of its own, which knows the epochs of the one before.
CommitLog::JobPtr CommitLog::begin_clock(const JobSpec& spec, std::vector<PullOutcome>& outcomes) {
  const auto fresh = std::make_shared<Job>();
  fresh->completed = spec.first_step - 1;
  fresh->generation = spec.generation;
  const auto saved = saved_.find(spec.job_id);
  if (saved != saved_.end() && saved->second.generation == spec.generation) fresh->completed = saved->second.completed;
  JobPtr& slot = jobs_[spec.job_id];
  if (slot) {
    fresh->epochs = slot->epochs;
    while (!slot->workers.empty()) {
      const WorkerKey worker = slot->workers.begin()->first;
      writes_.forget({spec.job_id, worker.first, worker.second});
      stats_.kept_bytes -= slot->drop(worker);
    }
    unpark_gone(*slot, outcomes);
  } else if (const auto dropped = dropped_.find(spec.job_id); dropped != dropped_.end()) {
    fresh->epochs = dropped->second.epochs;
  }
  for (const Member& member : spec.members) {
    if (member.until_step == kForever) retired_.forget(spec.job_id, {member.worker_id, member.epoch});
  }
  slot = fresh;
  return fresh;
}

// Ends the workers that the spec names as left, and applies the steps that waited for them alone.
Status CommitLog::end_workers(const JobPtr& job, const JobSpec& spec) {
  job->operation = spec.operation;
  for (const Member& member : spec.members) {
    const bool is_here = job->workers.contains({member.worker_id, member.epoch});
    if (is_here && member.until_step != kForever) end_worker(spec.job_id, job, member);
  }
  advance(job);
  // Both let the mutex go while they apply. A FREEZE that came meanwhile keeps its job, and decides anew.
  SR_RETURN_IF_ERROR(check_operation(spec.job_id, spec.operation));
  const auto now = jobs_.find(spec.job_id);
  if (now != jobs_.end() && now->second == job) return Status::ok();
  return Status(Code::kFailedPrecondition, "operation: " + std::to_string(spec.operation) + " of job " +
                                               std::to_string(spec.job_id) +
                                               " was overtaken by one that ended the job");
}

// Makes the members of the spec the workers of a job: new ones get a window, and those that are not named are retired.
void CommitLog::take_members(Job& job, const JobSpec& spec, bool is_lossy) {
  std::set<WorkerKey> named;
  for (const Member& member : spec.members) {
    const WorkerKey key{member.worker_id, member.epoch};
    named.insert(key);
    std::uint32_t& epoch = job.epochs[member.worker_id];
    epoch = std::max(epoch, member.epoch);
    const auto [place, is_new] = job.workers.try_emplace(key);
    JobWorker& worker = place->second;
    worker.rank = member.rank;
    worker.until_step = member.until_step;
    worker.proof = member.proof;
    if (!is_new) {
      job.enter_clock(worker);
      continue;
    }
    const auto answers = retired_.take(spec.job_id, key);
    worker.is_restored = is_lossy && worker.is_live();
    worker.first_step = std::max(member.first_step, job.completed + 1);
    if (const WindowImage* saved = saved_window(spec.job_id, spec.generation, key); saved != nullptr) {
      worker.window = JobWindow(*saved);
      worker.first_step = member.first_step;
      worker.named_a_step = !is_lossy;
    } else {
      worker.window.start_at(worker.is_live() ? worker.first_step : member.until_step + 1);
    }
    worker.window.remember(answers);
    job.enter_clock(worker);
  }
  std::vector<WorkerKey> dropped;
  for (const auto& [key, worker] : job.workers) {
    if (!named.contains(key)) dropped.push_back(key);
  }
  for (const WorkerKey& key : dropped) retire(spec.job_id, job, key);
}

Status CommitLog::set_job(const JobSpec& spec) {
  SR_RETURN_IF_ERROR(check_members(spec));
  std::vector<PullOutcome> outcomes;
  MutexLock lock(mutex_);
  answered_.wait(mutex_, [this]() SR_REQUIRES(mutex_) { return !is_cutting_; });  // bounded, as a cut is
  SR_RETURN_IF_ERROR(check_operation(spec.job_id, spec.operation));
  const auto found = jobs_.find(spec.job_id);
  JobPtr job = found == jobs_.end() ? nullptr : found->second;
  if (job) {
    SR_RETURN_IF_ERROR(check_epochs(*job, spec));
    SR_RETURN_IF_ERROR(end_workers(job, spec));
  }
  bool is_lossy = false;
  if (!job || job->generation != spec.generation) {
    job = begin_clock(spec, outcomes);
    const auto saved = saved_.find(spec.job_id);
    is_lossy = saved != saved_.end() && saved->second.generation == spec.generation && saved->second.lossy;
  }
  job->name = spec.name;
  job->staleness = spec.staleness;
  job->pass_completed();  // a step that waits for all workers asks each of their windows
  job->quorum = spec.quorum;
  job->operation = spec.operation;
  take_members(*job, spec, is_lossy);
  job->resolved = true;
  job->cut.reset();
  unpark_gone(*job, outcomes);
  answered_.notify_all();
  advance(job);
  collect_readable(*job, outcomes);
  lock.unlock();
  deliver(outcomes);
  return Status::ok();
}

Status CommitLog::drop_job(std::uint32_t job_id, std::uint64_t operation) {
  std::vector<PullOutcome> outcomes;
  MutexLock lock(mutex_);
  answered_.wait(mutex_, [this]() SR_REQUIRES(mutex_) { return !is_cutting_; });
  const auto found = find(job_id);
  if (!found.is_ok()) return {Code::kNotFound, found.status().message()};
  SR_RETURN_IF_ERROR(check_operation(job_id, std::max(operation, operation == 0 ? found.value()->operation : 0)));
  Job& job = *found.value();
  while (!job.workers.empty()) retire(job_id, job, job.workers.begin()->first);
  for (ParkedPull& pull : job.parked.take_if([](const ParkedPull&) { return true; })) {
    outcomes.push_back({std::move(pull.ready),
                        Status(Code::kFenced, "job '" + job.name + "' is over; connect anew to begin it again")});
  }
  dropped_[job_id] = {std::max(operation, job.operation), job.name, job.epochs};
  if (dropped_.size() > kMostDropped) {
    dropped_.erase(std::min_element(dropped_.begin(), dropped_.end(), [](const auto& one, const auto& other) {
      return one.second.operation < other.second.operation;
    }));
  }
  jobs_.erase(job_id);
  answered_.notify_all();
  lock.unlock();
  deliver(outcomes);
  return Status::ok();
}

}  // namespace sparserow
