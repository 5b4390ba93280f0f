// Job decides here which workers are members of a step, and whether the step takes more
// (docs/internals/consistency.md).
#include <algorithm>

#include "commit/job_clock.h"

namespace sparserow {

std::uint32_t Job::needed(std::int64_t step) const {
  const std::uint32_t all = counted(step);
  return has_quorum() ? std::min(quorum, all) : all;
}

bool Job::is_full(std::int64_t step) const {
  if (!has_quorum()) return false;
  if (step <= std::max(completed, taken)) return true;
  const auto found = steps.find(step);
  return found != steps.end() && found->second.size() >= needed(step);
}

std::int64_t Job::open_step() const {
  std::int64_t step = std::max(completed, taken) + 1;
  while (is_full(step)) ++step;
  return step;
}

Status Job::check_quorum(const Commit& commit) const {
  if (commit.step == kNoStep || !is_full(commit.step)) return Status::ok();
  const auto found = steps.find(commit.step);
  if (found != steps.end() && found->second.contains({commit.worker_id, commit.worker_epoch})) return Status::ok();
  return Status(Code::kOutsideQuorum, "step " + std::to_string(commit.step) + " of job '" + name +
                                          "' has its quorum of " + std::to_string(quorum) + " without worker " +
                                          std::to_string(commit.worker_id) + "; step " + std::to_string(open_step()) +
                                          " still takes members");
}

std::vector<std::uint32_t> Job::absent_from(std::int64_t step) const {
  std::vector<std::uint32_t> absent;
  const auto found = steps.find(step);
  for (const auto& [key, worker] : each_worker()) {
    const bool is_there = found != steps.end() && found->second.contains(key);
    if (worker.is_live() && worker.counts(step) && !is_there) absent.push_back(key.first);
  }
  return absent;
}

}  // namespace sparserow
