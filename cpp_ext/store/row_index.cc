#include "store/row_index.h"

#include <algorithm>

#include "util/random.h"

namespace sparserow {
namespace {

constexpr std::uint32_t kStep = 4;           // bucket counts are multiples of it: one granule of the arenas
constexpr std::uint32_t kLargest = 160;      // buckets of a segment that need not be split
constexpr std::uint32_t kHardLimit = 16384;  // of a segment that can no longer be split: one run of the arenas
constexpr std::uint32_t kMaxDepth = 20;
constexpr std::uint16_t kSticky = 0xffff;  // a count of passed-over entries that is no longer exact

constexpr std::uint32_t round_to_step(std::uint64_t buckets) noexcept {
  return static_cast<std::uint32_t>(
      std::clamp<std::uint64_t>((buckets + kStep - 1) / kStep * kStep, kStep, kHardLimit));
}

}  // namespace

RowIndex::~RowIndex() {
  for (std::size_t at = 0; at < directory_.size(); ++at) {
    const std::size_t first = at & ((std::size_t{1} << directory_[at].depth()) - 1);
    if (first == at) continue;  // freed below, by its first entry
    directory_[at] = Segment(nullptr, 0);
  }
  for (const Segment segment : directory_) {
    if (segment.buckets() != nullptr) free_segment(segment);
  }
}

bool RowIndex::start() {
  const Segment segment = make_segment(kStep, 0);
  if (segment.buckets() == nullptr) return false;
  directory_.push_back(segment);
  return true;
}

RowIndex::Segment RowIndex::make_segment(std::uint32_t count, std::uint32_t depth) {
  const std::size_t bytes = count * sizeof(Bucket);
  std::byte* memory = bytes <= ArenaPool::kMaxRunBytes ? pool_->allocate(bytes) : nullptr;
  if (memory == nullptr) return Segment(nullptr, 0);
  std::memset(memory, 0, bytes);
  const Segment segment(reinterpret_cast<Bucket*>(memory), count);
  segment.set_depth(depth);
  ++segments_;
  segment_bytes_ += bytes;
  return segment;
}

void RowIndex::free_segment(Segment segment) {
  const std::size_t bytes = segment.count() * sizeof(Bucket);
  pool_->free(reinterpret_cast<std::byte*>(segment.buckets()), bytes);
  --segments_;
  segment_bytes_ -= bytes;
}

void RowIndex::put(Segment segment, std::uint64_t hash, std::uint32_t row) noexcept {
  std::uint32_t at = segment.home(hash);
  for (;;) {
    Bucket& bucket = segment.buckets()[at];
    if (const std::uint32_t free_slots = matches(bucket, 0); free_slots != 0) {
      const auto slot = static_cast<std::uint32_t>(__builtin_ctz(free_slots));
      bucket.tags[slot] = tag_of(hash);
      bucket.rows[slot] = row;
      break;
    }
    if (bucket.passed_over != kSticky) ++bucket.passed_over;
    if (++at == segment.count()) at = 0;
  }
  segment.set_rows(segment.rows() + 1);
}

bool RowIndex::remove(std::uint64_t hash, std::uint32_t row) {
  if (directory_.empty()) return false;
  const Found found = search(hash, [row](std::uint32_t other) { return other == row; });
  if (found.row == kNone) return false;
  const Segment segment = directory_[directory_at(hash)];
  found.bucket->tags[found.slot] = 0;
  std::uint32_t at = segment.home(hash);
  for (std::uint32_t passed = 0; passed < found.distance; ++passed) {
    Bucket& bucket = segment.buckets()[at];
    if (bucket.passed_over != kSticky) --bucket.passed_over;
    if (++at == segment.count()) at = 0;
  }
  segment.set_rows(segment.rows() - 1);
  return true;
}

bool RowIndex::is_full(Segment segment) noexcept { return segment.rows() * 100ull >= segment.count() * kSlots * 90ull; }

bool RowIndex::is_sparse(Segment segment) noexcept {
  return segment.count() > kStep && segment.rows() * 100ull < segment.count() * kSlots * 40ull;
}

// Segments differ in their largest size by up to a third, as a function of what they hold.
bool RowIndex::must_split(Segment segment, std::uint64_t hash) noexcept {
  const std::uint32_t depth = segment.depth();
  if (depth >= kMaxDepth) return false;
  const std::uint64_t prefix = hash & ((std::uint64_t{1} << depth) - 1);
  const auto spread = static_cast<std::uint32_t>(mix_bits(prefix + depth) % 13) * kStep;
  return grown_count(segment) > kLargest - spread;
}

std::uint32_t RowIndex::grown_count(Segment segment) noexcept {
  return round_to_step(std::max<std::uint64_t>(std::uint64_t{segment.count()} * 9 / 8, segment.count() + kStep));
}

std::uint32_t RowIndex::count_for(std::size_t rows) noexcept {
  return round_to_step((std::uint64_t{rows} * 5 / 4 + kSlots) / kSlots);
}

// Every directory entry whose low `depth` bits are the hash's.
void RowIndex::point_at(Segment segment, std::uint64_t hash, std::uint32_t depth) {
  const std::size_t stride = std::size_t{1} << depth;
  for (std::size_t at = hash & (stride - 1); at < directory_.size(); at += stride) directory_[at] = segment;
}

bool RowIndex::resize(std::uint64_t hash, const std::vector<Entry>& entries, std::uint32_t count) {
  const Segment old = directory_[directory_at(hash)];
  if (count == old.count()) return false;
  const Segment segment = make_segment(count, old.depth());
  if (segment.buckets() == nullptr) return false;
  for (const Entry& entry : entries) put(segment, entry.hash, entry.row);
  point_at(segment, hash, old.depth());
  free_segment(old);
  return true;
}

bool RowIndex::split(std::uint64_t hash, const std::vector<Entry>& entries) {
  const Segment old = directory_[directory_at(hash)];
  const std::uint32_t depth = old.depth();
  const std::uint64_t bit = std::uint64_t{1} << depth;
  const auto upper_rows = static_cast<std::size_t>(
      std::count_if(entries.begin(), entries.end(), [bit](const Entry& entry) { return (entry.hash & bit) != 0; }));
  const Segment lower = make_segment(count_for(entries.size() - upper_rows), depth + 1);
  if (lower.buckets() == nullptr) return false;
  const Segment upper = make_segment(count_for(upper_rows), depth + 1);
  if (upper.buckets() == nullptr) {
    free_segment(lower);
    return false;
  }
  for (const Entry& entry : entries) put((entry.hash & bit) != 0 ? upper : lower, entry.hash, entry.row);
  if (directory_.size() == bit) {
    directory_.reserve(2 * directory_.size());
    directory_.insert(directory_.end(), directory_.begin(), directory_.end());
  }
  point_at(lower, hash & (bit - 1), depth + 1);
  point_at(upper, (hash & (bit - 1)) | bit, depth + 1);
  free_segment(old);
  return true;
}

std::uint64_t RowIndex::bytes_for(std::uint64_t rows) const noexcept {
  // A segment that is touched grows by at most half (a split sizes both halves anew), besides what its new
  // rows take; while it is rebuilt, old and new stand side by side.
  const std::uint64_t touched = std::min(rows, std::max<std::uint64_t>(segments_, 1));
  const std::uint64_t mean_bytes = segments_ == 0 ? 0 : segment_bytes_ / segments_;
  const std::uint64_t grown = touched * (mean_bytes / 2 + 2 * kStep * sizeof(Bucket));
  const std::uint64_t transient = 2 * kLargest * sizeof(Bucket);
  const std::uint64_t directory = directory_.size() * sizeof(Segment) + rows / 64;
  return grown + rows * kBytesPerRow + transient + directory;
}

}  // namespace sparserow
