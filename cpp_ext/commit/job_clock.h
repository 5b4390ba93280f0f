// One job as a shard sees it: its workers, their clocks, and the pulls that wait for them.
//
// Reads: at staleness 0 a pull of step t waits until step t-1 is applied, at k until every live worker
// has committed step t-1-k; an async job has no clock.
//
// Not thread-safe: the commit log's mutex guards it. No callback is called here: pulls that may go on are
// handed out as outcomes, to be delivered once the mutex is free.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "commit/job_window.h"
#include "commit/parked_pulls.h"
#include "commit/worker_clocks.h"
#include "util/status.h"

namespace sparserow {

using WorkerKey = std::pair<std::uint32_t, std::uint32_t>;  // (worker id, epoch)
using ProofDigest = std::array<std::byte, 32>;              // SHA-256 of a worker's proof

// One epoch of a worker. It counts for the steps from first_step to until_step: in N of 1/N, and among the
// workers that a step waits for.
struct JobWorker {
  std::uint32_t rank = 0;
  std::int64_t first_step = 0;
  std::int64_t until_step = kForever;  // else it has left
  bool fenced = false;                 // says nothing any more; the coordinator is deciding what becomes of it
  bool named_a_step = false;
  bool is_restored = false;  // it had taken later steps than its window knows of, before this shard was restored
  ProofDigest proof{};       // of what its connections must show; zeros: none
  JobWindow window;
  std::optional<WorkerClock> entered;  // its clock as the job's clocks have it

  [[nodiscard]] WorkerClock clock() const noexcept { return {first_step, until_step, window.done_step()}; }
  [[nodiscard]] bool is_live() const noexcept { return until_step == kForever; }
  [[nodiscard]] bool counts(std::int64_t step) const noexcept { return first_step <= step && step <= until_step; }
  // The worker's first step starts its clock there, so no step waits for commits that it never meant to make. Returns
  // the steps that a restored worker loses by that: those before it that were neither saved nor sent again.
  std::vector<JobWindow::Range> name_step(std::int64_t step);
  std::vector<JobWindow::Range> start_at(std::int64_t step);
};

// The cut for which a job is held.
struct JobCut {
  std::int64_t step = kNoStep;              // as in CutTarget
  std::map<WorkerKey, std::uint64_t> last;  // the last sequence of each worker, as in CutTarget
  std::vector<WorkerKey> awaited;           // live workers whose commits may be missing
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
  std::uint32_t quorum = 0;      // staleness 0: members of a step; 0: all workers that count for it
  std::uint32_t generation = 0;  // another one is another clock
  std::uint64_t operation = 0;   // the newest that was obeyed
  bool resolved = true;          // false between FREEZE and RESOLVE: no new commit is taken
  std::optional<std::chrono::steady_clock::time_point> frozen_until;  // of a hold that ends by itself
  std::map<std::uint32_t, std::uint32_t> epochs;                      // worker -> its newest; never goes down
  std::map<WorkerKey, JobWorker> workers;                             // live ones, and those that left and still count
  WorkerClocks clocks;                                                // of all workers
  std::map<std::int64_t, std::map<WorkerKey, Kept>> steps;            // staleness 0: step -> worker -> commit
  std::uint64_t kept_bytes = 0;                                       // of the commits in `steps`
  std::int64_t completed = -1;                                        // staleness 0: reduced and applied up to here
  std::int64_t taken = -1;                                            // of those: up to here at least being applied
  bool advancing = false;                                             // one thread reduces at a time
  Status failure;  // of a step that was acknowledged and could not be applied: sticky, every later call gets it
  ParkedPulls parked;
  std::optional<JobCut> cut;                  // while it is held for one
  mutable std::uint64_t workers_visited = 0;  // by each_worker()

  // All workers, for what must look at each of them. A commit and a pull must not, so that the visits are counted.
  [[nodiscard]] const std::map<WorkerKey, JobWorker>& each_worker() const;
  [[nodiscard]] std::map<WorkerKey, JobWorker>& each_worker();
  // Enters a worker's clock into the job's. To be called when its first, last or done step may have changed.
  void enter_clock(JobWorker& worker);

  void begin_cut(const CutTarget& target);
  // Whether a commit belongs to the cut of a frozen job.
  [[nodiscard]] bool is_within_cut(const Commit& commit) const;
  // Whether all that belongs to the cut is taken. A later call looks only at workers that missed commits.
  [[nodiscard]] bool has_reached_cut();
  // Ids of the live workers whose commits the cut still waits for.
  [[nodiscard]] std::vector<std::uint32_t> missing_for_cut() const;
  [[nodiscard]] bool is_missing_for_cut(const WorkerKey& key, const JobWorker& worker) const;
  // The lowest step of the cut that has not its quorum; nullopt when there is none.
  [[nodiscard]] std::optional<std::int64_t> open_step_of_cut() const;
  [[nodiscard]] JobImage image(std::uint32_t job_id);

  // Whether this epoch of a worker may call: kUnavailable when this shard has not heard of it yet, kFenced
  // when it is over, or the sticky failure.
  [[nodiscard]] Status admit(std::uint32_t worker_id, std::uint32_t epoch) const;
  // N of 1/N: workers that count for a step; of kNoStep those that live.
  [[nodiscard]] std::uint32_t counted(std::int64_t step) const;
  // The highest step that a worker has committed; -1 before the first.
  [[nodiscard]] std::int64_t highest_step() const;

  [[nodiscard]] bool readable(std::int64_t step) const;
  // Ids of the workers that a pull of `step` waits for, ascending.
  [[nodiscard]] std::vector<std::uint32_t> missing_for(std::int64_t step) const;
  // Steps between what a pull of `step` asks for and what is applied.
  [[nodiscard]] std::uint64_t steps_behind(std::int64_t step) const;
  // A text for the user: how long a parked pull has waited, and for which workers.
  [[nodiscard]] std::string waited_for(const ParkedPull& pull, std::chrono::steady_clock::time_point now) const;

  // Then a worker does not say where its clock starts: a step waits for no worker by name.
  [[nodiscard]] bool has_quorum() const noexcept { return quorum != 0; }
  // How many commits a step waits for: of all counted workers, or of the quorum where more count.
  [[nodiscard]] std::uint32_t needed(std::int64_t step) const;
  // Whether a step takes no more members; false without a quorum. A full step stays full.
  [[nodiscard]] bool is_full(std::int64_t step) const;
  [[nodiscard]] std::int64_t open_step() const;  // the lowest one that is not full
  // kOutsideQuorum when a step is full without this worker.
  [[nodiscard]] Status check_quorum(const Commit& commit) const;
  // The live workers that have no commit of this step; for jobs with a quorum.
  [[nodiscard]] std::vector<std::uint32_t> absent_from(std::int64_t step) const;

  // Keeps a commit until its step is complete.
  void keep(const WorkerKey& key, Kept kept);
  // The oldest pending step for which every counted worker has committed; nullopt when there is none.
  [[nodiscard]] std::optional<std::int64_t> next_complete_step() const;
  // Takes the commits of a step, in rank order.
  std::vector<Kept> take_step(std::int64_t step);
  // A step is applied. With a quorum it is over for the workers outside as well, whose windows learn it later: when
  // they commit, or by pass_completed().
  void complete(std::int64_t step) { completed = std::max(completed, step); }
  void pass_completed();
  // Steps that every live worker has passed, and that have no commits, are complete as well.
  void skip_empty_steps();
  // Forgets a worker with what it has prepared and what waits for its step; returns its bytes.
  std::uint64_t drop(const WorkerKey& key);
};

}  // namespace sparserow
