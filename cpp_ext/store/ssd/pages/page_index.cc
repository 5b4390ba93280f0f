#include "store/ssd/pages/page_index.h"

#include <algorithm>
#include <utility>

namespace sparserow {
namespace {

// Searches go on through lines that entries passed: at nine tenths that is several lines, at eight tenths one or two.
constexpr std::size_t kFullParts = 8;  // of ten: the load at which lines are added

constexpr std::size_t kGrowthShare = 6;

}  // namespace

void IndexPart::place_in_lines(std::uint32_t hash, Place place) noexcept {
  for (std::size_t at = home(hash);; at = next(at)) {
    Line& line = lines_[at];
    for (std::uint32_t entry = 0; entry < kEntries; ++entry) {
      if (line.place(entry).is_somewhere()) continue;
      line.set(entry, hash, place);
      return;
    }
    if (line.passed < kMostPassed) ++line.passed;
  }
}

// A part grows by a sixth, so that few of its lines are empty. Entries have their hashes, so no record is read.
void IndexPart::grow() {
  std::vector<Line> before(lines_.size() + std::max<std::size_t>(lines_.size() / kGrowthShare, 1));
  before.swap(lines_);
  for (const Line& line : before) {
    for (std::uint32_t entry = 0; entry < kEntries; ++entry) {
      if (const Place place = line.place(entry); place.is_somewhere()) place_in_lines(line.hashes[entry], place);
    }
  }
}

void IndexPart::insert(std::uint32_t hash, Place place) {
  if ((size_ + 1) * 10 > lines_.size() * kEntries * kFullParts) grow();
  place_in_lines(hash, place);
  ++size_;
}

std::optional<IndexPart::At> IndexPart::find(std::uint32_t hash, Place place) const noexcept {
  if (lines_.empty()) return std::nullopt;
  std::size_t at = home(hash);
  for (std::size_t seen = 0; seen < lines_.size(); ++seen, at = next(at)) {
    const Line& line = lines_[at];
    for (std::uint32_t entry = 0; entry < kEntries; ++entry) {
      if (line.hashes[entry] == hash && line.place(entry) == place) return At{at, entry};
    }
    if (line.passed == 0) return std::nullopt;
  }
  return std::nullopt;
}

bool IndexPart::move(std::uint32_t hash, Place from, Place to) noexcept {
  const std::optional<At> at = find(hash, from);
  if (at) lines_[at->line].set(at->entry, hash, to);
  return at.has_value();
}

bool IndexPart::erase(std::uint32_t hash, Place place) noexcept {
  const std::optional<At> at = place.is_somewhere() ? find(hash, place) : std::nullopt;
  if (!at) return false;
  lines_[at->line].set(at->entry, 0, Place());
  for (std::size_t line = home(hash); line != at->line; line = next(line)) {
    if (lines_[line].passed < kMostPassed) --lines_[line].passed;
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
