// What both engines of the SSD tier count of their batches. Thread-safe; a reader may see one number before the next.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "store/ssd/ssd_tier.h"
#include "util/mutex.h"

namespace sparserow {

// The share of the rows read lately that had to wait for the disk. Older reads count less and less.
class RecentWaits {
 public:
  void note(std::uint64_t rows, std::uint64_t waited) noexcept {
    const MutexLock lock(mutex_);
    rows_ += rows;
    waited_ += waited;
    for (; rows_ > kRecent; rows_ /= 2) waited_ /= 2;
  }
  // 1 while too few rows were read to know.
  [[nodiscard]] double share() const noexcept {
    const MutexLock lock(mutex_);
    return rows_ < kFew ? 1.0 : static_cast<double>(waited_) / static_cast<double>(rows_);
  }

 private:
  static constexpr std::uint64_t kRecent = 8192;
  static constexpr std::uint64_t kFew = 64;
  mutable Mutex mutex_;
  std::uint64_t rows_ SR_GUARDED_BY(mutex_) = 0;
  std::uint64_t waited_ SR_GUARDED_BY(mutex_) = 0;  // of them
};

class SsdCounters {
 public:
  using Clock = std::chrono::steady_clock;

  // waited: of the rows, those that the disk had to be asked for.
  void note_read(std::uint64_t keys, std::uint64_t found, std::uint64_t waited, std::uint64_t bytes,
                 Clock::time_point start) noexcept {
    recent_.note(found, std::min(waited, found));
    rows_read_ += found;
    rows_waited_ += std::min(waited, found);
    rows_absent_ += keys - std::min(found, keys);
    bytes_read_ += bytes;
    ++reads_;
    read_nanoseconds_ += nanoseconds_since(start);
  }
  void note_write(const SsdBatch& batch, Clock::time_point start) noexcept {
    rows_written_ += batch.writes().size();
    bytes_written_ += batch.bytes();
    ++writes_;
    write_nanoseconds_ += nanoseconds_since(start);
  }
  void fill(SsdStats& stats) const noexcept {
    stats.rows_read = rows_read_;
    stats.rows_waited = rows_waited_;
    stats.rows_absent = rows_absent_;
    stats.rows_written = rows_written_;
    stats.bytes_read = bytes_read_;
    stats.bytes_written = bytes_written_;
    stats.reads = reads_;
    stats.read_nanoseconds = read_nanoseconds_;
    stats.writes = writes_;
    stats.write_nanoseconds = write_nanoseconds_;
  }

  [[nodiscard]] double waited_share() const noexcept { return recent_.share(); }

 private:
  static std::uint64_t nanoseconds_since(Clock::time_point start) noexcept {
    return static_cast<std::uint64_t>(std::chrono::nanoseconds(Clock::now() - start).count());
  }

  RecentWaits recent_;
  std::atomic<std::uint64_t> rows_read_{0}, rows_waited_{0}, rows_absent_{0}, bytes_read_{0}, reads_{0},
      read_nanoseconds_{0};
  std::atomic<std::uint64_t> rows_written_{0}, bytes_written_{0}, writes_{0}, write_nanoseconds_{0};
};

}  // namespace sparserow
