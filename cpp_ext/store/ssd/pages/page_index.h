// Where the records of one partition of a table lie: 32 bits of a key's hash to places. It holds no keys.
//
// The top bits of a hash are the slot's. An index is split by them into parts, into more as it grows and at last into
// one for each slot, so that a slot's entries are in one part, and parts grow one by one.
//
// A part is lines of 64 bytes with seven entries each. A search begins at a line that all bits of the hash choose, so
// that lines are equally full in whatever order rows come. An entry that finds its line full goes on to the next one;
// each line counts the entries that passed it, and a search goes on while there are some. Two keys may share a hash:
// then both places are candidates, and the caller compares keys.
//
// Invariant: every place is in the index once. Not thread-safe.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "store/ssd/pages/page_format.h"

namespace sparserow {

// A cache line of an index.
struct alignas(64) IndexLine {
  static constexpr std::uint32_t kEntries = 7;
  static constexpr std::size_t kPlaceBytes = 5;
  static constexpr std::uint8_t kMostPassed = 255;  // a count that reached it stays

  std::array<std::uint32_t, kEntries> hashes{};
  std::array<std::array<std::uint8_t, kPlaceBytes>, kEntries> places{};
  std::uint8_t passed = 0;

  // A bit for each entry with this hash: without a branch for each, which would be guessed wrong once a search.
  [[nodiscard]] std::uint32_t matches(std::uint32_t hash) const noexcept {
    std::uint32_t bits = 0;
    for (std::uint32_t entry = 0; entry < kEntries; ++entry) bits |= std::uint32_t{hashes[entry] == hash} << entry;
    return bits;
  }
  [[nodiscard]] Place place(std::uint32_t entry) const noexcept {
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < kPlaceBytes; ++i) bits |= std::uint64_t{places[entry][i]} << 8 * i;
    return Place(bits);
  }
  void set_place(std::uint32_t entry, Place place) noexcept {
    for (std::size_t i = 0; i < kPlaceBytes; ++i) places[entry][i] = static_cast<std::uint8_t>(place.bits() >> 8 * i);
  }
  void set(std::uint32_t entry, std::uint32_t hash, Place place) noexcept {
    hashes[entry] = hash;
    set_place(entry, place);
  }
};
static_assert(sizeof(IndexLine) == 64);

// Where an index has an entry, until the next one is inserted or erased; false for none.
class IndexEntry {
 public:
  IndexEntry() noexcept = default;
  IndexEntry(IndexLine& line, std::uint32_t entry) noexcept : line_(&line), entry_(entry) {}

  explicit operator bool() const noexcept { return line_ != nullptr; }
  [[nodiscard]] Place place() const noexcept { return line_->place(entry_); }
  void move_to(Place place) const noexcept { line_->set_place(entry_, place); }

 private:
  IndexLine* line_ = nullptr;
  std::uint32_t entry_ = 0;
};

class IndexPart {
 public:
  // Calls visit(place) for each entry with this hash.
  template <class Visit>
  void candidates(std::uint32_t hash, Visit&& visit) const;
  // The entry of this hash and place, or none.
  [[nodiscard]] IndexEntry find(std::uint32_t hash, Place place) noexcept;
  // The only entry of this hash; none where there are several.
  [[nodiscard]] IndexEntry find_only(std::uint32_t hash) noexcept;
  void insert(std::uint32_t hash, Place place);
  // False when the hash has no such place.
  bool erase(std::uint32_t hash, Place place) noexcept;

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return lines_.capacity() * sizeof(IndexLine); }
  // Always inlined: the compiler deems a function that only prefetches to be without effect, and drops its calls.
  [[gnu::always_inline]] void prefetch(std::uint32_t hash) const noexcept {
    __builtin_prefetch(lines_.data() + home(hash));
  }
  // The lines as they are in memory.
  [[nodiscard]] std::span<const std::byte> lines() const noexcept { return std::as_bytes(std::span(lines_)); }
  [[nodiscard]] std::size_t line_count() const noexcept { return lines_.size(); }
  // Lines of the longest search, for tests.
  [[nodiscard]] std::size_t longest_search() const noexcept;
  // Calls visit(hash, place) for each entry.
  template <class Visit>
  void each(Visit&& visit) const;

 private:
  [[nodiscard]] std::size_t home(std::uint32_t hash) const noexcept {
    constexpr std::uint32_t kSpread = 0x9e3779b1;  // odd: other hashes stay others
    return (hash * kSpread) * std::uint64_t{lines_.size()} >> 32;
  }
  [[nodiscard]] std::size_t next(std::size_t line) const noexcept { return line + 1 < lines_.size() ? line + 1 : 0; }
  // Calls visit(line, entry) for each entry with this hash, until it returns false.
  template <class Visit>
  void search(std::uint32_t hash, Visit&& visit) const;
  void grow();
  void place_in_lines(std::uint32_t hash, Place place) noexcept;

  std::vector<IndexLine> lines_;
  std::size_t size_ = 0;
};

template <class Visit>
void IndexPart::search(std::uint32_t hash, Visit&& visit) const {
  if (lines_.empty()) return;
  std::size_t at = home(hash);
  for (std::size_t seen = 0; seen < lines_.size(); ++seen, at = next(at)) {
    const IndexLine& line = lines_[at];
    for (std::uint32_t found = line.matches(hash); found != 0; found &= found - 1) {
      const auto entry = static_cast<std::uint32_t>(std::countr_zero(found));
      if (line.place(entry).is_somewhere() && !visit(at, entry)) return;
    }
    if (line.passed == 0) return;
  }
}

template <class Visit>
void IndexPart::candidates(std::uint32_t hash, Visit&& visit) const {
  search(hash, [&](std::size_t line, std::uint32_t entry) {
    visit(lines_[line].place(entry));
    return true;
  });
}

template <class Visit>
void IndexPart::each(Visit&& visit) const {
  for (const IndexLine& line : lines_) {
    for (std::uint32_t entry = 0; entry < IndexLine::kEntries; ++entry) {
      if (const Place place = line.place(entry); place.is_somewhere()) visit(line.hashes[entry], place);
    }
  }
}

class PageIndex {
 public:
  // The highest `slot_bits` bits of a hash are its slot's.
  explicit PageIndex(std::uint32_t slot_bits = 0) : slot_bits_(slot_bits), parts_(1) {}

  // Calls visit(place) for each entry with this hash.
  template <class Visit>
  void candidates(std::uint32_t hash, Visit&& visit) const {
    parts_[part(hash)].candidates(hash, visit);
  }
  // Calls visit(place) for each entry whose hash is in [first, last].
  template <class Visit>
  void in_range(std::uint32_t first, std::uint32_t last, Visit&& visit) const {
    for (std::size_t at = part(first); at <= part(last); ++at) {
      parts_[at].each([&](std::uint32_t hash, Place place) {
        if (hash >= first && hash <= last) visit(place);
      });
    }
  }

  // What a search of the hash reads first, and, better after other work, what it reads next.
  [[gnu::always_inline]] void prefetch_part(std::uint32_t hash) const noexcept {
    __builtin_prefetch(&parts_[part(hash)]);
  }
  [[gnu::always_inline]] void prefetch(std::uint32_t hash) const noexcept { parts_[part(hash)].prefetch(hash); }
  void insert(std::uint32_t hash, Place place);
  // False when the hash has no such place.
  bool erase(std::uint32_t hash, Place place) noexcept;
  // As of a part.
  [[nodiscard]] IndexEntry find(std::uint32_t hash, Place place) noexcept {
    return parts_[part(hash)].find(hash, place);
  }
  [[nodiscard]] IndexEntry find_only(std::uint32_t hash) noexcept { return parts_[part(hash)].find_only(hash); }

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::span<const IndexPart> parts() const noexcept { return parts_; }

 private:
  static constexpr std::size_t kMostEntries = 512;  // of a part, on average, before parts are split

  [[nodiscard]] std::size_t part(std::uint32_t hash) const noexcept {
    return part_bits_ == 0 ? 0 : hash >> (32 - part_bits_);
  }
  void split();

  std::uint32_t slot_bits_;
  std::uint32_t part_bits_ = 0;
  std::vector<IndexPart> parts_;
  std::size_t size_ = 0;
  std::size_t bytes_ = 0;
};

}  // namespace sparserow
