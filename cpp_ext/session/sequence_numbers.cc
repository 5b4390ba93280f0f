#include "session/sequence_numbers.h"

#include <string>

namespace sparserow {

Result<SequenceNumbers::Number> SequenceNumbers::take(Clock::time_point deadline) {
  const MutexLock lock(mutex_);
  const auto is_near = [this]() SR_REQUIRES(mutex_) { return open_.empty() || next_ - *open_.begin() < kMostAhead; };
  if (!ended_.wait_until(mutex_, deadline, is_near)) {
    return Status(Code::kDeadlineExceeded, "session: write " + std::to_string(*open_.begin()) +
                                               " of another thread had not ended before this write's deadline");
  }
  open_.insert(open_.end(), next_);
  return Number(this, next_++);
}

void SequenceNumbers::Number::release() noexcept {
  SequenceNumbers* const series = std::exchange(series_, nullptr);
  if (series == nullptr) return;
  {
    const MutexLock lock(series->mutex_);
    series->open_.erase(value_);
  }
  series->ended_.notify_all();
}

}  // namespace sparserow
