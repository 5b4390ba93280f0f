// Which of the batches that a prefetcher indexed had a key last.
//
// Remembers a key for kKept batches at least. Memory: 16 bytes for each of at most four times the keys of those.
// Not thread-safe.
#pragma once

#include <cstdint>
#include <vector>

namespace sparserow {

class KeyAges {
 public:
  static constexpr std::uint64_t kKept = 64;

  // The number (from 1) of the latest batch before `batch` that had the key, 0 when none is remembered; from now on
  // it is `batch`. Numbers do not fall.
  std::uint64_t touch(std::uint64_t key, std::uint64_t batch);

 private:
  struct Entry {
    std::uint64_t key = 0;
    std::uint64_t batch = 0;  // 0: free
  };

  [[nodiscard]] std::size_t place_of(std::uint64_t key) const noexcept;
  void make_room(std::uint64_t batch);

  std::vector<Entry> entries_;  // a power of two, by linear probing
  std::size_t used_ = 0;
};

}  // namespace sparserow
