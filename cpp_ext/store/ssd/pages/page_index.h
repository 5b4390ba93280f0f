// Where the records of one partition of a table lie: 32 bits of a key's hash to places. It holds no keys.
//
// A line of 64 bytes has seven entries; a hash begins its search at the line that is its share of all lines, so lines
// are in the order of hashes, and the entries of a range of hashes lie together. An entry that finds its line full goes
// on to the next one; each line counts the entries that passed it, and a search goes on while there are some. Two keys
// may share a hash: then both places are candidates, and the caller compares keys.
//
// Invariant: every place is in the index once. Not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "store/ssd/pages/page_format.h"

namespace sparserow {

class PageIndex {
 public:
  // Calls visit(place) for each entry with this hash.
  template <class Visit>
  void candidates(std::uint32_t hash, Visit&& visit) const;
  // Calls visit(place) for each entry whose hash is in [first, last].
  template <class Visit>
  void in_range(std::uint32_t first, std::uint32_t last, Visit&& visit) const;

  void insert(std::uint32_t hash, Place place);
  // False when the hash has no such place.
  bool move(std::uint32_t hash, Place from, Place to) noexcept;
  bool erase(std::uint32_t hash, Place place) noexcept;

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return lines_.capacity() * sizeof(Line); }
  // The lines as they are in memory, for the file that a clean end leaves (page_log.h).
  [[nodiscard]] const void* data() const noexcept { return lines_.data(); }
  [[nodiscard]] std::size_t line_count() const noexcept { return lines_.size(); }
  [[nodiscard]] std::size_t line_bytes() const noexcept { return lines_.size() * sizeof(Line); }

 private:
  static constexpr std::uint32_t kEntries = 7;
  static constexpr std::size_t kPlaceBytes = 5;
  static constexpr std::uint8_t kMostPassed = 255;  // a count that reached it stays

  struct alignas(64) Line {
    std::array<std::uint32_t, kEntries> hashes{};
    std::array<std::array<std::uint8_t, kPlaceBytes>, kEntries> places{};
    std::uint8_t passed = 0;

    [[nodiscard]] Place place(std::uint32_t entry) const noexcept {
      std::uint64_t bits = 0;
      for (std::size_t i = 0; i < kPlaceBytes; ++i) bits |= std::uint64_t{places[entry][i]} << 8 * i;
      return Place(bits);
    }
    void set(std::uint32_t entry, std::uint32_t hash, Place place) noexcept {
      hashes[entry] = hash;
      for (std::size_t i = 0; i < kPlaceBytes; ++i) places[entry][i] = static_cast<std::uint8_t>(place.bits() >> 8 * i);
    }
  };
  static_assert(sizeof(Line) == 64);

  [[nodiscard]] std::size_t home(std::uint32_t hash) const noexcept {
    return hash * std::uint64_t{lines_.size()} >> 32;
  }
  [[nodiscard]] std::size_t next(std::size_t line) const noexcept { return line + 1 < lines_.size() ? line + 1 : 0; }
  struct At {
    std::size_t line;
    std::uint32_t entry;
  };
  [[nodiscard]] std::optional<At> find(std::uint32_t hash, Place place) const noexcept;
  void grow();
  void place_in_lines(std::uint32_t hash, Place place) noexcept;

  std::vector<Line> lines_;
  std::size_t size_ = 0;
};

template <class Visit>
void PageIndex::candidates(std::uint32_t hash, Visit&& visit) const {
  if (lines_.empty()) return;
  std::size_t at = home(hash);
  for (std::size_t seen = 0; seen < lines_.size(); ++seen, at = next(at)) {
    const Line& line = lines_[at];
    for (std::uint32_t entry = 0; entry < kEntries; ++entry) {
      if (line.hashes[entry] != hash) continue;
      if (const Place place = line.place(entry); place.is_somewhere()) visit(place);
    }
    if (line.passed == 0) return;
  }
}

template <class Visit>
void PageIndex::in_range(std::uint32_t first, std::uint32_t last, Visit&& visit) const {
  if (lines_.empty()) return;
  const std::size_t end = home(last);
  bool is_past = false;
  std::size_t at = home(first);
  for (std::size_t seen = 0; seen < lines_.size(); ++seen, at = next(at)) {
    const Line& line = lines_[at];
    for (std::uint32_t entry = 0; entry < kEntries; ++entry) {
      if (line.hashes[entry] < first || line.hashes[entry] > last) continue;
      if (const Place place = line.place(entry); place.is_somewhere()) visit(place);
    }
    is_past = is_past || at == end;
    if (is_past && line.passed == 0) return;
  }
}

}  // namespace sparserow
