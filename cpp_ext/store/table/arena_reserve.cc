#include "store/table/arena_reserve.h"

#include <unistd.h>

#include <algorithm>

namespace sparserow {

ArenaReserve::ArenaReserve(StorePools& pools, MemoryBudget& budget, const ReserveOptions& options)
    : budget_(budget), options_(options), pools_{&pools.rows, &pools.indexes}, thread_([this] { run(); }) {
  for (ArenaPool* pool : pools_) pool->set_reserve(this);
}

ArenaReserve::~ArenaReserve() {
  if (::getpid() != process_) {  // a process that was forked has the store, and not its thread
    thread_.detach();
    static_cast<void>(woken_.release());  // its end would wait for the thread
    return;
  }
  for (ArenaPool* pool : pools_) pool->set_reserve(nullptr);
  {
    const MutexLock lock(wake_mutex_);
    is_ending_ = true;
  }
  woken_->notify_all();
  thread_.join();
}

void ArenaReserve::wake() noexcept {
  {
    const MutexLock lock(wake_mutex_);
    if (is_asked_) return;
    is_asked_ = true;
  }
  woken_->notify_one();
}

void ArenaReserve::run() {
  MutexLock lock(wake_mutex_);
  const auto is_woken = [this] { return is_asked_ || is_ending_; };
  for (;;) {
    if (!is_in_use()) {
      woken_->wait(wake_mutex_, is_woken);
    } else if (!woken_->wait_for(wake_mutex_, options_.linger, is_woken)) {
      lock.unlock();
      give_all_back();
      lock.lock();
      continue;
    }
    if (is_ending_) return;
    is_awake_ = true;
    is_asked_ = false;
    lock.unlock();
    trim();
    while (!is_ending_ && fill_one()) {
    }
    is_awake_ = false;
    lock.lock();
  }
}

bool ArenaReserve::is_in_use() const noexcept {
  return budget_.reserved() > 0 || pools_[0]->opened_lately() + pools_[1]->opened_lately() > 0;
}

std::uint64_t ArenaReserve::opened_arenas() const noexcept {
  return pools_[0]->opened_arenas() + pools_[1]->opened_arenas();
}

std::uint64_t ArenaReserve::most_bytes() const noexcept {
  return std::max(options_.most_bytes, opened_arenas() / kLimitShare * ArenaPool::kArenaBytes);
}

// A pool's part of the reserve is its part of all arenas, and one at least.
std::uint64_t ArenaReserve::wanted_arenas(const ArenaPool& pool) const noexcept {
  const std::uint64_t all = opened_arenas();
  const std::uint64_t opened = pool.opened_arenas();
  const std::uint64_t most = most_bytes() / ArenaPool::kArenaBytes;
  const std::uint64_t grown = std::min(opened / kShare, kDemand * pool.opened_lately());
  const std::uint64_t part = all == 0 ? most : most * opened / all + 1;
  return std::min(std::max(grown, pool.expected_arenas()), part);
}

bool ArenaReserve::fill_one() {
  const MutexLock lock(filling_);
  if (is_refused_) return false;
  for (ArenaPool* pool : pools_) {
    if (pool->warm_arenas() >= wanted_arenas(*pool)) continue;
    if (!budget_.try_reserve(ArenaPool::kArenaBytes, most_bytes())) return false;
    const ArenaPool::Warmed warmed = pool->warm_one();
    if (warmed == ArenaPool::Warmed::kYes) return true;
    uncharge();
    if (warmed == ArenaPool::Warmed::kRefused) is_refused_ = true;
    return false;
  }
  return false;
}

// The bound shrinks with the pools.
void ArenaReserve::trim() {
  const MutexLock lock(filling_);
  for (ArenaPool* pool : pools_) {
    while (budget_.reserved() > most_bytes() && pool->cool_one()) uncharge();
  }
}

void ArenaReserve::give_all_back() {
  const MutexLock lock(filling_);
  for (ArenaPool* pool : pools_) {
    pool->forget_opened();
    while (pool->cool_one()) uncharge();
  }
}

void ArenaReserve::shrink_to_budget() {
  if (budget_.excess_of_reserve() == 0) return;
  const MutexLock lock(filling_);
  for (ArenaPool* pool : pools_) {
    while (budget_.excess_of_reserve() > 0 && pool->cool_one()) uncharge();
  }
}

bool ArenaReserve::try_keep() noexcept {
  return !is_ending_ && budget_.try_reserve(ArenaPool::kArenaBytes, most_bytes());
}

ReserveStats ArenaReserve::stats() const noexcept {
  ReserveStats stats{.is_filling = is_asked_ || is_awake_};
  for (const ArenaPool* pool : pools_) {
    stats.bytes += pool->warm_arenas() * ArenaPool::kArenaBytes;
    stats.rest_bytes += pool->rest_bytes();
  }
  return stats;
}

}  // namespace sparserow
