#include "commit/worker_clocks.h"

#include <algorithm>

namespace sparserow {
namespace {

void count(std::map<std::int64_t, std::uint32_t>& steps, std::int64_t step) { ++steps[step]; }

void discount(std::map<std::int64_t, std::uint32_t>& steps, std::int64_t step) {
  const auto found = steps.find(step);
  if (--found->second == 0) steps.erase(found);
}

void insert(std::vector<std::int64_t>& sorted, std::int64_t step) {
  sorted.insert(std::upper_bound(sorted.begin(), sorted.end(), step), step);
}

void erase(std::vector<std::int64_t>& sorted, std::int64_t step) {
  sorted.erase(std::lower_bound(sorted.begin(), sorted.end(), step));
}

// The first step that counts and is not done.
std::int64_t awaited_of(const WorkerClock& clock) {
  return clock.done_step == kForever ? kForever : std::max(clock.first_step, clock.done_step + 1);
}

}  // namespace

void WorkerClocks::add(const WorkerClock& clock) {
  if (clock.first_step <= clock.until_step) {
    insert(first_steps_, clock.first_step);
    insert(until_steps_, clock.until_step);
  }
  if (clock.is_live()) {
    ++live_;
    count(done_, clock.done_step);
    count(awaited_, awaited_of(clock));
  } else if (awaited_of(clock) <= clock.until_step) {
    unfinished_.emplace(awaited_of(clock), clock.until_step);
  }
}

void WorkerClocks::remove(const WorkerClock& clock) {
  if (clock.first_step <= clock.until_step) {
    erase(first_steps_, clock.first_step);
    erase(until_steps_, clock.until_step);
  }
  if (clock.is_live()) {
    --live_;
    discount(done_, clock.done_step);
    discount(awaited_, awaited_of(clock));
  } else if (awaited_of(clock) <= clock.until_step) {
    auto at = unfinished_.lower_bound(awaited_of(clock));
    while (at->second != clock.until_step) ++at;
    unfinished_.erase(at);
  }
}

void WorkerClocks::replace(const WorkerClock& before, const WorkerClock& after) {
  if (before == after) return;
  // A commit changes done_step alone, so that the sorted steps of the members stay as they are.
  const bool is_commit = before.is_live() && after.is_live() && before.first_step == after.first_step;
  if (!is_commit) {
    remove(before);
    add(after);
    return;
  }
  discount(done_, before.done_step);
  count(done_, after.done_step);
  discount(awaited_, awaited_of(before));
  count(awaited_, awaited_of(after));
}

std::uint32_t WorkerClocks::counted(std::int64_t step) const {
  const auto begun = std::upper_bound(first_steps_.begin(), first_steps_.end(), step) - first_steps_.begin();
  const auto over = std::lower_bound(until_steps_.begin(), until_steps_.end(), step) - until_steps_.begin();
  return static_cast<std::uint32_t>(begun - over);
}

std::int64_t WorkerClocks::slowest() const noexcept { return done_.empty() ? kForever : done_.begin()->first; }

bool WorkerClocks::is_done(std::int64_t step) const {
  if (!awaited_.empty() && awaited_.begin()->first <= step) return false;
  return std::none_of(unfinished_.begin(), unfinished_.upper_bound(step),
                      [step](const auto& interval) { return step <= interval.second; });
}

}  // namespace sparserow
