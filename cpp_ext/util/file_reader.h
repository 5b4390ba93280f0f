// Reads whole local files by blocks. Each block is hashed (XXH3-64, as in manifests) while it is in the CPU's cache.
//
// A file that the system's cache has is copied from there. Any other is read around that cache: nobody reads its pages
// again, and a virtual machine's host finds memory for new pages slowly. What a file is read into is used again.
//
// Thread-safe; files are read without a lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "util/status.h"

namespace sparserow {

class FileReader {
 public:
  class Memory;

  // The bytes of a file, in memory that goes back to its reader with the last copy of this.
  struct File {
    std::span<const std::byte> bytes;  // as many as were asked for, or fewer where the file ended
    std::uint64_t size = 0;            // of the file, after it was read
    std::uint64_t xxh3 = 0;            // of `bytes`
    std::shared_ptr<Memory> memory;
  };

  FileReader();

  // Reads the first `size` bytes of a file; none when the file has another size.
  // kNotFound: there is none. kResourceExhausted: no memory. kFailedPrecondition: the system refuses it.
  [[nodiscard]] Result<File> read(const std::string& path, std::uint64_t size);

 private:
  struct Spare;

  [[nodiscard]] std::shared_ptr<Memory> take(std::size_t bytes);

  std::shared_ptr<Spare> spare_;  // memory that no file is in now
};

}  // namespace sparserow
