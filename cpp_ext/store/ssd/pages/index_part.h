// A part of a page log's index: lines of 64 bytes with entries, each of 32 bits of a hash and a place.
//
// A search begins at a line that all bits of the hash choose, so that lines are equally full in whatever order rows
// come. An entry that finds its line full goes on to the next one; each line counts the entries that passed it, and a
// search goes on while there are some. Two keys may share a hash: then both places are candidates, and the caller
// compares keys.
//
// Invariant: every place is in the part once. Not thread-safe.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "store/ssd/pages/page_format.h"

namespace sparserow {

// What an index knows of a key.
struct IndexKey {
  std::uint32_t hash = 0;  // the 32 bits below the slot's
  std::uint16_t slot = 0;  // among those of the partition

  bool operator==(const IndexKey&) const noexcept = default;
};

inline constexpr std::size_t kPlaceBytes = 5;
using PlaceBytes = std::array<std::uint8_t, kPlaceBytes>;

[[nodiscard]] inline Place place_of(const PlaceBytes& bytes) noexcept {
  std::uint64_t bits = 0;
  for (std::size_t i = 0; i < kPlaceBytes; ++i) bits |= std::uint64_t{bytes[i]} << 8 * i;
  return Place(bits);
}
inline void set_place(PlaceBytes& bytes, Place place) noexcept {
  for (std::size_t i = 0; i < kPlaceBytes; ++i) bytes[i] = static_cast<std::uint8_t>(place.bits() >> 8 * i);
}

// A cache line of entries that are all of one slot.
struct alignas(64) SlotLine {
  static constexpr std::uint32_t kEntries = 7;

  std::array<std::uint32_t, kEntries> hashes{};
  std::array<PlaceBytes, kEntries> places{};
  std::uint8_t passed = 0;

  // A bit for each entry of this key: without a branch for each, which would be guessed wrong once a search.
  [[nodiscard]] std::uint32_t matches(IndexKey key) const noexcept {
    std::uint32_t bits = 0;
    for (std::uint32_t entry = 0; entry < kEntries; ++entry) bits |= std::uint32_t{hashes[entry] == key.hash} << entry;
    return bits;
  }
  [[nodiscard]] IndexKey key(std::uint32_t entry, std::uint16_t slot) const noexcept { return {hashes[entry], slot}; }
  void set_key(std::uint32_t entry, IndexKey key) noexcept { hashes[entry] = key.hash; }
};
static_assert(sizeof(SlotLine) == 64);

// One of entries of several slots, which have theirs beside them.
struct alignas(64) SharedLine {
  static constexpr std::uint32_t kEntries = 5;

  std::array<std::uint32_t, kEntries> hashes{};
  std::array<std::uint16_t, kEntries> slots{};
  std::array<PlaceBytes, kEntries> places{};
  std::uint8_t passed = 0;

  [[nodiscard]] std::uint32_t matches(IndexKey key) const noexcept {
    std::uint32_t bits = 0;
    for (std::uint32_t entry = 0; entry < kEntries; ++entry) {
      bits |= std::uint32_t{hashes[entry] == key.hash && slots[entry] == key.slot} << entry;
    }
    return bits;
  }
  [[nodiscard]] IndexKey key(std::uint32_t entry, std::uint16_t /*slot*/) const noexcept {
    return {hashes[entry], slots[entry]};
  }
  void set_key(std::uint32_t entry, IndexKey key) noexcept {
    hashes[entry] = key.hash;
    slots[entry] = key.slot;
  }
};
static_assert(sizeof(SharedLine) == 64);

// Where an index has an entry, until the next one is inserted or erased; false for none.
class IndexEntry {
 public:
  IndexEntry() noexcept = default;
  explicit IndexEntry(PlaceBytes& place) noexcept : place_(&place) {}

  explicit operator bool() const noexcept { return place_ != nullptr; }
  [[nodiscard]] Place place() const noexcept { return place_of(*place_); }
  void move_to(Place place) const noexcept { set_place(*place_, place); }

 private:
  PlaceBytes* place_ = nullptr;
};

template <class Line>
class IndexPart {
 public:
  // Calls visit(place) for each entry of this key.
  template <class Visit>
  void candidates(IndexKey key, Visit&& visit) const {
    search(key, [&](std::size_t line, std::uint32_t entry) {
      visit(place_of(lines_[line].places[entry]));
      return true;
    });
  }
  // The entry of this key and place, or none.
  [[nodiscard]] IndexEntry find(IndexKey key, Place place) noexcept {
    IndexEntry found;
    search(key, [&](std::size_t line, std::uint32_t entry) {
      if (place_of(lines_[line].places[entry]) != place) return true;
      found = IndexEntry(lines_[line].places[entry]);
      return false;
    });
    return found;
  }
  void insert(IndexKey key, Place place) {
    if ((size_ + 1) * 10 > lines_.size() * Line::kEntries * kFullParts) {
      resize(lines_.size() + std::max<std::size_t>(lines_.size() / kGrowthShare, 1));
    }
    place_in_lines(key, place);
    ++size_;
  }
  // False when the key has no such place.
  bool erase(IndexKey key, Place place) {
    if (!place.is_somewhere()) return false;
    std::optional<std::size_t> at;
    search(key, [&](std::size_t line, std::uint32_t entry) {
      if (place_of(lines_[line].places[entry]) != place) return true;
      set_place(lines_[line].places[entry], Place());
      at = line;
      return false;
    });
    if (!at) return false;
    for (std::size_t line = home(key.hash); line != *at; line = next(line)) {
      if (lines_[line].passed < kMostPassed) --lines_[line].passed;
    }
    --size_;
    if (size_ * 10 < lines_.size() * Line::kEntries * kEmptyParts) resize(lines_for(size_));
    return true;
  }

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return lines_.capacity() * sizeof(Line); }
  // Always inlined: the compiler deems a function that only prefetches to be without effect, and drops its calls.
  [[gnu::always_inline]] void prefetch(std::uint32_t hash) const noexcept {
    __builtin_prefetch(lines_.data() + home(hash));
  }
  // The lines as they are in memory.
  [[nodiscard]] std::span<const std::byte> lines() const noexcept { return std::as_bytes(std::span(lines_)); }
  [[nodiscard]] std::size_t line_count() const noexcept { return lines_.size(); }
  // Lines of the longest search, for tests.
  [[nodiscard]] std::size_t longest_search() const noexcept {
    std::size_t longest = 0;
    for (std::size_t first = 0; first < lines_.size(); ++first) {
      std::size_t lines = 1;
      for (std::size_t at = first; lines_[at].passed > 0 && lines < lines_.size(); at = next(at)) ++lines;
      longest = std::max(longest, lines);
    }
    return longest;
  }
  // Calls visit(key, place) for each entry; of a part of one slot, `slot` is that.
  template <class Visit>
  void each(std::uint16_t slot, Visit&& visit) const {
    for (const Line& line : lines_) {
      for (std::uint32_t entry = 0; entry < Line::kEntries; ++entry) {
        if (const Place place = place_of(line.places[entry]); place.is_somewhere()) visit(line.key(entry, slot), place);
      }
    }
  }

 private:
  static constexpr std::uint8_t kMostPassed = 255;  // a count that reached it stays
  // Searches go on through lines that entries passed: at nine tenths that is several lines, at eight tenths one or two.
  static constexpr std::size_t kFullParts = 8;    // of ten: the load at which lines are added
  static constexpr std::size_t kEmptyParts = 2;   // of ten: the load at which most lines go
  static constexpr std::size_t kGrowthShare = 6;  // a sixth more, so that few lines are empty

  [[nodiscard]] std::size_t home(std::uint32_t hash) const noexcept {
    constexpr std::uint32_t kSpread = 0x9e3779b1;  // odd: other hashes stay others
    return (hash * kSpread) * std::uint64_t{lines_.size()} >> 32;
  }
  [[nodiscard]] std::size_t next(std::size_t line) const noexcept { return line + 1 < lines_.size() ? line + 1 : 0; }
  // Where a part of so many entries is half full.
  [[nodiscard]] static std::size_t lines_for(std::size_t entries) noexcept {
    return (2 * entries + Line::kEntries - 1) / Line::kEntries;
  }

  // Calls visit(line, entry) for each entry of this key, until it returns false.
  template <class Visit>
  void search(IndexKey key, Visit&& visit) const {
    if (lines_.empty()) return;
    std::size_t at = home(key.hash);
    for (std::size_t seen = 0; seen < lines_.size(); ++seen, at = next(at)) {
      const Line& line = lines_[at];
      for (std::uint32_t found = line.matches(key); found != 0; found &= found - 1) {
        const auto entry = static_cast<std::uint32_t>(std::countr_zero(found));
        if (place_of(line.places[entry]).is_somewhere() && !visit(at, entry)) return;
      }
      if (line.passed == 0) return;
    }
  }
  // Entries have their hashes, so no record is read.
  void resize(std::size_t lines) {
    std::vector<Line> before(lines);
    before.swap(lines_);
    for (const Line& line : before) {
      for (std::uint32_t entry = 0; entry < Line::kEntries; ++entry) {
        if (const Place place = place_of(line.places[entry]); place.is_somewhere())
          place_in_lines(line.key(entry, 0), place);
      }
    }
  }
  void place_in_lines(IndexKey key, Place place) noexcept {
    for (std::size_t at = home(key.hash);; at = next(at)) {
      Line& line = lines_[at];
      for (std::uint32_t entry = 0; entry < Line::kEntries; ++entry) {
        if (place_of(line.places[entry]).is_somewhere()) continue;
        line.set_key(entry, key);
        set_place(line.places[entry], place);
        return;
      }
      if (line.passed < kMostPassed) ++line.passed;
    }
  }

  std::vector<Line> lines_;
  std::size_t size_ = 0;
};

}  // namespace sparserow
