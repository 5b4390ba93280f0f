// The index of one (table, stripe): key hash -> row id, in small segments that grow and split one at a time.
//
// A directory, addressed by the hash's low bits, points at segments; a segment is an array of 64-byte
// buckets of 12 one-byte tags and 12 row ids. A row's home bucket follows from further bits (never those
// that choose the slot); when it is full the row goes to the next bucket with room, and every bucket
// passed over counts it, so that a search ends at the first bucket that nobody passed over, and an erased
// entry leaves nothing behind. A full segment is rebuilt about an eighth larger; past its largest size (it
// differs between segments, so that they do not all grow at once) it is split in two.
//
// Invariants:
//  1. Load stays within about 0.75 and 0.90 once a segment is larger than the smallest.
//  2. No operation but the doubling of the directory (8 bytes per 800 rows or more) touches more than one
//     segment.
//
// The index stores no keys: callers compare them in the rows. Not thread-safe. Owns its segments.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "store/arena_pool.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace sparserow {

class RowIndex {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
  static constexpr std::uint32_t kSlots = 12;
  // Of rows that are inserted at a load of 0.75: upper bound of a row's part in its segment.
  static constexpr std::uint64_t kBytesPerRow = 8;

  explicit RowIndex(ArenaPool& pool) noexcept : pool_(&pool) {}
  RowIndex(const RowIndex&) = delete;
  RowIndex& operator=(const RowIndex&) = delete;
  ~RowIndex();

  // Always inlined: the compiler deems a function that only prefetches to be without effect, and drops its calls.
  [[gnu::always_inline]] void prefetch(std::uint64_t hash) const noexcept {
    if (!directory_.empty()) __builtin_prefetch(home_of(hash));
  }

  // The row for which `is_key(row)` holds among those whose tag matches; kNone when there is none.
  template <class IsKey>
  [[nodiscard]] std::uint32_t find(std::uint64_t hash, IsKey&& is_key) const {
    return directory_.empty() ? kNone : search(hash, is_key).row;
  }

  // Adds a row that is not there. `hash_of(row)` gives the hash of any row of this index; `prefetch(row)`
  // is called some rows ahead of it. False when the system has no memory; then nothing has changed.
  template <class Rows>
  [[nodiscard]] bool insert(std::uint64_t hash, std::uint32_t row, const Rows& rows) {
    if (directory_.empty() && !start()) return false;
    while (is_full(directory_[directory_at(hash)])) {
      if (!grow(hash, rows)) return false;
    }
    put(directory_[directory_at(hash)], hash, row);
    return true;
  }

  // Removes the entry of `row`, whose hash is given. A segment that is mostly empty is rebuilt smaller.
  template <class Rows>
  void erase(std::uint64_t hash, std::uint32_t row, const Rows& rows) {
    if (remove(hash, row) && is_sparse(directory_[directory_at(hash)])) shrink(hash, rows);
  }

  [[nodiscard]] std::uint64_t bytes() const noexcept {
    return segment_bytes_ + directory_.capacity() * sizeof(Segment);
  }
  // Upper bound of the memory that `rows` more rows take, transient memory of one growth included.
  [[nodiscard]] std::uint64_t bytes_for(std::uint64_t rows) const noexcept;

 private:
  struct alignas(64) Bucket {
    std::uint8_t tags[kSlots];  // 0 = empty
    std::uint16_t passed_over;  // entries that wanted this bucket or an earlier one and sit further on
    std::uint16_t note;         // bucket 0 and 1: rows of the segment; 2: depth
    std::uint32_t rows[kSlots];
  };
  static_assert(sizeof(Bucket) == 64);

  // A directory entry: address in the low 48 bits, bucket count in the high 16.
  class Segment {
   public:
    Segment(Bucket* buckets, std::uint32_t count) noexcept
        : packed_(reinterpret_cast<std::uintptr_t>(buckets) | static_cast<std::uint64_t>(count) << 48) {}
    [[nodiscard]] Bucket* buckets() const noexcept {
      return reinterpret_cast<Bucket*>(packed_ & ((std::uint64_t{1} << 48) - 1));
    }
    [[nodiscard]] std::uint32_t count() const noexcept { return static_cast<std::uint32_t>(packed_ >> 48); }
    [[nodiscard]] std::uint32_t rows() const noexcept {
      return buckets()[0].note | static_cast<std::uint32_t>(buckets()[1].note) << 16;
    }
    void set_rows(std::uint32_t rows) const noexcept {
      buckets()[0].note = static_cast<std::uint16_t>(rows);
      buckets()[1].note = static_cast<std::uint16_t>(rows >> 16);
    }
    [[nodiscard]] std::uint32_t depth() const noexcept { return buckets()[2].note; }
    void set_depth(std::uint32_t depth) const noexcept { buckets()[2].note = static_cast<std::uint16_t>(depth); }
    [[nodiscard]] std::uint32_t home(std::uint64_t hash) const noexcept {
      return static_cast<std::uint32_t>(
          (static_cast<std::uint64_t>(static_cast<std::uint32_t>(hash >> 16)) * count()) >> 32);
    }
    bool operator==(const Segment&) const = default;

   private:
    std::uint64_t packed_;
  };

  struct Found {
    std::uint32_t row = kNone;
    Bucket* bucket = nullptr;
    std::uint32_t slot = 0;
    std::uint32_t distance = 0;  // buckets passed over
  };

  static std::uint8_t tag_of(std::uint64_t hash) noexcept {
    const auto tag = static_cast<std::uint8_t>(hash >> 24);
    return tag == 0 ? 1 : tag;
  }

  // One bit per slot whose tag is `tag`.
  static std::uint32_t matches(const Bucket& bucket, std::uint8_t tag) noexcept {
#if defined(__SSE2__)
    const __m128i tags = _mm_load_si128(reinterpret_cast<const __m128i*>(&bucket));
    const __m128i equal = _mm_cmpeq_epi8(tags, _mm_set1_epi8(static_cast<char>(tag)));
    return static_cast<std::uint32_t>(_mm_movemask_epi8(equal)) & ((1u << kSlots) - 1);
#else
    std::uint32_t mask = 0;
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) mask |= (bucket.tags[slot] == tag ? 1u : 0u) << slot;
    return mask;
#endif
  }

  [[nodiscard]] std::size_t directory_at(std::uint64_t hash) const noexcept { return hash & (directory_.size() - 1); }
  [[nodiscard]] Bucket* home_of(std::uint64_t hash) const noexcept {
    const Segment segment = directory_[directory_at(hash)];
    return segment.buckets() + segment.home(hash);
  }

  template <class IsKey>
  [[nodiscard]] Found search(std::uint64_t hash, IsKey&& is_key) const {
    const Segment segment = directory_[directory_at(hash)];
    const std::uint8_t tag = tag_of(hash);
    std::uint32_t at = segment.home(hash);
    for (std::uint32_t distance = 0; distance < segment.count(); ++distance) {
      Bucket& bucket = segment.buckets()[at];
      for (std::uint32_t mask = matches(bucket, tag); mask != 0; mask &= mask - 1) {
        const auto slot = static_cast<std::uint32_t>(__builtin_ctz(mask));
        if (is_key(bucket.rows[slot])) return {bucket.rows[slot], &bucket, slot, distance};
      }
      if (bucket.passed_over == 0) break;
      if (++at == segment.count()) at = 0;
    }
    return {};
  }

  // Entries of a segment that is being rebuilt.
  struct Entry {
    std::uint64_t hash;
    std::uint32_t row;
  };

  template <class Rows>
  static std::vector<Entry> entries_of(Segment segment, const Rows& rows) {
    std::vector<Entry> entries;
    entries.reserve(segment.rows());
    for (std::uint32_t at = 0; at < segment.count(); ++at) {
      const Bucket& bucket = segment.buckets()[at];
      for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
        if (bucket.tags[slot] == 0) continue;
        rows.prefetch(bucket.rows[slot]);
        entries.push_back({0, bucket.rows[slot]});
      }
    }
    for (Entry& entry : entries) entry.hash = rows.hash_of(entry.row);
    return entries;
  }

  template <class Rows>
  bool grow(std::uint64_t hash, const Rows& rows) {
    const Segment segment = directory_[directory_at(hash)];
    const std::vector<Entry> entries = entries_of(segment, rows);
    return must_split(segment, hash) ? split(hash, entries) : resize(hash, entries, grown_count(segment));
  }

  template <class Rows>
  void shrink(std::uint64_t hash, const Rows& rows) {
    const Segment segment = directory_[directory_at(hash)];
    (void)resize(hash, entries_of(segment, rows), count_for(segment.rows()));  // without memory it stays as it is
  }

  bool start();
  [[nodiscard]] Segment make_segment(std::uint32_t count, std::uint32_t depth);
  void free_segment(Segment segment);
  bool split(std::uint64_t hash, const std::vector<Entry>& entries);
  bool resize(std::uint64_t hash, const std::vector<Entry>& entries, std::uint32_t count);
  bool remove(std::uint64_t hash, std::uint32_t row);
  void point_at(Segment segment, std::uint64_t hash, std::uint32_t depth);

  static void put(Segment segment, std::uint64_t hash, std::uint32_t row) noexcept;
  static bool is_full(Segment segment) noexcept;
  static bool is_sparse(Segment segment) noexcept;
  static bool must_split(Segment segment, std::uint64_t hash) noexcept;
  static std::uint32_t grown_count(Segment segment) noexcept;
  static std::uint32_t count_for(std::size_t rows) noexcept;

  ArenaPool* pool_;
  std::vector<Segment> directory_;  // 2^n entries, or none
  std::uint64_t segments_ = 0;
  std::uint64_t segment_bytes_ = 0;
};

}  // namespace sparserow
