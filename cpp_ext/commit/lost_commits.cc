#include "commit/lost_commits.h"

#include <algorithm>
#include <iterator>

namespace sparserow {

std::uint64_t LostCommits::add(const LostRange& range) {
  if (range.last < range.first) return 0;
  std::uint64_t added = range.last - range.first + 1;
  if (kept_ < kMostRanges) {
    auto& known = ranges_[{range.job_id, {range.worker_id, range.epoch}, range.is_steps}];
    std::uint64_t first = range.first;
    std::uint64_t last = range.last;
    auto at = known.upper_bound(first);
    if (at != known.begin() && std::prev(at)->second + 1 >= first) --at;
    while (at != known.end() && at->first <= last + 1) {  // it touches or overlaps: one range of both
      const std::uint64_t low = std::max(at->first, range.first);
      const std::uint64_t high = std::min(at->second, range.last);
      if (low <= high) added -= high - low + 1;
      first = std::min(first, at->first);
      last = std::max(last, at->second);
      at = known.erase(at);
      --kept_;
    }
    known.emplace(first, last);
    ++kept_;
  }
  count_ += added;
  return added;
}

std::vector<LostRange> LostCommits::ranges() const {
  std::vector<LostRange> all;
  all.reserve(kept_);
  for (const auto& [owner, ranges] : ranges_) {
    for (const auto& [first, last] : ranges) {
      all.push_back({owner.job_id, owner.worker.first, owner.worker.second, owner.is_steps, first, last});
    }
  }
  return all;
}

}  // namespace sparserow
