// Many reads of one file at once by io_uring, where the kernel allows it: containers often do not.
//
// Made for reads that the disk has to be asked for. Thread-safe: each call takes a ring of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "util/mutex.h"

namespace sparserow {

struct FileRead {
  std::uint64_t offset = 0;
  std::span<std::byte> to;
  int result = 0;  // bytes, or -errno; fewer bytes than asked for are no end of the file
};

class UringReads {
 public:
  // Null where the kernel has no io_uring, or does not allow it to this process.
  static std::unique_ptr<UringReads> open();
  UringReads(const UringReads&) = delete;
  UringReads& operator=(const UringReads&) = delete;
  ~UringReads();

  // Fills the result of each read. False when no ring was to be had, and nothing was read.
  bool run(int file, std::span<FileRead> reads);

 private:
  class Ring;

  explicit UringReads(std::unique_ptr<Ring> first);
  std::unique_ptr<Ring> take();

  Mutex mutex_;
  std::vector<std::unique_ptr<Ring>> idle_ SR_GUARDED_BY(mutex_);
};

}  // namespace sparserow
