#include "store/row_slab.h"

#include <algorithm>

namespace sparserow {
namespace {

constexpr std::size_t kChunkBytes = std::size_t{64} << 10;
constexpr std::uint32_t kMinRows = 2;
constexpr std::uint32_t kMaxRows = 1u << RowSlab::kRowBits;

}  // namespace

RowSlab::~RowSlab() {
  for (std::size_t chunk = 0; chunk < bases_.size(); ++chunk) {
    if (bases_[chunk] != nullptr) pool_->free(bases_[chunk], chunks_[chunk].capacity * row_bytes_);
  }
}

// A thirty-second part of the slab, at least kMinRows; then the count nearby that wastes least of its last granule.
std::uint16_t RowSlab::next_capacity() const noexcept {
  const std::size_t largest = std::max<std::size_t>(kChunkBytes, row_bytes_ * 4);
  const std::size_t allowed = std::min<std::size_t>(largest, ArenaPool::kMaxRunBytes) / row_bytes_;
  const std::size_t wanted = std::max<std::size_t>(kMinRows, places_ / 32);
  const auto most =
      static_cast<std::uint32_t>(std::clamp<std::size_t>(wanted, 1, std::min<std::size_t>(allowed, kMaxRows - 1)));
  std::uint32_t best = most;
  std::size_t best_waste = ~std::size_t{0};
  for (std::uint32_t rows = most; rows > 0 && rows + 16 > most && 4 * rows >= 3 * most; --rows) {
    const std::size_t bytes = rows * row_bytes_;
    const std::size_t waste = (ArenaPool::round_up(bytes) - bytes) * 64 / rows;  // per row
    if (waste < best_waste) {
      best = rows;
      best_waste = waste;
    }
  }
  return static_cast<std::uint16_t>(best);
}

bool RowSlab::back_chunk() {
  std::uint32_t chunk = static_cast<std::uint32_t>(bases_.size());
  const bool is_reused = !unbacked_.empty();
  if (is_reused) {
    chunk = unbacked_.back();
  } else if (chunk >= kMaxChunks) {
    return false;
  }
  const std::uint16_t capacity = next_capacity();
  std::byte* base = pool_->allocate(capacity * row_bytes_);
  if (base == nullptr) return false;
  if (is_reused) {
    unbacked_.pop_back();
  } else {
    bases_.push_back(nullptr);
    chunks_.push_back({});
  }
  bases_[chunk] = base;
  chunks_[chunk] = {.capacity = capacity};
  open_.push_back(chunk);
  places_ += capacity;
  bytes_ += ArenaPool::round_up(capacity * row_bytes_);
  return true;
}

std::uint32_t RowSlab::take_from(std::uint32_t chunk) noexcept {
  ChunkInfo& info = chunks_[chunk];
  std::uint32_t place = info.bumped;
  if (info.first_free != kNoFree) {
    place = info.first_free;
    info.first_free = static_cast<std::uint16_t>(RowRef(bases_[chunk] + place * row_bytes_).key());
  } else {
    ++info.bumped;
  }
  ++info.live;
  ++rows_;
  RowRef(bases_[chunk] + place * row_bytes_).set_version(0);
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
  if (info.live == info.capacity) open_.push_back(chunk);
  --rows_;
  if (--info.live == 0) {
    pool_->free(bases_[chunk], info.capacity * row_bytes_);
    bases_[chunk] = nullptr;  // its id leaves open_ when allocate() meets it
    places_ -= info.capacity;
    bytes_ -= ArenaPool::round_up(info.capacity * row_bytes_);
    return;
  }
  RowRef place(at(row));
  place.set_version(0);
  place.set_key(info.first_free);
  info.first_free = static_cast<std::uint16_t>(row & kRowMask);
}

std::uint32_t RowSlab::next(std::uint32_t row) const noexcept {
  std::uint32_t place = row & kRowMask;
  for (std::uint32_t chunk = row >> kRowBits; chunk < bases_.size(); ++chunk, place = 0) {
    if (bases_[chunk] == nullptr) continue;
    for (; place < chunks_[chunk].bumped; ++place) {
      if (RowRef(bases_[chunk] + place * row_bytes_).version() != 0) return chunk << kRowBits | place;
    }
  }
  return kNone;
}

std::uint64_t RowSlab::bytes_for(std::uint64_t rows) const noexcept {
  const std::uint64_t free_places = places_ - rows_;
  if (rows <= free_places) return 0;
  // The last chunk may be as large as the largest; each chunk wastes less than a granule.
  const std::uint64_t more = rows - free_places;
  const std::uint64_t capacity = std::max<std::uint64_t>(next_capacity(), 1);
  const std::uint64_t chunks = more / capacity + 1;
  const std::uint64_t last =
      std::min<std::uint64_t>(kChunkBytes + 4 * row_bytes_, (places_ + more) / 32 * row_bytes_ + 2 * row_bytes_);
  return more * row_bytes_ + chunks * ArenaPool::kGranuleBytes + last;
}

}  // namespace sparserow
