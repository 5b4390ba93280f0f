#include "commit/retired_windows.h"

#include <algorithm>

namespace sparserow {

void RetiredWindows::add(std::uint32_t job_id, const WorkerKey& worker, const JobWindow& window,
                         Clock::time_point now) {
  drop_old(now);
  auto answers = window.answers();
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
  const JobWindow::Answer* answer = find(found->second, sequence);
  if (answer == nullptr || answer->end != JobWindow::End::kCommitted) return std::nullopt;
  return answer->rows;
}

const JobWindow::Answer* RetiredWindows::find(const Window& window, std::uint64_t sequence) {
  const auto at = std::ranges::lower_bound(window.answers, sequence, {}, &JobWindow::Answers::value_type::first);
  return at == window.answers.end() || at->first != sequence ? nullptr : &at->second;
}

bool RetiredWindows::is_applying(std::uint32_t job_id, const WorkerKey& worker, std::uint64_t sequence) const {
  const auto found = windows_.find({job_id, worker});
  const JobWindow::Answer* answer = found == windows_.end() ? nullptr : find(found->second, sequence);
  return answer != nullptr && answer->end == JobWindow::End::kApplying;
}

void RetiredWindows::end(std::uint32_t job_id, const WorkerKey& worker, std::uint64_t sequence,
                         std::optional<std::uint64_t> rows) {
  const auto found = windows_.find({job_id, worker});
  if (found == windows_.end()) return;  // forgotten meanwhile, as of a restore, which brings other rows
  auto& answers = found->second.answers;
  const auto at = std::ranges::lower_bound(answers, sequence, {}, &JobWindow::Answers::value_type::first);
  if (at == answers.end() || at->first != sequence) return;
  if (rows) {
    at->second = {JobWindow::End::kCommitted, *rows};
  } else {
    answers.erase(at);
  }
}

JobWindow::Answers RetiredWindows::take(std::uint32_t job_id, const WorkerKey& worker) {
  const auto found = windows_.find({job_id, worker});
  if (found == windows_.end()) return {};
  JobWindow::Answers answers = std::move(found->second.answers);
  forget(job_id, worker);
  return answers;
}

void RetiredWindows::forget(std::uint32_t job_id, const WorkerKey& worker) {
  const Key key{job_id, worker};
  if (windows_.erase(key) > 0) std::erase(order_, key);
}

void RetiredWindows::clear() {
  windows_.clear();
  order_.clear();
}

}  // namespace sparserow
