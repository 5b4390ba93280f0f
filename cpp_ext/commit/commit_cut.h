// A cut of the commit log: which commits belong to it, and what is known of each worker at that instant.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "commit/commit.h"

namespace sparserow {

// Where a held job is cut, as the coordinator named it from all shards' reports. Commits up to it are still taken.
struct CutTarget {
  std::uint32_t job_id = 0;
  std::uint64_t operation = 0;  // of the FREEZE
  std::int64_t step = kNoStep;  // staleness 0: the highest step accepted anywhere
  struct Last {                 // else, and of commits without a step: the last one accepted anywhere
    std::uint32_t worker_id = 0;
    std::uint32_t epoch = 0;
    std::uint64_t sequence = 0;
  };
  std::vector<Last> workers;
};

// A worker's window (job_window.h), as a cut keeps it.
struct WindowImage {
  std::uint64_t forgotten_below = 0;
  std::uint64_t committed_sequence = 0;
  std::int64_t committed_step = kNoStep;
  std::int64_t done_step = -1;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> answers;  // (sequence, rows)
  std::vector<std::uint64_t> aborted;                            // sequences
  std::vector<std::int64_t> steps_ahead;                         // done beyond done_step
  std::uint64_t steps_taken = 0;                                 // commits of steps that were taken, of this clock
  std::uint64_t writes_taken = 0;                                // and writes without a step
};

struct WorkerImage {
  std::uint32_t worker_id = 0;
  std::uint32_t epoch = 0;
  WindowImage window;
};

struct JobImage {
  std::uint32_t job_id = 0;
  std::uint32_t generation = 0;  // the clock that the steps are of
  std::int64_t completed = -1;   // staleness 0
  bool lossy = false;            // of one shard restored alone: the workers have taken later steps meanwhile
  std::vector<WorkerImage> workers;
};

}  // namespace sparserow
