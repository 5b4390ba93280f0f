// Looks up many suffixes in an index (row_index.h), compiled once per instruction set and chosen at run time.
//
// locate() fetches the home buckets. compare() compares all suffixes of each at once, and fetches the next buckets for
// the few entries that had no room at home; no branch depends on where an entry is. finish() goes on with those.
#pragma once

#include <cstddef>
#include <cstdint>

#include "store/table/index_bucket.h"
#include "util/cpu.h"

namespace sparserow {

inline constexpr std::size_t kMostProbed = 192;

// A search of at most kMostProbed suffixes.
struct IndexProbe {
  const IndexBucket* buckets[kMostProbed];
  std::uint16_t left[kMostProbed];  // positions of the suffixes that compare() left to finish()
  std::size_t left_count;
};

// `buckets` and `left` have room for `count`.
struct IndexProbeTable {
  void (*locate)(const IndexTop& top, const std::uint64_t* suffixes, std::size_t count,
                 const IndexBucket** buckets) noexcept;
  // rows[i] is the row of suffixes[i], or IndexBucket::kNoRow, but where finish() is to say it. Returns how many of
  // those there are.
  std::size_t (*compare)(const IndexTop& top, const std::uint64_t* suffixes, std::size_t count, std::uint32_t* rows,
                         const IndexBucket** buckets, std::uint16_t* left) noexcept;
  void (*finish)(const IndexTop& top, const std::uint64_t* suffixes, std::uint32_t* rows, const IndexBucket** buckets,
                 const std::uint16_t* left, std::size_t left_count) noexcept;
};

// Falls back to the baseline for a set that this build does not have. Use best_isa() for a set that runs here.
[[nodiscard]] const IndexProbeTable& index_probes_of(Isa isa) noexcept;

}  // namespace sparserow
