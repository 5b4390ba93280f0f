#include "session/write_turns.h"

#include <algorithm>

namespace sparserow {

Status WriteTurns::take(Clock::time_point deadline, const std::function<Clock::time_point()>& grace) {
  const MutexLock lock(mutex_);
  if (!is_taken_ && waiters_.empty()) {
    is_taken_ = true;
    return Status::ok();
  }
  Waiter self;
  const auto place = waiters_.insert(waiters_.end(), &self);
  const auto is_next = [&]() SR_REQUIRES(mutex_) { return !is_taken_ && waiters_.front() == &self; };
  bool has_turn = self.wake.wait_until(mutex_, deadline, is_next);
  while (!has_turn && Clock::now() < grace()) has_turn = self.wake.wait_until(mutex_, grace(), is_next);
  waiters_.erase(place);
  if (has_turn) {
    is_taken_ = true;
    return Status::ok();
  }
  if (!is_taken_ && !waiters_.empty()) waiters_.front()->wake.notify_one();
  return {Code::kDeadlineExceeded, "session: a write of another thread had not ended before this write's deadline"};
}

void WriteTurns::give_back() noexcept {
  const MutexLock lock(mutex_);
  is_taken_ = false;
  if (!waiters_.empty()) waiters_.front()->wake.notify_one();
}

}  // namespace sparserow
