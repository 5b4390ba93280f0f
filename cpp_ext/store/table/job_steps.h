// The last step of each job that trains on a store's tables. Thread-safe; its mutex is a leaf.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>

#include "store/table/table.h"

namespace sparserow {

class JobSteps {
 public:
  // A step of a job ended.
  void note(std::uint64_t job, std::int64_t step) {
    const std::lock_guard lock(mutex_);
    const auto at = last_.try_emplace(job, step).first;
    at->second = std::max(at->second, step);
  }
  // A table grows older by steps that brought it no push.
  void age(Table& table) {
    const std::lock_guard lock(mutex_);
    table.catch_up(last_);
  }

 private:
  std::mutex mutex_;
  std::map<std::uint64_t, std::int64_t> last_;  // by job; guarded by mutex_
};

}  // namespace sparserow
