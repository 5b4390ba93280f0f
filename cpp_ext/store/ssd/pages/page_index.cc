#include "store/ssd/pages/page_index.h"

#include <algorithm>

namespace sparserow {
namespace {

constexpr std::size_t kFullParts = 9;  // of ten: the load at which lines are added

}  // namespace

void PageIndex::place_in_lines(std::uint32_t hash, Place place) noexcept {
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

// By a quarter, so that little of it is empty: the hashes are in the entries, so no record is read for it.
void PageIndex::grow() {
  std::vector<Line> before(lines_.size() + std::max<std::size_t>(lines_.size() / 4, 1));
  before.swap(lines_);
  for (const Line& line : before) {
    for (std::uint32_t entry = 0; entry < kEntries; ++entry) {
      if (const Place place = line.place(entry); place.is_somewhere()) place_in_lines(line.hashes[entry], place);
    }
  }
}

void PageIndex::insert(std::uint32_t hash, Place place) {
  if ((size_ + 1) * 10 > lines_.size() * kEntries * kFullParts) grow();
  place_in_lines(hash, place);
  ++size_;
}

std::optional<PageIndex::At> PageIndex::find(std::uint32_t hash, Place place) const noexcept {
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

bool PageIndex::move(std::uint32_t hash, Place from, Place to) noexcept {
  const std::optional<At> at = find(hash, from);
  if (at) lines_[at->line].set(at->entry, hash, to);
  return at.has_value();
}

bool PageIndex::erase(std::uint32_t hash, Place place) noexcept {
  const std::optional<At> at = place.is_somewhere() ? find(hash, place) : std::nullopt;
  if (!at) return false;
  lines_[at->line].set(at->entry, 0, Place());
  for (std::size_t line = home(hash); line != at->line; line = next(line)) {
    if (lines_[line].passed < kMostPassed) --lines_[line].passed;
  }
  --size_;
  return true;
}

}  // namespace sparserow
