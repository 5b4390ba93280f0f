// What a sweep takes and what it reports (Store::sweep).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "store/table/lock_timer.h"

namespace sparserow {

// Why a sweep removes a row; of several rules that hold, the first counts.
enum class SweepRule : std::uint8_t { kSteps = 0, kSeconds = 1, kNorm = 2, kBound = 3 };
inline constexpr std::size_t kSweepRules = 4;

struct SweepOptions {
  bool dry_run = false;    // counts, and removes nothing
  bool by_seconds = true;  // false: no row goes by its age in seconds, because the clock may be wrong
  double share = 1.0;      // of the table's slots that this store has: its part of max_rows and max_bytes
  double pause_ratio = 0;  // how long it sleeps between slices, as a multiple of the CPU time that they took
};

// Rows by their age: entry i has the ages of i bits, so those from 2^(i-1) to 2^i - 1, and entry 0 the age 0.
using AgeCounts = std::array<std::uint64_t, 33>;

// Ages of rows since their last push; all counts are 0 of what the table's policy does not stamp.
struct RowAges {
  AgeCounts steps{};
  AgeCounts seconds{};
};

struct SweepReport {
  struct Freed {
    std::uint64_t rows = 0;
    std::uint64_t bytes = 0;  // of weights and state
  };
  std::uint64_t rows_seen = 0;
  std::array<Freed, kSweepRules> freed{};  // by rule; in a dry run: what would be
  std::uint64_t slices = 0;                // how often a stripe was held
  LockTimes longest_lock;                  // of them
  RowAges ages;  // of rows that it looked at and no rule but the bound removes; the SSD's that are surely too new are
                 // not looked at
  bool is_complete = true;  // false: it was stopped
};

}  // namespace sparserow
