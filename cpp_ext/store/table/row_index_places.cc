// Where the segments of an index are: its directories, and the prefixes that have one.
#include <algorithm>
#include <array>
#include <bitset>

#include "store/table/row_index.h"

namespace sparserow {
namespace {

constexpr std::size_t kMostAtFirst = 4;  // prefixes, when they are chosen

// What a place without suffixes points at. It is never written.
constexpr IndexBucket kNoBucket = {
    .suffixes = {IndexBucket::kNoSuffix, IndexBucket::kNoSuffix, IndexBucket::kNoSuffix, IndexBucket::kNoSuffix,
                 IndexBucket::kNoSuffix},
    .rows = {IndexBucket::kNoRow, IndexBucket::kNoRow, IndexBucket::kNoRow, IndexBucket::kNoRow, IndexBucket::kNoRow},
    .passed_over = 0,
    .note = 0};
const IndexSegment kNoSegment(const_cast<IndexBucket*>(&kNoBucket), 1);
const IndexDirectory kNoDirectory(const_cast<IndexSegment*>(&kNoSegment), 0);

bool is_absent(IndexSegment segment) noexcept { return segment.buckets() == &kNoBucket; }
bool is_absent(IndexDirectory directory) noexcept { return directory.segments() == &kNoSegment; }

std::uint32_t count_absent(std::span<const IndexSegment> places) noexcept {
  return static_cast<std::uint32_t>(std::ranges::count_if(places, [](IndexSegment place) { return is_absent(place); }));
}

IndexSegment* new_places(std::size_t count) {
  auto* const places = new IndexSegment[count];
  std::fill_n(places, count, kNoSegment);
  return places;
}

}  // namespace

RowIndex::RowIndex(ArenaPool& pool, Isa isa, std::atomic<std::uint64_t>* used, std::uint32_t slot_bits) noexcept
    : RowIndex(pool, index_probes_of(isa), used, slot_bits) {}

RowIndex::RowIndex(ArenaPool& pool, const IndexProbeTable& probes, std::atomic<std::uint64_t>* used,
                   std::uint32_t slot_bits) noexcept
    : pool_(&pool),
      used_(used),
      probes_(&probes),
      slot_bits_(slot_bits),
      top_{.directories = &only_},
      only_(kNoDirectory) {}

RowIndex::~RowIndex() {
  for (std::uint64_t at = 0; at <= top_.last; ++at) {
    const IndexDirectory directory = top_.directories[at];
    visit_segments(directory, [this](Segment segment) { free_segment(segment); });
    if (!is_absent(directory)) delete[] directory.segments();
  }
}

void RowIndex::swap(RowIndex& other) noexcept {
  std::swap(top_, other.top_);
  std::swap(only_, other.only_);
  std::swap(many_, other.many_);
  std::swap(entries_, other.entries_);
  std::swap(segments_, other.segments_);
  std::swap(absent_places_, other.absent_places_);
  std::swap(segment_bytes_, other.segment_bytes_);
  std::swap(directory_bytes_, other.directory_bytes_);
  for (RowIndex* const index : {this, &other})
    index->top_.directories = index->many_ ? index->many_.get() : &index->only_;
}

// Visits each segment of a directory once, in the order of suffixes.
template <class Visit>
void RowIndex::visit_segments(IndexDirectory directory, Visit&& visit) const {
  for (std::size_t at = 0; at < directory.size();) {
    const Segment segment = directory.segments()[at];
    if (is_absent(segment)) {
      ++at;
      continue;
    }
    at += std::size_t{1} << (top_.prefix_bits + directory.depth() - segment.depth());
    visit(segment);
  }
}

std::uint64_t RowIndex::move_segments(const ArenaPool::Emptying& from, std::uint64_t suffix, std::size_t most_bytes) {
  for (std::size_t moved = 0; moved < most_bytes;) {
    const Place place = place_from(suffix);
    const Segment old = place.segment;
    if (!is_absent(old) && from.contains(reinterpret_cast<const std::byte*>(old.buckets()))) {
      const Segment segment = make_segment(old.count());
      if (segment.buckets() == nullptr) return 0;
      std::copy_n(old.buckets(), old.count(), segment.buckets());
      point_at(segment, place.suffix, old.depth());
      free_segment(old);
      moved += old.count() * sizeof(Bucket);
    }
    suffix = place.next;
    if (suffix == 0) break;
  }
  return suffix;
}

// Builds an index with the same entries in this one's place. What has no memory stays as it is.
void RowIndex::merge() {
  std::vector<Entry> entries;
  entries.reserve(entries_);
  std::uint64_t next = 0;
  do {
    next = visit_range(next, [&](std::uint64_t suffix, std::uint32_t row) { entries.push_back({suffix, row}); });
  } while (next != 0);
  std::ranges::sort(entries, {}, &Entry::suffix);
  std::vector<std::uint64_t> suffixes;
  suffixes.reserve(entries.size());
  for (const Entry& entry : entries) suffixes.push_back(entry.suffix);
  RowIndex merged(*pool_, *probes_, used_, slot_bits_);
  merged.make_room(suffixes);
  for (const Entry& entry : entries) {
    if (!merged.insert(entry.suffix, entry.row)) return;
  }
  swap(merged);
}

bool RowIndex::has_place(std::uint64_t suffix) const noexcept {
  return first_bits(suffix, top_.prefix_bits) - top_.first <= top_.last && !is_absent(top_.segment_of(suffix));
}

// The first segment that has suffixes from `suffix` on.
RowIndex::Place RowIndex::place_from(std::uint64_t suffix) const noexcept {
  const std::uint32_t bits = top_.prefix_bits;
  // The first suffix after those that have the first `depth` bits of this one; 0 = it is in no directory.
  const auto after = [&](std::uint32_t depth) -> std::uint64_t {
    if (depth == 0) return 0;
    const std::uint64_t next = (first_bits(suffix, depth) + 1) << (64 - depth);
    return next != 0 && first_bits(next, bits) - top_.first <= top_.last ? next : 0;
  };
  if (first_bits(suffix, bits) < top_.first) suffix = top_.first << (64 - bits);
  if (first_bits(suffix, bits) - top_.first > top_.last) return {kNoSegment, 0, 0};
  for (;;) {
    const Segment segment = top_.segment_of(suffix);
    if (!is_absent(segment)) return {segment, suffix, after(segment.depth())};
    suffix = after(bits + top_.directories[first_bits(suffix, bits) - top_.first].depth());
    if (suffix == 0) return {kNoSegment, 0, 0};
  }
}

IndexDirectory& RowIndex::directory_of(std::uint64_t suffix) noexcept {
  return (many_ ? many_.get() : &only_)[first_bits(suffix, top_.prefix_bits) - top_.first];
}

// The places of the suffixes whose first `depth` bits are this one's.
std::span<RowIndex::Segment> RowIndex::places_of(std::uint64_t suffix, std::uint32_t depth) noexcept {
  const std::uint32_t bits = top_.prefix_bits;
  const IndexDirectory directory = directory_of(suffix);
  const std::size_t count = std::size_t{1} << (bits + directory.depth() - depth);
  return {directory.segments() + first_bits(suffix << bits, depth - bits) * count, count};
}

void RowIndex::point_at(Segment segment, std::uint64_t suffix, std::uint32_t depth) noexcept {
  std::ranges::fill(places_of(suffix, depth), segment);
}

void RowIndex::clear_places(std::uint64_t suffix, std::uint32_t depth) noexcept {
  point_at(kNoSegment, suffix, depth);
  absent_places_ += static_cast<std::uint32_t>(places_of(suffix, depth).size());
}

// Makes a segment for a suffix that has no place: of all places around that have none either.
bool RowIndex::add_place(std::uint64_t suffix) {
  const std::uint32_t bits = top_.prefix_bits;
  widen_to(first_bits(suffix, bits));
  IndexDirectory& directory = directory_of(suffix);
  if (is_absent(directory)) {
    directory = IndexDirectory(new_places(1), 0);
    directory_bytes_ += sizeof(Segment);
    ++absent_places_;
  }
  const Segment segment = make_segment(kStep);
  if (segment.buckets() == nullptr) return false;
  std::uint32_t depth = bits + directory.depth();
  const auto is_free = [&](std::uint64_t neighbour) {
    const auto places = places_of(neighbour, depth);
    return count_absent(places) == places.size();
  };
  while (depth > bits && is_free(suffix ^ std::uint64_t{1} << (64 - depth))) --depth;
  filled(segment, depth);
  point_at(segment, suffix, depth);
  absent_places_ -= static_cast<std::uint32_t>(places_of(suffix, depth).size());
  return true;
}

// Has a place for the directory of a prefix.
void RowIndex::widen_to(std::uint64_t prefix) {
  const std::uint64_t first = std::min(top_.first, prefix);
  const std::uint64_t last = std::max(top_.first + top_.last, prefix) - first;
  if (first == top_.first && last == top_.last) return;
  auto wider = std::make_unique<IndexDirectory[]>(last + 1);
  std::fill_n(wider.get(), last + 1, kNoDirectory);
  std::copy_n(top_.directories, top_.last + 1, wider.get() + (top_.first - first));
  directory_bytes_ += (last + 1 - (many_ ? top_.last + 1 : 0)) * sizeof(IndexDirectory);
  many_ = std::move(wider);
  top_ = {many_.get(), first, last, top_.prefix_bits};
}

// Gives each place of the suffix's directory a second one.
void RowIndex::make_deeper(std::uint64_t suffix) {
  IndexDirectory& directory = directory_of(suffix);
  const std::span<Segment> old(directory.segments(), directory.size());
  Segment* const places = new_places(2 * old.size());
  for (std::size_t at = 0; at < old.size(); ++at) std::fill_n(places + 2 * at, 2, old[at]);
  absent_places_ += count_absent(old);
  directory_bytes_ += old.size() * sizeof(Segment);
  directory = IndexDirectory(places, directory.depth() + 1);
  delete[] old.data();
}

// Instead of the first split: gives a segment to each of the longest prefixes of which the suffixes have few. `coming`:
// suffixes that are to be added. False when the system has no memory, and nothing has changed.
bool RowIndex::choose_prefixes(std::span<const std::uint64_t> coming) {
  const Segment old = directory_of(0).segments()[0];
  std::bitset<std::size_t{1} << kMostSlotBits> present;
  visit_entries(old, [&](std::uint64_t suffix, std::uint32_t /*row*/) { present.set(first_bits(suffix, slot_bits_)); });
  for (const std::uint64_t suffix : coming) present.set(first_bits(suffix, slot_bits_));
  std::uint32_t bits = slot_bits_;
  std::vector<std::uint64_t> prefixes;  // ascending
  for (;; --bits) {
    prefixes.clear();
    for (std::uint64_t longest = 0; longest >> slot_bits_ == 0; ++longest) {
      const std::uint64_t prefix = longest >> (slot_bits_ - bits);
      if (present[longest] && (prefixes.empty() || prefixes.back() != prefix)) prefixes.push_back(prefix);
    }
    if (prefixes.size() <= kMostAtFirst) break;
  }
  const auto index_of = [&](std::uint64_t suffix) {
    return std::ranges::lower_bound(prefixes, first_bits(suffix, bits)) - prefixes.begin();
  };
  const std::uint64_t last = prefixes.back() - prefixes[0];
  // What may throw comes before anything is changed.
  auto many = last == 0 ? nullptr : std::make_unique<IndexDirectory[]>(last + 1);
  std::array<std::unique_ptr<Segment[]>, kMostAtFirst> places;
  for (std::size_t i = 0; i < prefixes.size(); ++i) places[i].reset(new_places(1));
  std::array<std::size_t, kMostAtFirst> entries{};
  visit_entries(old, [&](std::uint64_t suffix, std::uint32_t /*row*/) { ++entries[index_of(suffix)]; });
  std::array<Segment, kMostAtFirst> segments;
  for (std::size_t i = 0; i < prefixes.size(); ++i) {
    segments[i] = make_segment(count_for(entries[i]));
    if (segments[i].buckets() != nullptr) continue;
    while (i > 0) free_segment(segments[--i]);
    return false;
  }
  visit_entries(old,
                [&](std::uint64_t suffix, std::uint32_t row) { put_anew(segments[index_of(suffix)], suffix, row); });
  delete[] only_.segments();
  free_segment(old);
  only_ = kNoDirectory;
  if (many) std::fill_n(many.get(), last + 1, kNoDirectory);
  many_ = std::move(many);
  top_ = {many_ ? many_.get() : &only_, prefixes[0], last, bits};
  directory_bytes_ = prefixes.size() * sizeof(Segment) + (many_ ? (last + 1) * sizeof(IndexDirectory) : 0);
  for (std::size_t i = 0; i < prefixes.size(); ++i) {
    filled(segments[i], bits);
    places[i][0] = segments[i];
    directory_of(prefixes[i] << (64 - bits)) = IndexDirectory(places[i].release(), 0);
  }
  return true;
}

}  // namespace sparserow
