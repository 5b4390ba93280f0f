// The answers of workers whose epoch is over, kept for a while after the job has forgotten the worker.
//
// A COMMIT that was applied may be repeated after its worker was fenced, or after its job ended: its reply was lost.
// The repeat gets the answer of the first, so that a refusal means that nothing was applied. A commit that is being
// applied when its worker is fenced gets its answer here, and its repeats wait for it. A window is kept for kKept; of
// more than kMost windows the oldest go first.
//
// Not thread-safe: the commit log's mutex guards it.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include "commit/job_clock.h"

namespace sparserow {

class RetiredWindows {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::minutes kKept{10};
  static constexpr std::size_t kMost = 1024;  // of at most JobWindow::kSequences answers, 24 bytes each

  void add(std::uint32_t job_id, const WorkerKey& worker, const JobWindow& window, Clock::time_point now);
  // The rows of a commit that was applied; nullopt when none of this sequence is known.
  [[nodiscard]] std::optional<std::uint64_t> rows_of(std::uint32_t job_id, const WorkerKey& worker,
                                                     std::uint64_t sequence, Clock::time_point now);
  [[nodiscard]] bool is_applying(std::uint32_t job_id, const WorkerKey& worker, std::uint64_t sequence) const;
  // How a write ended that was being applied when its worker's window was added; nullopt: it was taken back.
  void end(std::uint32_t job_id, const WorkerKey& worker, std::uint64_t sequence, std::optional<std::uint64_t> rows);
  // The worker is a member again: its answers go with it.
  JobWindow::Answers take(std::uint32_t job_id, const WorkerKey& worker);
  // The worker is a member of a new clock, to which no answer belongs.
  void forget(std::uint32_t job_id, const WorkerKey& worker);
  void clear();
  [[nodiscard]] std::size_t size() const noexcept { return windows_.size(); }

 private:
  using Key = std::pair<std::uint32_t, WorkerKey>;  // (job id, worker)
  struct Window {
    Clock::time_point until;
    JobWindow::Answers answers;
  };
  void drop_old(Clock::time_point now);
  static const JobWindow::Answer* find(const Window& window, std::uint64_t sequence);

  std::map<Key, Window> windows_;
  std::deque<Key> order_;  // oldest first; may name windows that were forgotten
};

}  // namespace sparserow
