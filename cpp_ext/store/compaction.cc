// Rows that are left move together, so that memory goes back: within a stripe's slab (row_slab.h), and out of arenas
// that are mostly empty (arena_pool.h).
#include "store/tiering.h"

namespace sparserow {
namespace {

constexpr std::size_t kMovedAtOnce = std::size_t{256} << 10;  // bytes, under one lock of a stripe

}  // namespace

void Store::Tiering::compact(Table& table, std::uint32_t stripe, std::uint64_t spare_rows) {
  bool goes_on = false;
  {
    const std::unique_lock lock(store_.stripes[stripe].mutex);
    goes_on = table.begin_compaction(stripe, spare_rows);
  }
  for (std::uint64_t suffix = 0; goes_on; goes_on = suffix != 0) {
    const std::unique_lock lock(store_.stripes[stripe].mutex);
    const LockTimer clock;
    suffix = table.compact(stripe, suffix);
    longest_lock_.note(clock.elapsed());
  }
  store_.pools.collapse_huge_pages();
}

// move(stripe, arenas, where to go on) returns where to go on, 0 at the end.
template <class Move>
void Store::Tiering::empty_arenas(ArenaPool& pool, const Move& move) {
  while (pool.has_holes()) {
    const std::uint64_t before = pool.opened_arenas();
    {
      const ArenaPool::Emptying from(pool);
      if (from.is_empty()) return;
      for (const std::shared_ptr<Table>& table : store_.tables.all()) {
        for (std::uint32_t stripe = 0; stripe < kStripes; ++stripe) {
          std::uint64_t at = 0;
          do {
            const std::unique_lock lock(store_.stripes[stripe].mutex);
            const LockTimer clock;
            TableStripe* const rows = table->stripes[stripe].get();
            at = rows == nullptr ? 0 : move(*rows, from, at);
            longest_lock_.note(clock.elapsed());
          } while (at != 0);
        }
      }
    }
    if (pool.opened_arenas() >= before) return;  // others took what was given back
  }
}

// As the index of the SSD grows, rows leave for good, and those that stay are spread over all arenas: what is used
// would be within the budget, and the process would not be.
void Store::Tiering::close_holes() {
  empty_arenas(store_.pools.rows, [](TableStripe& rows, const ArenaPool::Emptying& from, std::uint64_t chunk) {
    return rows.slab.move_chunks(from, static_cast<std::uint32_t>(chunk), kMovedAtOnce);
  });
  empty_arenas(store_.pools.indexes, [](TableStripe& rows, const ArenaPool::Emptying& from, std::uint64_t suffix) {
    return rows.index.move_segments(from, suffix, kMovedAtOnce);
  });
}

}  // namespace sparserow
