// Turns among the writes of one session that have two phases.
//
// A shard keeps one prepared commit of a worker: a later PREPARE takes its place. So the PREPARE of a write leaves
// only when the write before it has ended, in whatever thread it was made. Turns are given in the order of arrival,
// so that threads that push by key do not keep a step from its commit.
//
// Thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <mutex>

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
    std::condition_variable wake;
  };

  std::mutex mutex_;
  bool is_taken_ = false;       // guarded by mutex_
  std::list<Waiter*> waiters_;  // guarded by mutex_, in the order of arrival
};

}  // namespace sparserow
