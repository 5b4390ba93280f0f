// What the commit log's mutex costs as workers are added, for `sparserow bench scale`: a step of many workers, in one
// thread and without rows, so that nothing else is measured.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <optional>

#include "commit/commit_log.h"
#include "shared_errors.h"
#include "store/store.h"

namespace py = pybind11;

namespace sparserow::bindings {
namespace {

constexpr std::uint32_t kMostWorkers = 100'000;
constexpr std::uint32_t kStride = 7919;  // a prime: workers commit in another order than they joined

using Clock = std::chrono::steady_clock;

// A step of all workers: each asks whether it may read, then each commits. Adds what the commits took.
Status take_step(CommitLog& log, std::uint32_t workers, std::int64_t step, Clock::duration& commits) {
  for (std::uint32_t worker = 1; worker <= workers; ++worker) {
    log.when_readable(1, worker, 1, step, Clock::now() + std::chrono::seconds(60), [](const Status&) {});
    static_cast<void>(log.steps_behind(1, step));
  }
  const Clock::time_point begin = Clock::now();
  for (std::uint32_t i = 0; i < workers; ++i) {
    Commit commit;
    commit.job_id = 1;
    commit.worker_id = 1 + static_cast<std::uint32_t>(std::uint64_t{i} * kStride % workers);
    commit.worker_epoch = 1;
    commit.sequence = static_cast<std::uint64_t>(step) + 1;
    commit.step = step;
    SR_RETURN_IF_ERROR(log.commit(std::move(commit), false).status());
  }
  commits += Clock::now() - begin;
  return Status::ok();
}

double empty_commit_seconds(std::uint32_t workers, std::int64_t steps, std::optional<std::uint32_t> staleness) {
  if (workers == 0 || workers > kMostWorkers || workers % kStride == 0 || steps < 2) {
    raise_if_error(
        {Code::kInvalidArgument, "empty_commit_seconds: workers in [1, 100000] and no multiple of 7919, steps from 2"});
  }
  const py::gil_scoped_release released;
  const auto store = value_or_raise(Store::create({}));
  CommitLog log(*store);
  JobSpec spec;
  spec.job_id = 1;
  spec.name = "bench/scale";
  spec.staleness = staleness;
  for (std::uint32_t worker = 1; worker <= workers; ++worker) {
    spec.members.push_back({.worker_id = worker, .epoch = 1, .rank = worker});
  }
  raise_if_error(log.set_job(spec));
  Clock::duration commits{};
  for (std::int64_t step = 0; step < steps; ++step) {
    raise_if_error(take_step(log, workers, step, commits));
    if (step == 0) commits = {};  // windows are made
  }
  const std::chrono::duration<double> took = commits;
  return took.count() / static_cast<double>(workers) / static_cast<double>(steps - 1);
}

}  // namespace

void bind_commit_load(py::module_& module) {
  module.def("empty_commit_seconds", &empty_commit_seconds, py::arg("workers"), py::arg("steps"), py::arg("staleness"));
}

}  // namespace sparserow::bindings
