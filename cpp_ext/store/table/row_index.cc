#include "store/table/row_index.h"

#include <algorithm>

#include "util/random.h"

namespace sparserow {
namespace {

constexpr std::uint32_t kStep = IndexSegment::kStep;
constexpr std::uint32_t kLargest = 160;      // buckets of a segment that need not be split
constexpr std::uint32_t kHardLimit = 14000;  // of a segment that can no longer be split: its entries have 16 bits
constexpr std::uint32_t kMaxDepth = 20;
constexpr std::uint16_t kSticky = 0xffff;     // a count of passed-over entries that is no longer exact
constexpr std::uint64_t kBytesPerEntry = 16;  // at a load of 0.8
constexpr std::uint64_t kFewEntries = 8;      // of a segment, on average: all are merged

constexpr std::uint32_t round_to_step(std::uint64_t buckets) noexcept {
  return static_cast<std::uint32_t>(
      std::clamp<std::uint64_t>((buckets + kStep - 1) / kStep * kStep, kStep, kHardLimit));
}

// The bit of a suffix below its first `depth` ones.
constexpr std::uint64_t bit_below(std::uint32_t depth) noexcept { return std::uint64_t{1} << (63 - depth); }

}  // namespace

// Without entries; its depth is not set.
RowIndex::Segment RowIndex::make_segment(std::uint32_t count) {
  const std::size_t bytes = count * sizeof(Bucket);
  std::byte* memory = bytes <= ArenaPool::kMaxRunBytes ? pool_->allocate(bytes) : nullptr;
  if (memory == nullptr) return Segment(nullptr, 0);
  const Segment segment(reinterpret_cast<Bucket*>(memory), count);
  for (std::uint32_t at = 0; at < count; ++at) {
    Bucket& bucket = segment.buckets()[at];
    std::fill_n(bucket.suffixes, kEntries, Bucket::kNoSuffix);
    std::fill_n(bucket.rows, kEntries, kNone);
    bucket.passed_over = bucket.note = 0;
  }
  ++segments_;
  add_bytes(bytes);
  return segment;
}

void RowIndex::free_segment(Segment segment) {
  const std::size_t bytes = segment.count() * sizeof(Bucket);
  pool_->free(reinterpret_cast<std::byte*>(segment.buckets()), bytes);
  --segments_;
  add_bytes(-std::uint64_t{bytes});
}

bool RowIndex::insert(std::uint64_t suffix, std::uint32_t row) {
  for (;;) {  // a place that is made or split may leave the suffix without one, or with one that is full
    if (!has_place(suffix) && !add_place(suffix)) return false;
    const Segment segment = top_.segment_of(suffix);
    if (!is_full(segment)) {
      put(segment, suffix, row);
      ++entries_;
      return true;
    }
    if (!grow(suffix)) return false;
  }
}

// A bucket's note counts its entries while its segment is filled; filled() says that it is.
void RowIndex::put_anew(Segment segment, std::uint64_t suffix, std::uint32_t row) noexcept {
  Bucket* const begin = segment.buckets();
  Bucket* bucket = begin + segment.home(suffix);
  while (bucket->note == kEntries) {
    if (bucket->passed_over != kSticky) ++bucket->passed_over;
    if (++bucket == begin + segment.count()) bucket = begin;
  }
  bucket->suffixes[bucket->note] = suffix;
  bucket->rows[bucket->note++] = row;
}

void RowIndex::filled(Segment segment, std::uint32_t depth) noexcept {
  std::uint32_t entries = 0;
  for (std::uint32_t at = 0; at < segment.count(); ++at) {
    entries += segment.buckets()[at].note;
    segment.buckets()[at].note = 0;
  }
  segment.set_entries(entries);
  segment.set_depth(depth);
}

void RowIndex::put(Segment segment, std::uint64_t suffix, std::uint32_t row) noexcept {
  std::uint32_t at = segment.home(suffix);
  for (;;) {
    Bucket& bucket = segment.buckets()[at];
    const auto entry = static_cast<std::uint32_t>(std::find(bucket.rows, bucket.rows + kEntries, kNone) - bucket.rows);
    if (entry < kEntries) {
      bucket.suffixes[entry] = suffix;
      bucket.rows[entry] = row;
      break;
    }
    if (bucket.passed_over != kSticky) ++bucket.passed_over;
    if (++at == segment.count()) at = 0;
  }
  segment.set_entries(segment.entries() + 1);
}

std::uint32_t RowIndex::erase(std::uint64_t suffix) {
  const Found found = search(suffix);
  if (found.bucket == nullptr) return kNone;
  const std::uint32_t row = found.bucket->rows[found.entry];
  found.bucket->rows[found.entry] = kNone;
  found.bucket->suffixes[found.entry] = Bucket::kNoSuffix;
  const Segment segment = top_.segment_of(suffix);
  std::uint32_t at = segment.home(suffix);
  for (std::uint32_t passed = 0; passed < found.distance; ++passed) {
    Bucket& bucket = segment.buckets()[at];
    if (bucket.passed_over != kSticky) --bucket.passed_over;
    if (++at == segment.count()) at = 0;
  }
  segment.set_entries(segment.entries() - 1);
  if (is_sparse(segment)) (void)resize(suffix, count_for(segment.entries()));  // or it stays as it is
  if (--entries_ < segments_ * kFewEntries && segments_ > 1) merge();
  return row;
}

RowIndex::Range RowIndex::range_at(std::uint64_t suffix) const {
  const Place place = place_from(suffix);
  return {entries_of(place.segment), place.next};
}

bool RowIndex::is_full(Segment segment) noexcept {
  return segment.entries() * 100ull >= segment.count() * kEntries * 92ull;
}

bool RowIndex::is_sparse(Segment segment) noexcept {
  return segment.count() > kStep && segment.entries() * 100ull < segment.count() * kEntries * 40ull;
}

// The largest size of a segment before it is split. Segments differ in it by up to a third, as a function of their
// prefix, so that they are not all split at once.
std::uint32_t RowIndex::largest_count(Segment segment, std::uint64_t suffix) noexcept {
  const std::uint32_t depth = segment.depth();
  if (depth >= kMaxDepth) return kHardLimit;
  return kLargest - static_cast<std::uint32_t>(mix_bits(first_bits(suffix, depth) + depth) % 13) * kStep;
}

std::uint32_t RowIndex::grown_count(Segment segment) noexcept {
  return round_to_step(std::uint64_t{segment.count()} + segment.count() / 32 + kStep);
}

std::uint32_t RowIndex::count_for(std::size_t entries) noexcept {
  return round_to_step((std::uint64_t{entries} * 10 / 9 + kEntries) / kEntries);
}

std::vector<RowIndex::Entry> RowIndex::entries_of(Segment segment) {
  std::vector<Entry> entries;
  entries.reserve(segment.entries());
  visit_entries(segment, [&](std::uint64_t suffix, std::uint32_t row) { entries.push_back({suffix, row}); });
  return entries;
}

bool RowIndex::grow(std::uint64_t suffix) {
  const Segment segment = top_.segment_of(suffix);
  const std::uint32_t count = grown_count(segment);
  return count > largest_count(segment, suffix) ? split(suffix) : resize(suffix, count);
}

// Makes the segment of the suffixes that are coming as large as so many entries need, or splits it; true when it was
// split.
bool RowIndex::grow_for(std::span<const std::uint64_t> coming, std::size_t entries) {
  const Segment segment = top_.segment_of(coming[0]);
  const std::uint32_t count = count_for(entries);
  if (count <= segment.count()) return false;
  if (count > largest_count(segment, coming[0])) return split(coming[0], coming);
  (void)resize(coming[0], count);
  return false;
}

void RowIndex::make_room(std::span<const std::uint64_t> suffixes) {
  for (std::size_t begin = 0; begin < suffixes.size();) {
    if (!has_place(suffixes[begin]) && !add_place(suffixes[begin])) return;
    const Segment segment = top_.segment_of(suffixes[begin]);
    const std::uint64_t prefix = first_bits(suffixes[begin], segment.depth());
    std::size_t end = begin + 1;
    while (end < suffixes.size() && first_bits(suffixes[end], segment.depth()) == prefix) ++end;
    // Each half of a segment that was split is looked at again.
    if (!grow_for(suffixes.subspan(begin, end - begin), segment.entries() + (end - begin))) begin = end;
  }
}

bool RowIndex::resize(std::uint64_t suffix, std::uint32_t count) {
  const Segment old = top_.segment_of(suffix);
  if (count == old.count()) return false;
  const Segment segment = make_segment(count);
  if (segment.buckets() == nullptr) return false;
  visit_entries(old, [&](std::uint64_t each, std::uint32_t row) { put_anew(segment, each, row); });
  filled(segment, old.depth());
  point_at(segment, suffix, old.depth());
  free_segment(old);
  return true;
}

bool RowIndex::split(std::uint64_t suffix, std::span<const std::uint64_t> coming) {
  const bool has_split = segments_ > 1 || top_.prefix_bits > 0 || directory_of(suffix).depth() > 0;
  if (!has_split && slot_bits_ > 0) return choose_prefixes(coming);
  if (top_.segment_of(suffix).depth() == top_.prefix_bits + directory_of(suffix).depth()) make_deeper(suffix);
  const Segment old = top_.segment_of(suffix);
  const std::uint32_t depth = old.depth();
  const std::uint64_t bit = bit_below(depth);
  std::size_t upper_entries = 0;
  visit_entries(old, [&](std::uint64_t each, std::uint32_t /*row*/) { upper_entries += (each & bit) != 0 ? 1 : 0; });
  if (upper_entries == 0 || upper_entries == old.entries()) {
    const bool is_upper = old.entries() == 0 ? (suffix & bit) != 0 : upper_entries != 0;
    old.set_depth(depth + 1);
    clear_places(is_upper ? suffix & ~bit : suffix | bit, depth + 1);
    return true;
  }
  const Segment lower = make_segment(count_for(old.entries() - upper_entries));
  if (lower.buckets() == nullptr) return false;
  const Segment upper = make_segment(count_for(upper_entries));
  if (upper.buckets() == nullptr) {
    free_segment(lower);
    return false;
  }
  visit_entries(old,
                [&](std::uint64_t each, std::uint32_t row) { put_anew((each & bit) != 0 ? upper : lower, each, row); });
  filled(lower, depth + 1);
  filled(upper, depth + 1);
  point_at(lower, suffix & ~bit, depth + 1);
  point_at(upper, suffix | bit, depth + 1);
  free_segment(old);
  return true;
}

std::uint64_t RowIndex::lasting_bytes_for(std::uint64_t rows) const noexcept {
  static_assert(kTransientBytes == 2 * kLargest * sizeof(Bucket));
  // At a load of 0.92 an entry has 13.9 bytes of its segment; after any growth it has 16 at most, besides rounding to
  // a step of each of two halves. So a touched segment grows by an eighth and what its new rows take.
  // A row of a prefix that no other row has takes a segment and two places. A batch in which prefixes are chosen may go
  // beyond this by so much for each prefix that none of its rows before had: a promise for that would be ten times the
  // rest of a small table's.
  const std::uint64_t prefixes = top_.prefix_bits == 0 ? 0 : std::uint64_t{1} << top_.prefix_bits;
  const std::uint64_t fresh = std::min(rows, absent_places_ + prefixes);
  const std::uint64_t touched = std::min(rows, std::max<std::uint64_t>(segments_, 1));
  const std::uint64_t touched_bytes = std::min<std::uint64_t>(segment_bytes_, touched * kLargest * sizeof(Bucket));
  const std::uint64_t rounding =
      (touched + rows / 256) * 2 * kStep * sizeof(Bucket) + fresh * (kStep * sizeof(Bucket) + sizeof(Segment));
  const std::uint64_t directory = directory_bytes_ + rows / 16 + prefixes * sizeof(IndexDirectory);
  return touched_bytes / 8 + rounding + rows * kBytesPerEntry + directory;
}

}  // namespace sparserow
