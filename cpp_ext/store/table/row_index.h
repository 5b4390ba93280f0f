// The index of one (table, stripe): suffix of a hash (slot_order.h) -> row id, in small segments that grow and split
// one at a time.
//
// A directory, addressed by a suffix's high bits, points at segments; a segment is an array of 64-byte buckets of five
// suffixes and five row ids. The first bits are the slot's (slot_order.h), and a shard may have few of the slots: when
// the first segment is full, the index chooses how many of these bits are a prefix, so that there are few prefixes, and
// each has a directory of its own, in an array from the first prefix to the last. A place without suffixes points at a
// bucket that all indexes share.
//
// A suffix's home bucket follows from its low bits; when it is full the entry goes to the next bucket with room, and
// every bucket passed over counts it, so that a search ends at the first bucket that no entry passed over, and an
// erased entry leaves nothing behind. A full segment is rebuilt a little larger; past its largest size (it differs
// between segments, so that they do not all grow at once) it is split in two.
//
// Invariants:
//  1. Load stays within about 0.84 and 0.92 once a segment is larger than the smallest.
//  2. No operation touches more than one segment, but for two: a directory is doubled (8 bytes per 300 rows or more);
//     an index whose segments have lost nearly all entries is built anew, so that its bytes do not grow with history.
//  3. A segment holds all suffixes of a range, and segments follow each other in the order of suffixes.
//
// A search touches no row. The lowest bit of a suffix is 0 (slot_order.h). Not thread-safe. Owns its segments.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "store/table/arena_pool.h"
#include "store/table/index_probe.h"

namespace sparserow {

class RowIndex {
 public:
  static constexpr std::uint32_t kNone = IndexBucket::kNoRow;
  static constexpr std::uint32_t kEntries = IndexBucket::kEntries;
  static constexpr std::uint32_t kMostSlotBits = 10;  // of a suffix, where there are 65,536 slots

  struct Entry {
    std::uint64_t suffix;
    std::uint32_t row;
  };
  // The entries of a range of suffixes, in unspecified order.
  struct Range {
    std::vector<Entry> entries;
    std::uint64_t next = 0;  // the first suffix after it; 0 = it is the last
  };

  // used: where the bytes of its segments are counted too, beside the pool; outlives this, or null. slot_bits: how many
  // of a suffix's first bits are a slot's, at most kMostSlotBits.
  explicit RowIndex(ArenaPool& pool, Isa isa = best_isa(), std::atomic<std::uint64_t>* used = nullptr,
                    std::uint32_t slot_bits = kMostSlotBits) noexcept;
  RowIndex(const RowIndex&) = delete;
  RowIndex& operator=(const RowIndex&) = delete;
  ~RowIndex();

  // The row of `suffix`; kNone when there is none.
  [[nodiscard]] std::uint32_t find(std::uint64_t suffix) const noexcept {
    const Found found = search(suffix);
    return found.bucket == nullptr ? kNone : found.bucket->rows[found.entry];
  }

  // The rows of at most kMostProbed suffixes, kNone where there is none. After begin_find() those whose positions are
  // in probe.left are not known yet; finish_find() finds them, better after other work, since their buckets are
  // fetched.
  void begin_find(std::span<const std::uint64_t> suffixes, std::uint32_t* rows, IndexProbe& probe) const noexcept {
    locate(suffixes, probe.buckets);
    probe.left_count = compare(suffixes, rows, probe.buckets, probe.left);
  }
  void finish_find(std::span<const std::uint64_t> suffixes, std::uint32_t* rows, IndexProbe& probe) const noexcept {
    finish(suffixes, rows, probe.buckets, probe.left, probe.left_count);
  }
  // The parts of such a search (index_probe.h), for one that goes through several indexes at a time.
  void locate(std::span<const std::uint64_t> suffixes, const IndexBucket** buckets) const noexcept {
    probes_->locate(top_, suffixes.data(), suffixes.size(), buckets);
  }
  [[nodiscard]] std::size_t compare(std::span<const std::uint64_t> suffixes, std::uint32_t* rows,
                                    const IndexBucket** buckets, std::uint16_t* left) const noexcept {
    return probes_->compare(top_, suffixes.data(), suffixes.size(), rows, buckets, left);
  }
  void finish(std::span<const std::uint64_t> suffixes, std::uint32_t* rows, const IndexBucket** buckets,
              const std::uint16_t* left, std::size_t left_count) const noexcept {
    if (left_count == 0) return;
    probes_->finish(top_, suffixes.data(), rows, buckets, left, left_count);
  }

  // Fetches what insert() of a suffix reads and find() does not.
  [[gnu::always_inline]] void fetch_for_insert(std::uint64_t suffix) const noexcept {
    __builtin_prefetch(top_.segment_of(suffix).buckets());
  }
  // Before many suffixes are added: their segments grow once, and not by each few of them. Paths that follow each other
  // should be in one segment, as sorted ones are; none of them is there. What has no memory is left to insert().
  void make_room(std::span<const std::uint64_t> suffixes);
  // Adds a suffix that is not there. False when the system has no memory; then nothing has changed.
  [[nodiscard]] bool insert(std::uint64_t suffix, std::uint32_t row);
  // Names another row for a suffix that is there.
  void replace(std::uint64_t suffix, std::uint32_t row) noexcept {
    const Found found = search(suffix);
    found.bucket->rows[found.entry] = row;
  }
  // Removes the entry of `suffix` and returns its row; kNone when there is none. A segment that is mostly empty is
  // rebuilt smaller, and many of them are merged.
  std::uint32_t erase(std::uint64_t suffix);

  // The segment that holds `suffix`, whole; where there is none, the next one.
  [[nodiscard]] Range range_at(std::uint64_t suffix) const;
  // The same without a copy: visit(suffix, row) for each entry. Returns the first suffix after the segment; 0 = it is
  // the last.
  template <class Visit>
  std::uint64_t visit_range(std::uint64_t suffix, Visit&& visit) const {
    const Place place = place_from(suffix);
    visit_entries(place.segment, visit);
    return place.next;
  }

  // Moves the segments that are in such arenas, from the one of `suffix` on, until so many bytes have moved. Returns
  // where to go on; 0 at the end, or where the system has no memory.
  std::uint64_t move_segments(const ArenaPool::Emptying& from, std::uint64_t suffix, std::size_t most_bytes);

  [[nodiscard]] std::uint64_t bytes() const noexcept { return segment_bytes_ + directory_bytes_; }
  // Upper bound of the memory that `rows` more rows take, transient memory of one growth included.
  [[nodiscard]] std::uint64_t bytes_for(std::uint64_t rows) const noexcept {
    return lasting_bytes_for(rows) + kTransientBytes;
  }
  [[nodiscard]] std::uint64_t lasting_bytes_for(std::uint64_t rows) const noexcept;  // without it
  // A segment that grows stands beside its successor for a moment.
  static constexpr std::uint64_t kTransientBytes = std::uint64_t{2} * 160 * 64;

 private:
  using Bucket = IndexBucket;
  using Segment = IndexSegment;
  static constexpr std::uint32_t kStep = Segment::kStep;

  struct Found {
    Bucket* bucket = nullptr;
    std::uint32_t entry = 0;
    std::uint32_t distance = 0;  // buckets passed over
  };

  struct Place {
    Segment segment;           // or absent
    std::uint64_t suffix = 0;  // one of its own
    std::uint64_t next = 0;    // as Range::next
  };

  RowIndex(ArenaPool& pool, const IndexProbeTable& probes, std::atomic<std::uint64_t>* used,
           std::uint32_t slot_bits) noexcept;

  [[nodiscard]] Place place_from(std::uint64_t suffix) const noexcept;

  [[nodiscard]] Found search(std::uint64_t suffix) const noexcept {
    const Segment segment = top_.segment_of(suffix);
    std::uint32_t at = segment.home(suffix);
    for (std::uint32_t distance = 0; distance < segment.count(); ++distance) {
      Bucket& bucket = segment.buckets()[at];
      for (std::uint32_t entry = 0; entry < kEntries; ++entry) {
        if (bucket.suffixes[entry] == suffix) return {&bucket, entry, distance};
      }
      if (bucket.passed_over == 0) break;
      if (++at == segment.count()) at = 0;
    }
    return {};
  }

  // Places of suffixes in directories (row_index_places.cc).
  [[nodiscard]] bool has_place(std::uint64_t suffix) const noexcept;
  bool add_place(std::uint64_t suffix);
  void clear_places(std::uint64_t suffix, std::uint32_t depth) noexcept;
  void point_at(Segment segment, std::uint64_t suffix, std::uint32_t depth) noexcept;
  [[nodiscard]] std::span<Segment> places_of(std::uint64_t suffix, std::uint32_t depth) noexcept;
  [[nodiscard]] IndexDirectory& directory_of(std::uint64_t suffix) noexcept;
  void widen_to(std::uint64_t prefix);
  void make_deeper(std::uint64_t suffix);
  bool choose_prefixes(std::span<const std::uint64_t> coming);
  template <class Visit>
  void visit_segments(IndexDirectory directory, Visit&& visit) const;

  bool grow(std::uint64_t suffix);
  bool grow_for(std::span<const std::uint64_t> coming, std::size_t entries);
  bool split(std::uint64_t suffix, std::span<const std::uint64_t> coming = {});
  bool resize(std::uint64_t suffix, std::uint32_t count);
  void merge();
  void swap(RowIndex& other) noexcept;
  [[nodiscard]] Segment make_segment(std::uint32_t count);
  void free_segment(Segment segment);

  template <class Visit>
  static void visit_entries(Segment segment, Visit&& visit) {
    for (std::uint32_t at = 0; at < segment.count(); ++at) {
      const Bucket& bucket = segment.buckets()[at];
      for (std::uint32_t entry = 0; entry < kEntries; ++entry) {
        if (bucket.rows[entry] != kNone) visit(bucket.suffixes[entry], bucket.rows[entry]);
      }
    }
  }
  static std::vector<Entry> entries_of(Segment segment);
  static void put_anew(Segment segment, std::uint64_t suffix, std::uint32_t row) noexcept;
  static void filled(Segment segment, std::uint32_t depth) noexcept;
  static void put(Segment segment, std::uint64_t suffix, std::uint32_t row) noexcept;
  static bool is_full(Segment segment) noexcept;
  static bool is_sparse(Segment segment) noexcept;
  static std::uint32_t largest_count(Segment segment, std::uint64_t suffix) noexcept;
  static std::uint32_t grown_count(Segment segment) noexcept;
  static std::uint32_t count_for(std::size_t entries) noexcept;

  void add_bytes(std::uint64_t bytes) noexcept {  // wraps where it shrinks
    segment_bytes_ += bytes;
    if (used_ != nullptr) used_->fetch_add(bytes, std::memory_order_relaxed);
  }

  ArenaPool* pool_;
  std::atomic<std::uint64_t>* used_;
  const IndexProbeTable* probes_;
  std::uint32_t slot_bits_;
  IndexTop top_;
  IndexDirectory only_;                     // while there is no more than one
  std::unique_ptr<IndexDirectory[]> many_;  // else top_.last + 1
  std::uint64_t entries_ = 0;
  std::uint32_t segments_ = 0;
  std::uint32_t absent_places_ = 0;  // of directories
  std::uint64_t segment_bytes_ = 0;
  std::uint64_t directory_bytes_ = 0;
};

}  // namespace sparserow
