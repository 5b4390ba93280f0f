// CommitLog's part for pulls: it parks those that wait for the clock.
#include <algorithm>
#include <iterator>

#include "commit/commit_log.h"
#include "util/not_allowed.h"

namespace sparserow {

void CommitLog::note_staleness(const Job& job, std::int64_t step) {
  const std::uint64_t behind = job.steps_behind(step);
  ++stats_.pulls_clocked;
  stats_.staleness_sum += behind;
  stats_.staleness_max = std::max(stats_.staleness_max, behind);
}

void CommitLog::collect_readable(Job& job, std::vector<PullOutcome>& outcomes) {
  for (ParkedPull& pull : job.parked.take_readable([&job](std::int64_t step) { return job.readable(step); })) {
    note_staleness(job, pull.step);
    outcomes.push_back({std::move(pull.ready), Status::ok()});
  }
}

void CommitLog::when_readable(std::uint32_t job_id, std::uint32_t worker_id, std::uint32_t epoch, std::int64_t step,
                              std::chrono::steady_clock::time_point deadline, std::function<void(Status)> ready,
                              const void* owner) {
  std::vector<PullOutcome> outcomes;
  MutexLock lock(mutex_);
  const auto job = find(job_id);
  Status status = job.status();
  if (status.is_ok()) status = job.value()->admit(worker_id, epoch);
  if (status.is_ok() && step < 0) {
    status = not_allowed("step", step, ">= 0");
  }
  if (status.is_ok()) {
    JobWorker& worker = job.value()->workers[{worker_id, epoch}];
    if (!worker.named_a_step && job.value()->staleness && !job.value()->has_quorum()) {
      // Within a bound a pull may be made ahead; then the first commit says which step is the first. The worker goes on
      // while the COMMIT of what it prepared is under way, so that its pulls ahead may arrive before it.
      const auto ahead = static_cast<std::int64_t>(*job.value()->staleness);
      const std::int64_t prepared = worker.window.prepared_step();
      const std::int64_t first = prepared == kNoStep ? step - ahead : std::min(step - ahead, prepared);
      count_lost(job_id, {worker_id, epoch}, true, ahead == 0 ? worker.name_step(step) : worker.start_at(first));
      job.value()->enter_clock(worker);
      advance(job.value());
      collect_readable(*job.value(), outcomes);
    }
    if (job.value()->readable(step)) {
      note_staleness(*job.value(), step);
    } else if (const auto now = std::chrono::steady_clock::now(); deadline <= now) {
      const ParkedPull pull{worker_id, epoch, step, now, deadline, nullptr, owner};
      status = Status(Code::kDeadlineExceeded, job.value()->waited_for(pull, now));
    } else {
      ++stats_.pulls_parked;
      job.value()->parked.add({worker_id, epoch, step, now, deadline, std::move(ready), owner});
      ready = nullptr;
    }
  }
  if (ready) outcomes.push_back({std::move(ready), std::move(status)});
  lock.unlock();
  deliver(outcomes);
}

void CommitLog::forget(const void* owner) {
  std::vector<ParkedPull> dropped;  // destroyed outside of the lock: it owns whatever the callback holds
  const MutexLock lock(mutex_);
  for (auto& [job_id, job] : jobs_) {
    auto theirs = job->parked.take_if([owner](const ParkedPull& pull) { return pull.owner == owner; });
    std::move(theirs.begin(), theirs.end(), std::back_inserter(dropped));
  }
}

std::uint64_t CommitLog::writes_by_others(std::span<const std::uint32_t> table_ids, std::uint32_t job_id,
                                          const WorkerKey& worker) {
  const MutexLock lock(mutex_);
  const auto job = find(job_id);
  const bool is_member = job.is_ok() && job.value()->admit(worker.first, worker.second).is_ok();
  const WriteCounts::Writer writer{job_id, worker.first, worker.second};
  return writes_.by_others(table_ids, is_member ? &writer : nullptr);
}

void CommitLog::expire(std::chrono::steady_clock::time_point now) {
  std::vector<PullOutcome> outcomes;
  {
    const MutexLock lock(mutex_);
    for (auto& [job_id, job] : jobs_) {
      for (ParkedPull& pull : job->parked.take_expired(now)) {
        outcomes.push_back({std::move(pull.ready), Status(Code::kDeadlineExceeded, job->waited_for(pull, now))});
      }
    }
  }
  deliver(outcomes);
}

void CommitLog::fail_parked(const Status& status) {
  std::vector<PullOutcome> outcomes;
  {
    const MutexLock lock(mutex_);
    for (auto& [job_id, job] : jobs_) {
      for (ParkedPull& pull : job->parked.take_if([](const ParkedPull&) { return true; })) {
        outcomes.push_back({std::move(pull.ready), status});
      }
    }
  }
  deliver(outcomes);
}

}  // namespace sparserow
