#include "store/table/row_slab.h"

#include <algorithm>
#include <utility>

namespace sparserow {
namespace {

constexpr std::size_t kSmallestChunk = std::size_t{1} << 10;
constexpr std::size_t kSmallChunk = std::size_t{6} << 10;  // of slabs from kSmallShare times it on
constexpr std::uint64_t kSmallShare = 8;
constexpr std::size_t kLargestChunk = std::size_t{512} << 10;
constexpr std::uint64_t kShare = 192;  // of the slab that a chunk may be
constexpr std::uint32_t kMostRows = (1u << RowSlab::kRowBits) - 1;

// A table of chunks that doubles would be a byte of every row of a slab with some thousands.
template <class T>
void grow_a_little(std::vector<T>& items) {
  if (items.size() == items.capacity()) items.reserve(items.size() + items.size() / 8 + 4);
}

}  // namespace

RowSlab::~RowSlab() {
  for (std::size_t chunk = 0; chunk < bases_.size(); ++chunk) {
    if (bases_[chunk] != nullptr) pool_->free(bases_[chunk], units().bytes(chunks_[chunk].capacity));
  }
  add_bytes(-bytes_);
}

// About a kShare-th part of the slab: of the counts nearby, the one that wastes least of its last granule.
RowSlab::Wish RowSlab::wish_at(std::uint64_t places) const noexcept {
  const std::size_t slab_bytes = units().bytes(places);
  const std::size_t small = std::clamp<std::size_t>(slab_bytes / kSmallShare, kSmallestChunk, kSmallChunk);
  const std::size_t wanted = std::clamp<std::size_t>(slab_bytes / kShare, small, kLargestChunk);
  const auto most = static_cast<std::uint32_t>(std::clamp<std::size_t>(units().most_in(wanted), 1, kMostRows));
  std::uint32_t best = most;
  std::size_t best_waste = ~std::size_t{0};
  for (std::uint32_t rows = most; rows > 0 && rows + 16 > most && 4 * rows >= 3 * most; --rows) {
    const std::size_t bytes = units().bytes(rows);
    const std::size_t waste = (ArenaPool::round_up(bytes) - bytes) * 64 / rows;  // per row
    if (waste < best_waste) {
      best = rows;
      best_waste = waste;
    }
  }
  const auto few = units().most_in(kSmallestChunk);
  return {best, std::min(best, std::max({best / 16, few, 1u}))};
}

bool RowSlab::back_chunk() {
  std::uint32_t chunk = static_cast<std::uint32_t>(bases_.size());
  const bool is_reused = !unbacked_.empty();
  if (is_reused) {
    chunk = unbacked_.back();
  } else if (chunk >= kMaxChunks) {
    return false;
  }
  const Wish wish = wish_at(places_);
  const ArenaPool::Run run = pool_->allocate_units(units(), wish.most, wish.least);
  if (run.at == nullptr) return false;
  if (is_reused) {
    unbacked_.pop_back();
  } else {
    grow_a_little(bases_);
    grow_a_little(chunks_);
    bases_.push_back(nullptr);
    chunks_.push_back({});
  }
  bases_[chunk] = run.at;
  chunks_[chunk] = {.capacity = static_cast<std::uint16_t>(run.units)};
  open_.push_back(chunk);
  places_ += run.units;
  add_bytes(ArenaPool::round_up(units().bytes(run.units)));
  return true;
}

std::uint32_t RowSlab::take_from(std::uint32_t chunk) noexcept {
  ChunkInfo& info = chunks_[chunk];
  std::uint32_t place = info.bumped;
  if (info.first_free != kNoFree) {
    place = info.first_free;
    std::memcpy(&info.first_free, data_at(bases_[chunk], place), sizeof info.first_free);
    // The place that is taken next is written whole, and its last row may have left long ago.
    if (info.first_free != kNoFree) {
      fetch_lines<true>(data_at(bases_[chunk], info.first_free), std::min(data_bytes_, kMaxFetched));
    }
  } else {
    ++info.bumped;
  }
  ++info.live;
  ++rows_;
  return chunk << kRowBits | place;
}

std::uint32_t RowSlab::allocate() {
  while (!open_.empty() && bases_[open_.back()] == nullptr) {
    unbacked_.push_back(open_.back());
    open_.pop_back();
  }
  if (open_.empty() && !back_chunk()) return kNone;
  const std::uint32_t chunk = open_.back();
  const std::uint32_t row = take_from(chunk);
  if (chunks_[chunk].live == chunks_[chunk].capacity) open_.pop_back();
  return row;
}

void RowSlab::free(std::uint32_t row) {
  const std::uint32_t chunk = row >> kRowBits;
  ChunkInfo& info = chunks_[chunk];
  if (info.live == info.capacity && !info.is_closed) open_.push_back(chunk);
  --rows_;
  if (--info.live == 0) {
    pool_->free(bases_[chunk], units().bytes(info.capacity));
    bases_[chunk] = nullptr;  // its id leaves open_ when allocate() meets it
    if (info.is_closed) unbacked_.push_back(chunk);
    places_ -= info.capacity;
    add_bytes(-std::uint64_t{ArenaPool::round_up(units().bytes(info.capacity))});
    return;
  }
  std::memcpy(data(row), &info.first_free, sizeof info.first_free);
  info.first_free = static_cast<std::uint16_t>(row & kRowMask);
}

bool RowSlab::close_chunks(std::uint64_t spare_rows) {
  std::vector<std::uint32_t> by_rows;
  for (std::uint32_t chunk = 0; chunk < chunks_.size(); ++chunk) {
    if (bases_[chunk] != nullptr) by_rows.push_back(chunk);
  }
  std::sort(by_rows.begin(), by_rows.end(), [this](std::uint32_t left, std::uint32_t right) {
    return chunks_[left].live * std::uint64_t{chunks_[right].capacity} <
           chunks_[right].live * std::uint64_t{chunks_[left].capacity};
  });
  std::uint64_t free = free_places();
  bool any = false;
  for (const std::uint32_t chunk : by_rows) {
    ChunkInfo& info = chunks_[chunk];
    // Its rows move to free places of others, and its own free places go.
    if (info.live == info.capacity || free < info.capacity + spare_rows) break;
    free -= info.capacity;
    info.is_closed = 1;
    any = true;
  }
  if (any) {
    std::erase_if(open_, [this](std::uint32_t chunk) { return bases_[chunk] != nullptr && chunks_[chunk].is_closed; });
  }
  return any;
}

std::uint32_t RowSlab::move_chunks(const ArenaPool::Emptying& from, std::uint32_t first, std::size_t most_bytes) {
  std::size_t moved = 0;
  for (std::uint32_t chunk = first; chunk < bases_.size(); ++chunk) {
    if (bases_[chunk] == nullptr || !from.contains(bases_[chunk])) continue;
    if (moved >= most_bytes) return chunk;
    const std::size_t bytes = units().bytes(chunks_[chunk].capacity);
    std::byte* const base = pool_->allocate(bytes);
    if (base == nullptr) return 0;
    std::memcpy(base, bases_[chunk], bytes);
    pool_->free(std::exchange(bases_[chunk], base), bytes);
    moved += bytes;
  }
  return 0;
}

// Upper bound of what a row takes in a chunk of `least` rows or more: with the number of rows a chunk's rest of a
// granule and of a group's head matters less and less.
std::uint64_t RowSlab::most_row_bytes(std::uint32_t least) const noexcept {
  constexpr std::uint32_t kCounted = 16;
  const auto row_bytes = [](std::uint64_t bytes, std::uint32_t rows) { return (bytes + rows - 1) / rows; };
  std::uint64_t most = 0;
  for (std::uint32_t rows = least; rows < least + kCounted; ++rows) {
    most = std::max(most, row_bytes(ArenaPool::round_up(units().bytes(rows)), rows));
  }
  const std::uint32_t beyond = least + kCounted;
  const std::uint64_t rests = head_bytes_ + ArenaPool::kGranuleBytes;
  return std::max(most, row_bytes(units().bytes(beyond) + rests, beyond));
}

std::uint64_t RowSlab::bytes_for(std::uint64_t rows) const noexcept {
  const std::uint64_t free_places = places_ - rows_;
  if (rows <= free_places) return 0;
  // None but the last chunk has fewer rows than 3/4 of what is least now, so each row takes no more than in the worst
  // chunk of so many or more; the last may be as large as a chunk of the slab that it completes, which is at most 4/3
  // of what is wished for there.
  const std::uint64_t more = rows - free_places;
  const std::uint64_t last = wish_at(places_ + more).most * std::uint64_t{4} / 3 + 1;
  return more * most_row_bytes(std::max<std::uint32_t>(3 * wish_at(places_).least / 4, 1)) + units().bytes(last) +
         2 * ArenaPool::kGranuleBytes;
}

}  // namespace sparserow
