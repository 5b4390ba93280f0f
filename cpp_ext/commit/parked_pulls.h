// The pulls of one job that wait for its clock, in the order of their steps and of their deadlines.
//
// Taking those that may go on, or whose deadline passed, costs as much as there are of them, however many wait.
// Not thread-safe: the commit log's mutex guards it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "util/status.h"

namespace sparserow {

struct ParkedPull {
  std::uint32_t worker_id = 0;
  std::uint32_t epoch = 0;
  std::int64_t step = 0;
  std::chrono::steady_clock::time_point since;
  std::chrono::steady_clock::time_point deadline;
  std::function<void(Status)> ready;
  const void* owner = nullptr;
};

class ParkedPulls {
 public:
  void add(ParkedPull pull);
  [[nodiscard]] std::size_t size() const noexcept { return pulls_.size(); }
  // Those of the lowest steps, up to the first step for which `is_readable` is false.
  std::vector<ParkedPull> take_readable(const std::function<bool(std::int64_t)>& is_readable);
  std::vector<ParkedPull> take_expired(std::chrono::steady_clock::time_point now);
  // Those for which `leaves` is true, in the order of arrival; looks at all.
  std::vector<ParkedPull> take_if(const std::function<bool(const ParkedPull&)>& leaves);

 private:
  ParkedPull take(std::uint64_t number);

  std::uint64_t next_ = 0;
  std::map<std::uint64_t, ParkedPull> pulls_;  // by number, in the order of arrival
  std::set<std::pair<std::int64_t, std::uint64_t>> by_step_;
  std::set<std::pair<std::chrono::steady_clock::time_point, std::uint64_t>> by_deadline_;
};

}  // namespace sparserow
