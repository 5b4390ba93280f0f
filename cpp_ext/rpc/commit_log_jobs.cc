// Who works for a job: the part of the commit log that the coordinator calls.
#include <set>

#include "rpc/commit_log.h"

namespace sparserow::rpc {

Status CommitLog::set_job(const JobSpec& spec) {
  if (spec.job_id == 0) return Status(Code::kInvalidArgument, "job_id: 0 is not allowed; it means no job");
  std::set<std::uint32_t> named;
  for (const Member& member : spec.members) {
    if (!named.insert(member.worker_id).second) {
      return Status(Code::kInvalidArgument, "members: worker " + std::to_string(member.worker_id) + " is named twice");
    }
  }
  std::vector<PullOutcome> outcomes;
  Lock lock(mutex_);
  JobPtr& slot = jobs_[spec.job_id];
  if (!slot) {
    slot = std::make_shared<Job>();
    slot->completed = spec.first_step - 1;
  }
  const JobPtr job = slot;
  job->name = spec.name;
  job->staleness = spec.staleness;
  for (auto& [worker_id, worker] : job->workers) {
    if (!named.contains(worker_id)) {
      worker.live = false;
      stats_.kept_bytes -= job->drop_kept(worker_id);
    }
  }
  const bool is_running = job->staleness != 0u && job->highest_step() >= 0;
  for (const Member& member : spec.members) {
    JobWorker& worker = job->workers[member.worker_id];
    if (worker.epoch != member.epoch) {
      stats_.kept_bytes -= job->drop_kept(member.worker_id);
      worker = JobWorker{};
    }
    if (!worker.live) {
      worker.last_step = std::max(worker.last_step, job->completed);
      worker.named_a_step = false;
      worker.joined_late = is_running;
    }
    worker.live = true;
    worker.epoch = member.epoch;
    worker.rank = member.rank;
  }
  // A parked pull of a worker that was replaced or left is answered, not left to its deadline.
  for (ParkedPull& pull :
       job->unpark([&job](const ParkedPull& parked) { return !job->admit(parked.worker_id, parked.epoch).is_ok(); })) {
    outcomes.push_back({std::move(pull.ready), job->admit(pull.worker_id, pull.epoch)});
  }
  answered_.notify_all();
  advance(lock, job);
  collect_readable(*job, outcomes);
  lock.unlock();
  deliver(outcomes);
  return Status::ok();
}

Status CommitLog::drop_job(std::uint32_t job_id) {
  std::vector<PullOutcome> outcomes;
  Lock lock(mutex_);
  const auto job = find(job_id);
  if (!job.is_ok()) return job.status();
  for (auto& [worker_id, worker] : job.value()->workers) {
    stats_.kept_bytes -= job.value()->drop_kept(worker_id);
    worker.live = false;
  }
  for (ParkedPull& pull : job.value()->unpark([](const ParkedPull&) { return true; })) {
    outcomes.push_back({std::move(pull.ready), Status(Code::kNotFound, "job '" + job.value()->name + "' was dropped")});
  }
  jobs_.erase(job_id);
  lock.unlock();
  deliver(outcomes);
  return Status::ok();
}

}  // namespace sparserow::rpc
