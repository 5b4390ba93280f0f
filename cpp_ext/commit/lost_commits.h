// The commits that this shard's worker had sent, that no checkpoint has and that were not sent again: each counted
// once.
//
// A commit of a step is named by its step, a write by key by its sequence. They are kept as ranges, so that the same
// loss found again (by every RESOLVE, or reported by a worker twice) counts once, and so that the coordinator can do
// the same over the processes of a shard that follow each other.
//
// Not thread-safe: the commit log's mutex guards it.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <vector>

#include "commit/job_clock.h"

namespace sparserow {

struct LostRange {
  std::uint32_t job_id = 0;
  std::uint32_t worker_id = 0;
  std::uint32_t epoch = 0;
  bool is_steps = false;  // else sequences
  std::uint64_t first = 0;
  std::uint64_t last = 0;  // inclusive
  auto operator<=>(const LostRange&) const = default;
};

class LostCommits {
 public:
  static constexpr std::size_t kMostRanges = std::size_t{1} << 16;

  // Returns how many of the range were not counted before. Beyond kMostRanges nothing is remembered, and all count.
  std::uint64_t add(const LostRange& range);
  [[nodiscard]] std::uint64_t count() const noexcept { return count_; }
  // In order; ranges of one worker do not touch each other.
  [[nodiscard]] std::vector<LostRange> ranges() const;

 private:
  struct Owner {
    std::uint32_t job_id;
    WorkerKey worker;
    bool is_steps;
    auto operator<=>(const Owner&) const = default;
  };
  std::map<Owner, std::map<std::uint64_t, std::uint64_t>> ranges_;  // first -> last
  std::size_t kept_ = 0;
  std::uint64_t count_ = 0;
};

}  // namespace sparserow
