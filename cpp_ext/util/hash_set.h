// A set of hashes: open addressing in one array, without memory of its own for each hash.
//
// Hashes must be mixed already (util/hash.h): a hash's low bits choose its place, and the next free places follow.
// An erased hash leaves nothing behind. The array is at most half full, and stays as large as it was. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace sparserow {

class HashSet {
 public:
  // False when the hash was there.
  bool insert(std::uint64_t hash) {
    if (hash == kFree) return !std::exchange(has_free_, true);
    if (2 * (size_ + 1) > places_.size()) grow();
    std::uint64_t& at = places_[place_of(hash)];
    if (at == hash) return false;
    at = hash;
    ++size_;
    return true;
  }

  // False when the hash was not there.
  bool erase(std::uint64_t hash) noexcept {
    if (hash == kFree) return std::exchange(has_free_, false);
    if (places_.empty()) return false;
    std::size_t hole = place_of(hash);
    if (places_[hole] != hash) return false;
    // A hash that follows moves to the hole where its search would otherwise end there.
    for (std::size_t at = next(hole); places_[at] != kFree; at = next(at)) {
      const std::size_t from_home = (at - home(places_[at])) & (places_.size() - 1);
      const std::size_t from_hole = (at - hole) & (places_.size() - 1);
      if (from_home < from_hole) continue;
      places_[hole] = places_[at];
      hole = at;
    }
    places_[hole] = kFree;
    --size_;
    return true;
  }

  [[nodiscard]] bool contains(std::uint64_t hash) const noexcept {
    if (hash == kFree) return has_free_;
    return !places_.empty() && places_[place_of(hash)] == hash;
  }
  [[nodiscard]] std::size_t size() const noexcept { return size_ + (has_free_ ? 1 : 0); }

 private:
  static constexpr std::uint64_t kFree = 0;
  static constexpr std::size_t kLeast = 16;

  [[nodiscard]] std::size_t home(std::uint64_t hash) const noexcept { return hash & (places_.size() - 1); }
  [[nodiscard]] std::size_t next(std::size_t at) const noexcept { return (at + 1) & (places_.size() - 1); }
  // Where the hash is, or would be.
  [[nodiscard]] std::size_t place_of(std::uint64_t hash) const noexcept {
    std::size_t at = home(hash);
    while (places_[at] != kFree && places_[at] != hash) at = next(at);
    return at;
  }
  void grow() {
    std::vector<std::uint64_t> before(places_.empty() ? kLeast : 2 * places_.size());
    before.swap(places_);
    for (const std::uint64_t hash : before) {
      if (hash != kFree) places_[place_of(hash)] = hash;
    }
  }

  std::vector<std::uint64_t> places_;  // a power of two of them
  std::size_t size_ = 0;               // of places_
  bool has_free_ = false;              // kFree is in the set
};

}  // namespace sparserow
