// The clocks of a job's workers, kept in order: how many count for a step, and how far the slowest is.
//
// A commit asks both. A scan for each commit would cost the square of the number of workers in every step, so a change
// of one clock is entered here, and the answers cost the logarithm of the number of distinct clocks.
//
// Not thread-safe: the commit log's mutex guards it.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace sparserow {

inline constexpr std::int64_t kForever = INT64_MAX;

// A worker's part in the job's clock. It counts for the steps from first_step to until_step.
struct WorkerClock {
  std::int64_t first_step = 0;
  std::int64_t until_step = kForever;  // else it has left
  std::int64_t done_step = -1;         // its steps up to here are done

  [[nodiscard]] bool is_live() const noexcept { return until_step == kForever; }
  [[nodiscard]] bool counts(std::int64_t step) const noexcept { return first_step <= step && step <= until_step; }
  friend bool operator==(const WorkerClock&, const WorkerClock&) = default;
};

class WorkerClocks {
 public:
  void add(const WorkerClock& clock);
  void remove(const WorkerClock& clock);  // one that was added
  void replace(const WorkerClock& before, const WorkerClock& after);

  [[nodiscard]] std::uint32_t live() const noexcept { return live_; }
  // How many workers count for a step.
  [[nodiscard]] std::uint32_t counted(std::int64_t step) const;
  // The step up to which every live worker is done; kForever when none lives.
  [[nodiscard]] std::int64_t slowest() const noexcept;
  // Whether every worker that counts for a step is done with it.
  [[nodiscard]] bool is_done(std::int64_t step) const;

 private:
  using Steps = std::map<std::int64_t, std::uint32_t>;  // step -> how many workers

  std::uint32_t live_ = 0;
  Steps done_;     // of live workers: done_step
  Steps awaited_;  // of live workers: the first step that counts and is not done
  // The limits of all workers that count for any step, ascending. A change of members shifts them, which is one copy.
  std::vector<std::int64_t> first_steps_;
  std::vector<std::int64_t> until_steps_;
  // Workers that left before they were done: first step not done -> until_step. There are few, because RESOLVE ends a
  // worker that leaves.
  std::multimap<std::int64_t, std::int64_t> unfinished_;
};

}  // namespace sparserow
