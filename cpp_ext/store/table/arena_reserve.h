// Arenas whose pages are there before a row needs them. A virtual machine's host finds memory slowly when a page is
// first touched, so a thread touches the pages of the next arenas while a store grows, and rows come to warm memory.
//
// The reserve of all pools is at most 64 MiB, or a 64th of their arenas where that is more. It follows the demand: a
// pool has warm arenas for twice what it opened lately, and for a quarter of what it has. An arena that loses its last
// run stays in the reserve. All of it goes back when no arena was opened or kept for a while, and the thread sleeps.
//
// The reserve is charged to the budget and never takes the budget's last eighth, so that it does not come and go
// beside rows that do. A promise of memory (memory_budget.h) takes from it before any row leaves for the SSD.
//
// Thread-safe. Locks: filling_, then a pool's, then the budget's; wake_mutex_ is a leaf.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>

#include "store/table/arena_pool.h"
#include "store/table/memory_budget.h"
#include "store/table/table.h"
#include "util/mutex.h"

namespace sparserow {

struct ReserveOptions {
  std::uint64_t most_bytes = std::uint64_t{64} << 20;  // where a 64th of the arenas is less
  std::chrono::milliseconds linger{10'000};            // without use, after which all goes back
};

class ArenaReserve {
 public:
  // The pools and the budget outlive it.
  ArenaReserve(StorePools& pools, MemoryBudget& budget, const ReserveOptions& options = {});
  ArenaReserve(const ArenaReserve&) = delete;
  ArenaReserve& operator=(const ArenaReserve&) = delete;
  ~ArenaReserve();

  // Gives memory back until rows, promises and reserve fit into the budget. It waits for an arena that is being
  // touched, so that the budget holds when it returns.
  void shrink_to_budget();

  [[nodiscard]] ReserveStats stats() const noexcept;

  // For the pools. Under a pool's lock: charges an arena that lost its last run; false: it must go.
  [[nodiscard]] bool try_keep() noexcept;
  void uncharge() noexcept { budget_.unreserve(ArenaPool::kArenaBytes); }
  // Without a lock: an arena was opened or kept, or many are expected.
  void wake() noexcept;

 private:
  static constexpr std::uint64_t kShare = 4;        // of a pool's arenas
  static constexpr std::uint64_t kLimitShare = 64;  // of all arenas
  static constexpr std::uint64_t kDemand = 2;       // times what was opened lately

  void run();
  [[nodiscard]] bool is_in_use() const noexcept;
  [[nodiscard]] bool fill_one();
  void trim();
  void give_all_back();
  [[nodiscard]] std::uint64_t opened_arenas() const noexcept;
  [[nodiscard]] std::uint64_t most_bytes() const noexcept;
  [[nodiscard]] std::uint64_t wanted_arenas(const ArenaPool& pool) const noexcept;

  MemoryBudget& budget_;
  const ReserveOptions options_;
  const std::array<ArenaPool*, 2> pools_;
  Mutex filling_;  // an arena is being touched
  const pid_t process_ = ::getpid();
  std::atomic<bool> is_ending_{false};
  std::atomic<bool> is_refused_{false};  // the system does not touch pages ahead

  Mutex wake_mutex_;
  std::unique_ptr<CondVar> woken_ = std::make_unique<CondVar>();
  std::atomic<bool> is_asked_{false};  // written under wake_mutex_, as is_awake_ is set
  std::atomic<bool> is_awake_{false};
  std::thread thread_;  // the last: it uses all of the above
};

}  // namespace sparserow
