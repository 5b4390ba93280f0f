#include "session/key_ages.h"

#include <algorithm>
#include <utility>

#include "util/hash.h"

namespace sparserow {

std::uint64_t KeyAges::touch(std::uint64_t key, std::uint64_t batch) {
  if ((used_ + 1) * 2 > entries_.size()) make_room(batch);
  Entry& entry = entries_[place_of(key)];
  if (entry.batch == 0) {
    entry.key = key;
    ++used_;
  }
  return std::exchange(entry.batch, batch);
}

std::size_t KeyAges::place_of(std::uint64_t key) const noexcept {
  const std::size_t mask = entries_.size() - 1;
  std::size_t at = row_hash(0, key) & mask;
  while (entries_[at].batch != 0 && entries_[at].key != key) at = (at + 1) & mask;
  return at;
}

// Forgets old keys, and grows when the others still fill a quarter.
void KeyAges::make_room(std::uint64_t batch) {
  const auto is_recent = [batch](const Entry& entry) { return entry.batch != 0 && entry.batch + kKept > batch; };
  const auto recent = static_cast<std::size_t>(std::count_if(entries_.begin(), entries_.end(), is_recent));
  std::size_t size = std::max<std::size_t>(entries_.size(), 64);
  if (recent * 4 > size) size *= 2;
  const std::vector<Entry> old = std::exchange(entries_, std::vector<Entry>(size));
  for (const Entry& entry : old) {
    if (is_recent(entry)) entries_[place_of(entry.key)] = entry;
  }
  used_ = recent;
}

}  // namespace sparserow
