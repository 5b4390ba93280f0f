// The numbers of one session's writes: steps, pushes, assigns and erases have one series.
//
// A shard remembers the last JobWindow::kSequences numbers of a worker and refuses older ones. So no number is given
// that lies kMostAhead or more above one whose write has not ended, in whatever thread that write is.
//
// Thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <set>
#include <utility>

#include "util/mutex.h"
#include "util/status.h"

namespace sparserow {

class SequenceNumbers {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::uint64_t kMostAhead = 512;

  explicit SequenceNumbers(std::uint64_t first) : next_(first) {}

  // The number of a write that has not ended; its end is the end of this object. Must not outlive the series.
  class Number {
   public:
    Number() = default;
    Number(Number&& other) noexcept : series_(std::exchange(other.series_, nullptr)), value_(other.value_) {}
    Number& operator=(Number&& other) noexcept {
      if (this != &other) {
        release();
        series_ = std::exchange(other.series_, nullptr);
        value_ = other.value_;
      }
      return *this;
    }
    ~Number() { release(); }
    [[nodiscard]] std::uint64_t value() const noexcept { return value_; }
    void release() noexcept;

   private:
    friend class SequenceNumbers;
    Number(SequenceNumbers* series, std::uint64_t value) : series_(series), value_(value) {}
    SequenceNumbers* series_ = nullptr;
    std::uint64_t value_ = 0;
  };

  // The next number. DeadlineExceeded when a write that is kMostAhead numbers old does not end in time.
  Result<Number> take(Clock::time_point deadline);

 private:
  Mutex mutex_;
  CondVar ended_;
  std::uint64_t next_ SR_GUARDED_BY(mutex_);
  std::set<std::uint64_t> open_ SR_GUARDED_BY(mutex_);  // of writes that have not ended
};

}  // namespace sparserow
