#include "commit/retired_windows.h"

#include <algorithm>

namespace sparserow::rpc {

void RetiredWindows::add(std::uint32_t job_id, const WorkerKey& worker, const JobWindow& window,
                         Clock::time_point now) {
  drop_old(now);
  auto answers = window.image().answers;
  if (answers.empty()) return;
  const Key key{job_id, worker};
  if (windows_.insert_or_assign(key, Window{now + kKept, std::move(answers)}).second) order_.push_back(key);
}

void RetiredWindows::drop_old(Clock::time_point now) {
  while (!order_.empty()) {
    const auto oldest = windows_.find(order_.front());
    if (oldest != windows_.end() && oldest->second.until > now && windows_.size() < kMost) return;
    if (oldest != windows_.end()) windows_.erase(oldest);
    order_.pop_front();
  }
}

std::optional<std::uint64_t> RetiredWindows::rows_of(std::uint32_t job_id, const WorkerKey& worker,
                                                     std::uint64_t sequence, Clock::time_point now) {
  const auto found = windows_.find({job_id, worker});
  if (found == windows_.end() || found->second.until <= now) return std::nullopt;
  const auto& answers = found->second.answers;
  const auto answer = std::lower_bound(answers.begin(), answers.end(), std::pair(sequence, std::uint64_t{0}));
  if (answer == answers.end() || answer->first != sequence) return std::nullopt;
  return answer->second;
}

void RetiredWindows::forget(std::uint32_t job_id, const WorkerKey& worker) {
  const Key key{job_id, worker};
  if (windows_.erase(key) > 0) std::erase(order_, key);
}

void RetiredWindows::clear() {
  windows_.clear();
  order_.clear();
}

}  // namespace sparserow::rpc
