// Which of the batches that a prefetcher indexed had a key last; never an earlier one than it was, by chance a later
// one.
//
// A table of batch numbers by hash, without keys: of two keys that share a place both seem as recent as the later one.
// It has kPlacesPerKey places for each key of the largest batch, 4 bytes each. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace sparserow {

class KeyAges {
 public:
  static constexpr std::size_t kPlacesPerKey = 32;

  // For each of the keys of a batch, the number (from 1) of the latest batch before it that had the key, 0 when none
  // had; from now on it is `batch`. Numbers rise.
  void touch(std::span<const std::uint64_t> keys, std::uint32_t batch, std::vector<std::uint32_t>& latest);

 private:
  void make_room(std::size_t keys, std::uint32_t batch);

  std::vector<std::uint32_t> batches_;  // (a power of two)
};

}  // namespace sparserow
