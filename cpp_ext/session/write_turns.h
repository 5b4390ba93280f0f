// Turns among the writes of one session that have two phases.
//
// A shard keeps one prepared commit of a worker: a later PREPARE takes its place. So the PREPARE of a write leaves
// only when the write before it has ended, in whatever thread it was made. Turns are given in the order of arrival,
// so that threads that push by key do not keep a step from its commit.
//
// Thread-safe.
#pragma once

#include <chrono>
#include <functional>
#include <list>

#include "util/mutex.h"
#include "util/status.h"

namespace sparserow {

class WriteTurns {
 public:
  using Clock = std::chrono::steady_clock;

  // Waits for the turn until the deadline, and longer while `grace()` lies ahead. DeadlineExceeded leaves no trace.
  Status take(Clock::time_point deadline, const std::function<Clock::time_point()>& grace);
  // Ends the turn, from any thread. The caller has it.
  void give_back() noexcept;

 private:
  struct Waiter {
    CondVar wake;
  };

  Mutex mutex_;
  bool is_taken_ SR_GUARDED_BY(mutex_) = false;
  std::list<Waiter*> waiters_ SR_GUARDED_BY(mutex_);  // in the order of arrival
};

}  // namespace sparserow
