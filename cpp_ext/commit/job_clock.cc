#include "commit/job_clock.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <utility>

namespace sparserow {

std::vector<JobWindow::Range> JobWorker::name_step(std::int64_t step) {
  if (named_a_step) return {};
  named_a_step = true;
  return start_at(step);
}

std::vector<JobWindow::Range> JobWorker::start_at(std::int64_t step) {
  auto lost = is_restored ? window.missing_before(step) : std::vector<JobWindow::Range>{};
  window.start_at(step);
  return lost;
}

void deliver(std::vector<PullOutcome>& outcomes) {
  for (PullOutcome& outcome : outcomes) outcome.ready(std::move(outcome.status));
  outcomes.clear();
}

Status Job::admit(std::uint32_t worker_id, std::uint32_t epoch) const {
  // Each call is admitted, and few are refused, so that the text is made for those alone.
  const auto who = [&] { return "worker " + std::to_string(worker_id) + " epoch " + std::to_string(epoch); };
  const auto known = epochs.find(worker_id);
  if (known == epochs.end() || epoch > known->second) {
    return Status(Code::kUnavailable, who() + " is not known yet as a member of job '" + name +
                                          "'; it is when the coordinator has notified this shard");
  }
  if (epoch < known->second) {
    return Status(Code::kFenced,
                  who() + " is over; its epoch in job '" + name + "' is " + std::to_string(known->second));
  }
  const auto found = workers.find({worker_id, epoch});
  if (found == workers.end() || !found->second.is_live() || found->second.fenced) {
    return Status(Code::kFenced, who() + " left job '" + name +
                                     "', or its lease has ended (worker_lease of the coordinator); connect anew");
  }
  return failure;
}

const std::map<WorkerKey, JobWorker>& Job::each_worker() const {
  workers_visited += workers.size();
  return workers;
}

std::map<WorkerKey, JobWorker>& Job::each_worker() {
  workers_visited += workers.size();
  return workers;
}

void Job::enter_clock(JobWorker& worker) {
  const WorkerClock clock = worker.clock();
  worker.entered ? clocks.replace(*worker.entered, clock) : clocks.add(clock);
  worker.entered = clock;
}

std::uint32_t Job::counted(std::int64_t step) const { return step == kNoStep ? clocks.live() : clocks.counted(step); }

std::int64_t Job::highest_step() const {
  std::int64_t highest = -1;
  for (const auto& [key, worker] : each_worker()) highest = std::max(highest, worker.window.committed_step());
  return highest;
}

bool Job::readable(std::int64_t step) const {
  if (!staleness) return true;
  if (*staleness == 0) return completed >= step - 1;
  return clocks.slowest() >= step - 1 - static_cast<std::int64_t>(*staleness);
}

std::vector<std::uint32_t> Job::missing_for(std::int64_t step) const {
  std::vector<std::uint32_t> missing;
  if (!staleness) return missing;
  const std::int64_t needed = step - 1 - static_cast<std::int64_t>(*staleness);
  if (staleness == 0u && completed >= needed) return missing;
  if (has_quorum()) return absent_from(completed + 1);
  for (const auto& [key, worker] : each_worker()) {
    if (worker.is_live() && worker.window.done_step() < needed) missing.push_back(key.first);
  }
  return missing;
}

std::uint64_t Job::steps_behind(std::int64_t step) const {
  std::int64_t applied = has_quorum() ? kForever : clocks.slowest();
  if (staleness == 0u) applied = std::min(applied, completed);
  return static_cast<std::uint64_t>(std::max<std::int64_t>(0, step - 1 - applied));
}

std::string Job::waited_for(const ParkedPull& pull, std::chrono::steady_clock::time_point now) const {
  const std::int64_t needed = pull.step - 1 - static_cast<std::int64_t>(staleness.value_or(0));
  std::string ids;
  for (const std::uint32_t id : missing_for(pull.step)) {
    ids += (ids.empty() ? "" : ", ") + std::to_string(id);
  }
  std::array<char, 32> seconds{};
  std::snprintf(seconds.data(), seconds.size(), "%.1f", std::chrono::duration<double>(now - pull.since).count());
  return "pull of step " + std::to_string(pull.step) + " waited " + seconds.data() + " s for commits of step " +
         std::to_string(needed) + (ids.empty() ? std::string(" to be applied") : " from worker ids " + ids);
}

std::optional<std::int64_t> Job::next_complete_step() const {
  if (staleness != 0u || steps.empty()) return std::nullopt;
  const std::int64_t step = steps.begin()->first;
  if (has_quorum()) return step == completed + 1 && is_full(step) ? std::optional(step) : std::nullopt;
  return clocks.is_done(step) ? std::optional(step) : std::nullopt;
}

void Job::keep(const WorkerKey& key, Kept kept) {
  kept_bytes += kept.bytes;
  steps[kept.commit.step].emplace(key, std::move(kept));
}

std::vector<Kept> Job::take_step(std::int64_t step) {
  const auto found = steps.find(step);
  std::vector<std::pair<std::uint32_t, WorkerKey>> order;  // (rank, worker)
  for (const auto& [key, kept] : found->second) order.emplace_back(workers[key].rank, key);
  std::sort(order.begin(), order.end());
  std::vector<Kept> commits;
  for (const auto& [rank, key] : order) {
    commits.push_back(std::move(found->second[key]));
    kept_bytes -= commits.back().bytes;
  }
  steps.erase(found);
  taken = std::max(taken, step);
  return commits;
}

void Job::pass_completed() {
  if (!has_quorum()) return;
  for (auto& [key, worker] : each_worker()) {
    worker.window.start_at(completed + 1);
    enter_clock(worker);
  }
}

void Job::skip_empty_steps() {
  if (has_quorum()) return;  // a worker that is outside of a step has not passed it
  // Their workers left, or they lie before the first step that the job named.
  if (clocks.live() == 0) return;
  const std::int64_t pending = steps.empty() ? kForever : steps.begin()->first - 1;
  completed = std::max(completed, std::min(pending, clocks.slowest()));
}

std::uint64_t Job::drop(const WorkerKey& key) {
  const auto worker = workers.find(key);
  if (worker == workers.end()) return 0;
  std::uint64_t bytes = worker->second.window.drop_prepared();
  for (auto& [step, commits] : steps) {
    const auto found = commits.find(key);
    if (found == commits.end()) continue;
    bytes += found->second.bytes;
    kept_bytes -= found->second.bytes;
    commits.erase(found);
  }
  std::erase_if(steps, [](const auto& entry) { return entry.second.empty(); });
  if (worker->second.entered) clocks.remove(*worker->second.entered);
  workers.erase(worker);
  return bytes;
}

}  // namespace sparserow
