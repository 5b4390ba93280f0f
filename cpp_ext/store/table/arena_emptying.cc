// Which arenas of a pool with holes are emptied.
#include <algorithm>

#include "store/table/arena_pool.h"

namespace sparserow {
namespace {

constexpr std::uint64_t kFewArenas = 2;  // beside these shares, in any pool
constexpr std::uint64_t kShareAtOnce = 32;
constexpr std::uint64_t kFewestAtOnce = 8;

// Arenas that so many bytes of runs may have: a seventh of them may be holes before some are emptied, and about a
// twelfth is left.
constexpr std::uint64_t most_arenas(std::uint64_t used) noexcept {
  return used / 6 * 7 / ArenaPool::kArenaBytes + kFewArenas + 1;
}
constexpr std::uint64_t wanted_arenas(std::uint64_t used) noexcept {
  return used / 12 * 13 / ArenaPool::kArenaBytes + kFewArenas;
}

}  // namespace

bool ArenaPool::has_holes() const noexcept { return opened_arenas() > most_arenas(used_bytes()); }

ArenaPool::Emptying::Emptying(ArenaPool& pool) : pool_(pool) {
  const MutexLock lock(pool.mutex_);
  std::vector<Arena*> emptiest;
  std::uint64_t free_granules = 0;
  for (const std::vector<Arena*>& bin : pool.bins_) {
    for (Arena* const arena : bin) {
      free_granules += kGranules - arena->taken_granules;
      if (!arena->is_tended) emptiest.push_back(arena);
    }
  }
  std::ranges::sort(emptiest, {}, [](const Arena* arena) { return arena->taken_granules; });
  const std::uint64_t opened = pool.opened_arenas();
  const std::uint64_t wanted = wanted_arenas(pool.used_bytes());
  const std::uint64_t most =
      std::min(opened - std::min(opened, wanted), std::max(opened / kShareAtOnce, kFewestAtOnce));
  std::uint64_t moving = 0;
  for (Arena* const arena : emptiest) {
    moving += arena->taken_granules;
    free_granules -= kGranules - arena->taken_granules;
    // What is moved has to find a place: runs do not fill the last quarter of the holes, which may be short.
    if (arenas_.size() == most || moving > free_granules / 4 * 3) break;
    arenas_.push_back(arena);
    bases_.push_back(arena->base);
  }
  std::ranges::sort(bases_);
  for (Arena* const arena : arenas_) {
    pool.take_from_bin(arena);
    arena->is_emptied = true;
  }
}

ArenaPool::Emptying::~Emptying() {
  const MutexLock lock(pool_.mutex_);
  for (Arena* const arena : arenas_) {
    if (!arena->is_emptied) continue;  // it was given back
    arena->is_emptied = false;
    pool_.put_in_bin(arena);
  }
}

bool ArenaPool::Emptying::contains(const std::byte* run) const noexcept {
  const auto after = std::ranges::upper_bound(bases_, run);
  return after != bases_.begin() && run < *(after - 1) + kArenaBytes;
}

}  // namespace sparserow
