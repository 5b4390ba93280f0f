#include "store/ssd/pages/page_index.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace sparserow {
namespace {

// Searches go on through lines that entries passed: at nine tenths that is several lines, at eight tenths one or two.
constexpr std::size_t kFullParts = 8;  // of ten: the load at which lines are added

constexpr std::size_t kGrowthShare = 6;

}  // namespace

void IndexPart::place_in_lines(std::uint32_t hash, Place place) noexcept {
  for (std::size_t at = home(hash);; at = next(at)) {
    IndexLine& line = lines_[at];
    for (std::uint32_t entry = 0; entry < IndexLine::kEntries; ++entry) {
      if (line.place(entry).is_somewhere()) continue;
      line.set(entry, hash, place);
      return;
    }
    if (line.passed < IndexLine::kMostPassed) ++line.passed;
  }
}

// A part grows by a sixth, so that few of its lines are empty. Entries have their hashes, so no record is read.
void IndexPart::grow() {
  std::vector<IndexLine> before(lines_.size() + std::max<std::size_t>(lines_.size() / kGrowthShare, 1));
  before.swap(lines_);
  for (const IndexLine& line : before) {
    for (std::uint32_t entry = 0; entry < IndexLine::kEntries; ++entry) {
      if (const Place place = line.place(entry); place.is_somewhere()) place_in_lines(line.hashes[entry], place);
    }
  }
}

void IndexPart::insert(std::uint32_t hash, Place place) {
  if ((size_ + 1) * 10 > lines_.size() * IndexLine::kEntries * kFullParts) grow();
  place_in_lines(hash, place);
  ++size_;
}

IndexEntry IndexPart::find(std::uint32_t hash, Place place) noexcept {
  IndexEntry found;
  search(hash, [&](std::size_t line, std::uint32_t entry) {
    if (lines_[line].place(entry) != place) return true;
    found = IndexEntry(lines_[line], entry);
    return false;
  });
  return found;
}

IndexEntry IndexPart::find_only(std::uint32_t hash) noexcept {
  IndexEntry found;
  search(hash, [&](std::size_t line, std::uint32_t entry) {
    const bool is_first = !found;
    found = is_first ? IndexEntry(lines_[line], entry) : IndexEntry();
    return is_first;
  });
  return found;
}

bool IndexPart::erase(std::uint32_t hash, Place place) noexcept {
  if (!place.is_somewhere()) return false;
  std::optional<std::size_t> at;
  search(hash, [&](std::size_t line, std::uint32_t entry) {
    if (lines_[line].place(entry) != place) return true;
    lines_[line].set(entry, 0, Place());
    at = line;
    return false;
  });
  if (!at) return false;
  for (std::size_t line = home(hash); line != *at; line = next(line)) {
    if (lines_[line].passed < IndexLine::kMostPassed) --lines_[line].passed;
  }
  --size_;
  return true;
}

std::size_t IndexPart::longest_search() const noexcept {
  std::size_t longest = 0;
  for (std::size_t first = 0; first < lines_.size(); ++first) {
    std::size_t lines = 1;
    for (std::size_t at = first; lines_[at].passed > 0 && lines < lines_.size(); at = next(at)) ++lines;
    longest = std::max(longest, lines);
  }
  return longest;
}

void PageIndex::insert(std::uint32_t hash, Place place) {
  if (size_ >= kMostEntries << part_bits_ && part_bits_ < slot_bits_) split();
  IndexPart& target = parts_[part(hash)];
  const std::size_t before = target.bytes();
  target.insert(hash, place);
  bytes_ += target.bytes() - before;
  ++size_;
}

bool PageIndex::erase(std::uint32_t hash, Place place) noexcept {
  if (!parts_[part(hash)].erase(hash, place)) return false;
  --size_;
  return true;
}

// Each part into two, by one more bit of the slot.
void PageIndex::split() {
  ++part_bits_;
  std::vector<IndexPart> halves(parts_.size() * 2);
  for (const IndexPart& whole : parts_) {
    whole.each([&](std::uint32_t hash, Place place) { halves[part(hash)].insert(hash, place); });
  }
  parts_ = std::move(halves);
  bytes_ = parts_.capacity() * sizeof(IndexPart);
  for (const IndexPart& half : parts_) bytes_ += half.bytes();
}

}  // namespace sparserow
