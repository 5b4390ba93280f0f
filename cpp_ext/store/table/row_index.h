// The index of one (table, stripe): suffix of a hash (slot_order.h) -> row id, in small segments that grow and split
// one at a time.
//
// A directory, addressed by a suffix's high bits, points at segments; a segment is an array of 64-byte buckets of five
// suffixes and five row ids. A suffix's home bucket follows from its low bits; when it is full the entry goes to the
// next bucket with room, and every bucket passed over counts it, so that a search ends at the first bucket that no
// entry passed over, and an erased entry leaves nothing behind. A full segment is rebuilt a little larger; past its
// largest size (it differs between segments, so that they do not all grow at once) it is split in two.
//
// Invariants:
//  1. Load stays within about 0.84 and 0.92 once a segment is larger than the smallest.
//  2. No operation but the doubling of the directory (8 bytes per 300 rows or more) touches more than one segment.
//  3. A segment holds all suffixes of a range, and segments follow each other in the order of suffixes.
//
// A search touches no row. The lowest bit of a suffix is 0 (slot_order.h). Not thread-safe. Owns its segments.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "store/table/arena_pool.h"
#include "store/table/index_probe.h"

namespace sparserow {

class RowIndex {
 public:
  static constexpr std::uint32_t kNone = IndexBucket::kNoRow;
  static constexpr std::uint32_t kEntries = IndexBucket::kEntries;

  struct Entry {
    std::uint64_t suffix;
    std::uint32_t row;
  };
  // The entries of a range of suffixes, in unspecified order.
  struct Range {
    std::vector<Entry> entries;
    std::uint64_t next = 0;  // the first suffix after it; 0 = it is the last
  };

  // used: where the bytes of its segments are counted too, beside the pool; outlives this, or null.
  explicit RowIndex(ArenaPool& pool, Isa isa = best_isa(), std::atomic<std::uint64_t>* used = nullptr) noexcept
      : pool_(&pool), used_(used), probes_(&index_probes_of(isa)) {}
  RowIndex(const RowIndex&) = delete;
  RowIndex& operator=(const RowIndex&) = delete;
  ~RowIndex();

  // The row of `suffix`; kNone when there is none.
  [[nodiscard]] std::uint32_t find(std::uint64_t suffix) const noexcept {
    if (directory_.empty()) return kNone;
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
    if (!directory_.empty()) probes_->locate(directory_.data(), depth_, suffixes.data(), suffixes.size(), buckets);
  }
  [[nodiscard]] std::size_t compare(std::span<const std::uint64_t> suffixes, std::uint32_t* rows,
                                    const IndexBucket** buckets, std::uint16_t* left) const noexcept {
    if (directory_.empty()) {
      std::fill_n(rows, suffixes.size(), kNone);
      return 0;
    }
    return probes_->compare(directory_.data(), depth_, suffixes.data(), suffixes.size(), rows, buckets, left);
  }
  void finish(std::span<const std::uint64_t> suffixes, std::uint32_t* rows, const IndexBucket** buckets,
              const std::uint16_t* left, std::size_t left_count) const noexcept {
    if (left_count == 0) return;
    probes_->finish(directory_.data(), depth_, suffixes.data(), rows, buckets, left, left_count);
  }

  // Fetches what insert() of a suffix reads and find() does not.
  [[gnu::always_inline]] void fetch_for_insert(std::uint64_t suffix) const noexcept {
    if (!directory_.empty()) __builtin_prefetch(directory_[directory_at(suffix)].buckets());
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
  // rebuilt smaller.
  std::uint32_t erase(std::uint64_t suffix);

  // The segment that holds `suffix`, whole.
  [[nodiscard]] Range range_at(std::uint64_t suffix) const;
  // The same without a copy: visit(suffix, row) for each entry. Returns the first suffix after the segment; 0 = it is
  // the last.
  template <class Visit>
  std::uint64_t visit_range(std::uint64_t suffix, Visit&& visit) const {
    if (directory_.empty()) return 0;
    const Segment segment = directory_[directory_at(suffix)];
    visit_entries(segment, visit);
    return after(suffix, segment.depth());
  }

  [[nodiscard]] std::uint64_t bytes() const noexcept {
    return segment_bytes_ + directory_.capacity() * sizeof(Segment);
  }
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

  struct Found {
    Bucket* bucket = nullptr;
    std::uint32_t entry = 0;
    std::uint32_t distance = 0;  // buckets passed over
  };

  // The first suffix after those that have the first `depth` bits of `suffix`; 0 = there is none.
  static std::uint64_t after(std::uint64_t suffix, std::uint32_t depth) noexcept {
    return depth == 0 ? 0 : ((suffix >> (64 - depth)) + 1) << (64 - depth);
  }
  [[nodiscard]] std::size_t directory_at(std::uint64_t suffix) const noexcept {
    return index_directory_at(suffix, depth_);
  }

  [[nodiscard]] Found search(std::uint64_t suffix) const noexcept {
    const Segment segment = directory_[directory_at(suffix)];
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

  bool start();
  bool grow(std::uint64_t suffix);
  bool grow_for(std::uint64_t suffix, std::size_t entries);
  bool split(std::uint64_t suffix);
  bool resize(std::uint64_t suffix, std::uint32_t count);
  [[nodiscard]] Segment make_segment(std::uint32_t count);
  void free_segment(Segment segment);
  void point_at(Segment segment, std::uint64_t suffix, std::uint32_t depth);

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
  std::vector<Segment> directory_;  // 2^depth_ entries, or none
  std::uint32_t depth_ = 0;
  std::uint64_t segments_ = 0;
  std::uint64_t segment_bytes_ = 0;
};

}  // namespace sparserow
