// The file of a page log, in segments: reserved before they are filled, written whole, read by records.
//
// With direct I/O the system's cache has none of it: every read waits for the disk and takes whole units of 4 KiB, by
// way of aligned memory where the caller's is not aligned.
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

  struct Access {
    bool is_direct = false;
    bool with_uring = true;  // where the kernel allows it
  };

  // Makes an empty file. kInvalidArgument when it cannot be made, kFailedPrecondition when its file system has no
  // direct I/O.
  static Result<std::unique_ptr<PageFile>> make(const std::string& path, Access access);
  PageFile(const PageFile&) = delete;
  PageFile& operator=(const PageFile&) = delete;
  ~PageFile();

  // Takes the segment's bytes on the disk, where the file system can. kResourceExhausted names why not.
  Status reserve(std::uint32_t segment);
  Status write(std::uint32_t segment, std::span<const std::byte> bytes);
  // The bytes at a place of a segment. kWouldWait with Wait::kNo alone: the disk would have to be asked, as always with
  // direct I/O. kNotAll: errno says why, and is 0 at the end of the file.
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
  PageFile(int file, Access access)
      : file_(file), is_direct_(access.is_direct), uring_(access.with_uring ? UringReads::open() : nullptr) {}
  Got read_units(std::uint32_t segment, std::size_t at, std::span<std::byte> out) const noexcept;
  Got read_bytes(std::uint32_t segment, std::size_t at, std::span<std::byte> out, bool may_wait) const noexcept;
  using Failed = std::function<void(std::size_t index, int error)>;
  void read_parts(std::span<const Part> parts, SsdReaders& readers, const Failed& failed);
  void read_parts_by_units(std::span<const Part> parts, SsdReaders& readers, const Failed& failed);

  const int file_;
  const bool is_direct_;
  const std::unique_ptr<UringReads> uring_;  // null where the kernel does not allow it
};

}  // namespace sparserow
