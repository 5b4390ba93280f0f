// One job as a shard sees it: its workers, their clocks, and the pulls that wait for them.
//
// Who may read: at staleness 0 a pull of step t waits until step t-1 is applied, at k until every live worker
// has committed step t-1-k; an async job has no clock.
//
// Not thread-safe: the commit log's mutex guards it. No callback is called here: pulls that may go on are
// handed out as outcomes, to be delivered once the mutex is free.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "rpc/job_window.h"
#include "util/status.h"

namespace sparserow::rpc {

struct JobWorker {
  std::uint32_t epoch = 0;
  std::uint32_t rank = 0;
  bool live = false;
  bool named_a_step = false;
  bool joined_late = false;     // came to a running job without barrier: its clock begins with the step that it names
  std::int64_t last_step = -1;  // its steps up to here are accepted (staleness 0) or applied
  JobWindow window;

  // Its first step starts its clock there: what it never meant to commit holds nobody.
  void name_step(std::int64_t step);
  // Whether pulls wait for it, and N counts it.
  [[nodiscard]] bool counts() const { return live && (named_a_step || !joined_late); }
};

struct ParkedPull {
  std::uint32_t worker_id = 0;
  std::uint32_t epoch = 0;
  std::int64_t step = 0;
  std::chrono::steady_clock::time_point since;
  std::chrono::steady_clock::time_point deadline;
  std::function<void(Status)> ready;
  const void* owner = nullptr;
};

// A parked pull with its answer.
struct PullOutcome {
  std::function<void(Status)> ready;
  Status status;
};
void deliver(std::vector<PullOutcome>& outcomes);

struct Job {
  std::string name;
  std::optional<std::uint32_t> staleness;
  std::map<std::uint32_t, JobWorker> workers;                   // also those who left: their windows stay
  std::map<std::int64_t, std::map<std::uint32_t, Kept>> steps;  // staleness 0: step -> worker -> commit
  std::int64_t completed = -1;                                  // staleness 0: reduced and applied up to here
  bool advancing = false;                                       // one thread reduces at a time
  Status failure;  // of a step that was acknowledged and could not be applied: sticky, every later call gets it
  std::vector<ParkedPull> parked;

  // Whether a worker of this epoch may call; kFenced, kFailedPrecondition, or the sticky failure.
  [[nodiscard]] Status admit(std::uint32_t worker_id, std::uint32_t epoch) const;
  [[nodiscard]] std::uint32_t live_count() const;  // of workers that count
  // The highest step that a worker has committed; -1 before the first.
  [[nodiscard]] std::int64_t highest_step() const;

  [[nodiscard]] bool readable(std::int64_t step) const;
  // Ids of the workers that a pull of `step` waits for, ascending.
  [[nodiscard]] std::vector<std::uint32_t> missing_for(std::int64_t step) const;
  // Steps between what a pull of `step` asks for and what is applied.
  [[nodiscard]] std::uint64_t steps_behind(std::int64_t step) const;
  // How long and for whom a parked pull has waited, for its user.
  [[nodiscard]] std::string waited_for(const ParkedPull& pull, std::chrono::steady_clock::time_point now) const;

  // Takes out the parked pulls for which `leaves` is true.
  std::vector<ParkedPull> unpark(const std::function<bool(const ParkedPull&)>& leaves);

  // The first step of `steps` when every live worker has passed it; nullopt else.
  [[nodiscard]] std::optional<std::int64_t> next_complete_step() const;
  // Takes the commits of a step, in rank order.
  std::vector<Kept> take_step(std::int64_t step);
  // Steps that every live worker has passed and nobody has commits for are complete as well.
  void skip_empty_steps();
  // Forgets what a worker has prepared and what waits for its step; returns its bytes.
  std::uint64_t drop_kept(std::uint32_t worker_id);
};

}  // namespace sparserow::rpc
