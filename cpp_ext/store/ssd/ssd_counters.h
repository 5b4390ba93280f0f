// What both engines of the SSD tier count of their batches. Thread-safe; a reader may see one number before the next.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "store/ssd/ssd_tier.h"

namespace sparserow {

class SsdCounters {
 public:
  using Clock = std::chrono::steady_clock;

  void note_read(std::uint64_t keys, std::uint64_t found, std::uint64_t bytes, Clock::time_point start) noexcept {
    rows_read_ += found;
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
    stats.rows_absent = rows_absent_;
    stats.rows_written = rows_written_;
    stats.bytes_read = bytes_read_;
    stats.bytes_written = bytes_written_;
    stats.reads = reads_;
    stats.read_nanoseconds = read_nanoseconds_;
    stats.writes = writes_;
    stats.write_nanoseconds = write_nanoseconds_;
  }

 private:
  static std::uint64_t nanoseconds_since(Clock::time_point start) noexcept {
    return static_cast<std::uint64_t>(std::chrono::nanoseconds(Clock::now() - start).count());
  }

  std::atomic<std::uint64_t> rows_read_{0}, rows_absent_{0}, bytes_read_{0}, reads_{0}, read_nanoseconds_{0};
  std::atomic<std::uint64_t> rows_written_{0}, bytes_written_{0}, writes_{0}, write_nanoseconds_{0};
};

}  // namespace sparserow
