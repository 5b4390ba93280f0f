// The file of a page log, in segments: reserved before they are filled, written whole, read by records.
//
// Thread-safe for different segments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "store/ssd/pages/uring_reads.h"
#include "store/ssd/ssd_readers.h"
#include "util/status.h"

namespace sparserow {

class PageFile {
 public:
  enum class Wait { kNo, kYes };
  enum class Got { kAll, kWouldWait, kNotAll };

  // Makes an empty file. kInvalidArgument when it cannot be made.
  static Result<std::unique_ptr<PageFile>> make(const std::string& path, bool with_uring = true);
  PageFile(const PageFile&) = delete;
  PageFile& operator=(const PageFile&) = delete;
  ~PageFile();

  // Takes the segment's bytes on the disk, where the file system can. kResourceExhausted names why not.
  Status reserve(std::uint32_t segment);
  Status write(std::uint32_t segment, std::span<const std::byte> bytes);
  // The bytes at a place of a segment. kWouldWait with Wait::kNo alone: the disk would have to be asked. kNotAll: errno
  // says why, and is 0 at the end of the file.
  Got read(std::uint32_t segment, std::size_t at, std::span<std::byte> out, Wait wait) const noexcept;
  // The same for many that the disk has to be asked for, at once: by io_uring, else by the threads of `readers`. Calls
  // failed(index, error) for each that was not read; error is 0 at the end of the file.
  struct Part {
    std::uint32_t segment = 0;
    std::size_t at = 0;
    std::span<std::byte> to;
  };
  void read_late(std::span<const Part> parts, SsdReaders& readers,
                 const std::function<void(std::size_t index, int error)>& failed);
  // Gives the segment's bytes back to the disk, where the file system can.
  void release(std::uint32_t segment) noexcept;

 private:
  PageFile(int file, bool with_uring) : file_(file), uring_(with_uring ? UringReads::open() : nullptr) {}

  const int file_;
  const std::unique_ptr<UringReads> uring_;  // null where the kernel does not allow it
};

}  // namespace sparserow
