// The last step of each job that trains on a store's tables. Thread-safe; its mutex comes before a table's clock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>

#include "store/table/table.h"
#include "util/mutex.h"

namespace sparserow {

class JobSteps {
 public:
  // A step of a job ended.
  void note(std::uint64_t job, std::int64_t step) {
    const MutexLock lock(mutex_);
    const auto [at, is_new] = last_.try_emplace(job, step);
    if (is_new) forget_former(last_, job);
    at->second = std::max(at->second, step);
  }
  // Forgets a job that has ended, in all its generations; its last steps stay in the age of the tables.
  void forget(std::uint32_t job_id, std::span<const std::shared_ptr<Table>> tables) {
    const MutexLock lock(mutex_);
    for (const auto& table : tables) {
      table->catch_up(last_);
      table->forget_job(job_id);
    }
    std::erase_if(last_, [job_id](const auto& entry) { return job_of_clock(entry.first) == job_id; });
  }
  [[nodiscard]] std::size_t size() const {
    const MutexLock lock(mutex_);
    return last_.size();
  }
  // A table grows older by steps that brought it no push.
  void age(Table& table) {
    const MutexLock lock(mutex_);
    table.catch_up(last_);
  }

 private:
  mutable Mutex mutex_;
  ClockSteps last_ SR_GUARDED_BY(mutex_);
};

}  // namespace sparserow
