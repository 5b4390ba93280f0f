// The file of a page log, in segments: reserved before they are filled, written whole, read by records.
//
// Thread-safe for different segments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "util/status.h"

namespace sparserow {

class PageFile {
 public:
  enum class Wait { kNo, kYes };
  enum class Got { kAll, kWouldWait, kNotAll };

  // Makes an empty file. kInvalidArgument when it cannot be made.
  static Result<std::unique_ptr<PageFile>> make(const std::string& path);
  PageFile(const PageFile&) = delete;
  PageFile& operator=(const PageFile&) = delete;
  ~PageFile();

  // Takes the segment's bytes on the disk, where the file system can. kResourceExhausted names why not.
  Status reserve(std::uint32_t segment);
  Status write(std::uint32_t segment, std::span<const std::byte> bytes);
  // The bytes at a place of a segment. kWouldWait with Wait::kNo alone: the disk would have to be asked. kNotAll: errno
  // says why, and is 0 at the end of the file.
  Got read(std::uint32_t segment, std::size_t at, std::span<std::byte> out, Wait wait) const noexcept;
  // Gives the segment's bytes back to the disk, where the file system can.
  void release(std::uint32_t segment) noexcept;

 private:
  explicit PageFile(int file) : file_(file) {}

  const int file_;
};

}  // namespace sparserow
