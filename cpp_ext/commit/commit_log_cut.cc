// CommitLog::cut(): takes rows and windows of one instant.
#include <algorithm>

#include "commit/commit_log.h"

namespace sparserow {

CommitLog::JobPtr CommitLog::frozen_job(const CutTarget& target) const {
  const auto found = jobs_.find(target.job_id);
  if (found == jobs_.end() || found->second->resolved || found->second->operation != target.operation) return nullptr;
  return found->second;
}

Result<std::vector<JobImage>> CommitLog::cut(const std::vector<CutTarget>& targets,
                                             std::chrono::steady_clock::time_point deadline,
                                             const std::function<Status()>& take) {
  MutexLock lock(mutex_);
  for (const CutTarget& target : targets) {
    if (const JobPtr job = frozen_job(target); job != nullptr) job->begin_cut(target);
  }
  const auto is_overtaken = [&]() SR_REQUIRES(mutex_) {
    return is_cutting_ || std::any_of(targets.begin(), targets.end(), [&](const CutTarget& target) SR_REQUIRES(mutex_) {
             const JobPtr job = frozen_job(target);
             return job == nullptr || !job->cut;  // a repeated FREEZE ends it
           });
  };
  const auto is_reached = [&]() SR_REQUIRES(mutex_) {
    return std::all_of(targets.begin(), targets.end(), [&](const CutTarget& target) SR_REQUIRES(mutex_) {
      return frozen_job(target)->has_reached_cut();
    });
  };
  const bool in_time =
      answered_.wait_until(mutex_, deadline, [&]() SR_REQUIRES(mutex_) { return is_overtaken() || is_reached(); });
  if (in_time && is_overtaken()) {
    return Status(Code::kUnavailable, "cut: overtaken by a change of a job's members, or by another cut");
  }
  if (!in_time) {
    std::string ids;
    for (const CutTarget& target : targets) {
      for (const std::uint32_t id : frozen_job(target)->missing_for_cut()) {
        ids += (ids.empty() ? "" : ", ") + std::to_string(id);
      }
    }
    return Status(Code::kDeadlineExceeded, "cut: waited for commits of worker ids " + ids);
  }
  is_cutting_ = true;  // no other commit is applied from now on
  Status status;
  if (!answered_.wait_until(mutex_, deadline, [&]() SR_REQUIRES(mutex_) { return applying_ == 0; })) {
    status = Status(Code::kDeadlineExceeded, "cut: commits are being applied for longer than its deadline");
  }
  std::vector<JobImage> images;
  for (const CutTarget& target : targets) images.push_back(jobs_.at(target.job_id)->image(target.job_id));
  if (status.is_ok()) {
    lock.unlock();
    status = take();
    lock.lock();
  }
  is_cutting_ = false;
  answered_.notify_all();
  if (!status.is_ok()) return status;
  return images;
}

void CommitLog::install(const std::vector<JobImage>& images) {
  const MutexLock lock(mutex_);
  saved_.clear();
  retired_.clear();  // they describe rows that are gone
  for (const JobImage& image : images) saved_[image.job_id] = image;
}

const WindowImage* CommitLog::saved_window(std::uint32_t job_id, std::uint32_t generation, const WorkerKey& key) const {
  const auto found = saved_.find(job_id);
  if (found == saved_.end() || found->second.generation != generation) return nullptr;
  for (const WorkerImage& worker : found->second.workers) {
    if (WorkerKey{worker.worker_id, worker.epoch} == key) return &worker.window;
  }
  return nullptr;
}

Result<std::uint64_t> CommitLog::write_unnamed(const std::function<Result<std::uint64_t>()>& write) {
  MutexLock lock(mutex_);
  answered_.wait(mutex_, [this]() SR_REQUIRES(mutex_) {
    return !is_cutting_;
  });  // bounded: a cut takes no longer than its own deadline
  ++applying_;
  lock.unlock();
  auto rows = without_exceptions(write);
  lock.lock();
  --applying_;
  answered_.notify_all();
  return rows;
}

bool Job::is_within_cut(const Commit& commit) const {
  if (!cut) return false;
  if (staleness == 0u && commit.step != kNoStep) return commit.step <= cut->step;
  const auto last = cut->last.find({commit.worker_id, commit.worker_epoch});
  return last != cut->last.end() && commit.sequence <= last->second;
}

void Job::begin_cut(const CutTarget& target) {
  cut = JobCut{.step = target.step, .last = {}, .awaited = {}};
  for (const CutTarget::Last& last : target.workers) cut->last[{last.worker_id, last.epoch}] = last.sequence;
  for (const auto& [key, worker] : each_worker()) {
    if (worker.is_live()) cut->awaited.push_back(key);
  }
}

bool Job::has_reached_cut() {
  // A commit that has ended stays, so that a worker is looked at until it misses none, and then no more.
  while (!cut->awaited.empty()) {
    const auto worker = workers.find(cut->awaited.back());
    ++workers_visited;
    if (worker != workers.end() && is_missing_for_cut(worker->first, worker->second)) return false;
    cut->awaited.pop_back();
  }
  return !open_step_of_cut();
}

bool Job::is_missing_for_cut(const WorkerKey& key, const JobWorker& worker) const {
  if (!cut || !worker.is_live()) return false;
  const bool waits_for_step = !has_quorum() && staleness == 0u && completed < cut->step;
  if (waits_for_step && worker.window.done_step() < cut->step) return true;
  const auto last = cut->last.find(key);
  return last != cut->last.end() && worker.window.finished_sequence() < last->second;
}

std::optional<std::int64_t> Job::open_step_of_cut() const {
  if (!cut || !has_quorum()) return std::nullopt;
  const std::int64_t step = open_step();
  return step <= cut->step ? std::optional(step) : std::nullopt;
}

std::vector<std::uint32_t> Job::missing_for_cut() const {
  std::vector<std::uint32_t> missing;
  if (const auto step = open_step_of_cut()) missing = absent_from(*step);
  for (const auto& [key, worker] : each_worker()) {
    if (is_missing_for_cut(key, worker)) missing.push_back(key.first);
  }
  return missing;
}

JobImage Job::image(std::uint32_t job_id) {
  pass_completed();
  JobImage image{.job_id = job_id, .generation = generation, .completed = completed, .workers = {}};
  for (const auto& [key, worker] : each_worker())
    image.workers.push_back({key.first, key.second, worker.window.image()});
  return image;
}

WindowImage JobWindow::image() const {
  WindowImage image{.forgotten_below = forgotten_below_,
                    .committed_sequence = finished_sequence_,
                    .committed_step = finished_step_,
                    .done_step = done_step_,
                    .answers = {},
                    .aborted = {},
                    .steps_ahead = {ahead_.begin(), ahead_.end()},
                    .steps_taken = counted_steps_,
                    .writes_taken = counted_writes_};
  for (const auto& [sequence, answer] : answers_) {
    if (answer.end == End::kCommitted) image.answers.emplace_back(sequence, answer.rows);
    if (answer.end == End::kAborted) image.aborted.push_back(sequence);
  }
  return image;
}

JobWindow::JobWindow(const WindowImage& image)
    : forgotten_below_(image.forgotten_below),
      finished_sequence_(image.committed_sequence),
      finished_step_(image.committed_step),
      done_step_(image.done_step),
      taken_steps_(image.steps_ahead.begin(), image.steps_ahead.end()),
      ahead_(image.steps_ahead.begin(), image.steps_ahead.end()),
      counted_steps_(image.steps_taken),
      counted_writes_(image.writes_taken) {
  for (const auto& [sequence, rows] : image.answers) answers_[sequence] = {End::kCommitted, rows};
  for (const std::uint64_t sequence : image.aborted) answers_[sequence] = {End::kAborted, 0};
}

}  // namespace sparserow
