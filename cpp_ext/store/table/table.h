// One table's rows, by stripe. Everything below TableStripe is guarded by that stripe's lock (store.cc);
// the rest of a Table is immutable.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "optim/optimizer.h"
#include "schema/schema.h"
#include "store/table/admission.h"
#include "store/table/batch_order.h"
#include "store/table/extra_pins.h"
#include "store/table/initial_rows.h"
#include "store/table/lock_timer.h"
#include "store/table/memory_shares.h"
#include "store/table/row.h"
#include "store/table/row_codec.h"
#include "store/table/row_index.h"
#include "store/table/row_slab.h"
#include "store/table/sweep.h"
#include "util/fetch_lines.h"
#include "util/mutex.h"

namespace sparserow {

// Memory of all tables. Rows and indexes have arenas of their own: rows come to stay, while index segments come and
// go as they grow, and would leave holes among the rows that no chunk fits (measured: 15 bytes a row).
struct StorePools {
  [[nodiscard]] std::uint64_t used_bytes() const noexcept {
    return rows.used_bytes() + indexes.used_bytes() + filters.load(std::memory_order_relaxed) +
           ssd_index.load(std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t resident_bytes() const noexcept {
    return rows.resident_bytes() + indexes.resident_bytes();
  }
  // After rows have come, when no stripe is held (arena_pool.h).
  void collapse_huge_pages() {
    rows.collapse_huge_pages();
    indexes.collapse_huge_pages();
  }

  ArenaPool rows;
  ArenaPool indexes;
  std::atomic<std::uint64_t> filters{0};    // bytes of admission filters (admission.h)
  std::atomic<std::uint64_t> ssd_index{0};  // bytes of the index of rows on the SSD (ssd/ssd_tier.h)
};

// Whether pushes follow the pulls that bring rows of a stripe from the SSD, or pulls alone bring them, as those of an
// evaluation do. Guarded by the stripe's exclusive lock.
class BroughtRows {
 public:
  void add_brought() noexcept {
    if (++brought_ < kMany) return;
    brought_ /= 2;
    pushed_ /= 2;
  }
  void add_pushed() noexcept { pushed_ = std::min(pushed_ + 1, kMany); }
  // At least a third of those that came lately were pushed. A row that leaves before its push comes twice for it.
  [[nodiscard]] bool are_pushed() const noexcept { return 3 * pushed_ + kMany / 8 >= brought_; }

 private:
  static constexpr std::uint32_t kMany = 64;
  std::uint32_t brought_ = 0;
  std::uint32_t pushed_ = 0;
};

struct TableStripe {
  // used: as of RowSlab.
  TableStripe(StorePools& pools, std::size_t data_bytes, bool has_meta, std::uint32_t slot_bits,
              std::atomic<std::uint64_t>* used)
      : slab(pools.rows, data_bytes, has_meta, used), index(pools.indexes, best_isa(), used, slot_bits) {}
  [[nodiscard]] std::uint64_t bytes() const noexcept { return slab.bytes() + index.bytes(); }

  RowSlab slab;
  RowIndex index;
};

// What a row is stamped with when it changes, in the order of the row; the policy says which there are.
struct LastPush {
  std::array<std::uint32_t, 2> values{};
  std::uint32_t count = 0;
};

// What sweeps have removed since the start, by rule (store.h).
struct SweepTotals {
  std::array<std::atomic<std::uint64_t>, kSweepRules> rows{};
  std::atomic<std::uint64_t> sweeps{0};
  LongestLock longest_lock;
  mutable Mutex mutex;                // a leaf
  RowAges ages SR_GUARDED_BY(mutex);  // as the last whole sweep saw them
};

// The last step by clock. A clock is a job's in one generation: the id of the job in the low 32 bits, the generation
// above.
using ClockSteps = std::map<std::uint64_t, std::int64_t>;
[[nodiscard]] constexpr std::uint32_t job_of_clock(std::uint64_t clock) noexcept {
  return static_cast<std::uint32_t>(clock);
}
// A job has one generation at a time: the clocks of those before are forgotten.
inline void forget_former(ClockSteps& steps, std::uint64_t clock) {
  std::erase_if(steps, [clock](const auto& entry) {
    return job_of_clock(entry.first) == job_of_clock(clock) && entry.first < clock;
  });
}

class Table {
 public:
  // is_tiered: rows may leave for the SSD, and have meta (row_meta.h).
  Table(const TableSchema& table_schema, StorePools& pools, std::shared_ptr<NamespaceMemory> namespace_memory,
        bool is_tiered, std::uint32_t slot_count)
      : schema(table_schema),
        memory(std::move(namespace_memory)),
        optimizer(make_optimizer(schema)),
        initial_rows(schema),
        layout(schema.dim, schema.dtype, optimizer->state_floats(), schema.policy.stamps()),
        codec(schema.id, schema.dim, schema.dtype, optimizer->state_floats() + schema.policy.stamps()),
        is_tiered(is_tiered),
        admission(schema.policy.admits_all()
                      ? nullptr
                      : std::make_unique<TableAdmission>(schema, slot_count, pools.filters, memory->used)),
        pools_(&pools),
        slot_bits_in_suffix_(SlotOrder(slot_count).slot_bits_in_suffix()) {}

  // The id of the row whose hash has this suffix, or RowIndex::kNone.
  [[nodiscard]] std::uint32_t find(std::uint32_t stripe, std::uint64_t suffix) const noexcept {
    const TableStripe* stripe_rows = stripes[stripe].get();
    return stripe_rows == nullptr ? RowIndex::kNone : stripe_rows->index.find(suffix);
  }
  // The same for at most kMostProbed suffixes of a stripe; ids is as long. The buckets of the index are fetched at
  // once.
  void find_all(std::uint32_t stripe, std::span<const std::uint64_t> suffixes, std::uint32_t* ids) const noexcept {
    const TableStripe* stripe_rows = stripes[stripe].get();
    if (stripe_rows == nullptr) {
      std::fill_n(ids, suffixes.size(), RowIndex::kNone);
      return;
    }
    IndexProbe probe;
    stripe_rows->index.begin_find(suffixes, ids, probe);
    stripe_rows->index.finish_find(suffixes, ids, probe);
  }
  [[nodiscard]] RowRef row(std::uint32_t stripe, std::uint32_t id) const noexcept {
    return stripes[stripe]->slab.at(id);
  }

  // Before many absent rows are added (row_index.h).
  void make_room(std::uint32_t stripe, std::span<const std::uint64_t> suffixes);
  // Adds an absent row with its initial weights and state, update count 0 and version 0 (the caller sets it).
  // RowIndex::kNone when the system has no memory. scratch: (dim); null: they are zeros, and the caller sets
  // them.
  [[nodiscard]] std::uint32_t add(std::uint32_t stripe, std::uint64_t suffix, std::uint64_t key, float* scratch);
  // Adds an absent row as the SSD has it; is_back_soon is for its meta. RowIndex::kNone when the system has no memory.
  [[nodiscard]] std::uint32_t install(std::uint32_t stripe, std::uint64_t suffix, const RowImage& image,
                                      bool is_back_soon);
  // True when the row existed.
  bool remove(std::uint32_t stripe, std::uint64_t suffix);
  // Moves rows together, a part of the stripe's at a time, so that chunks beyond `spare_rows` free places give their
  // memory back: what begin_compaction() says has to go on with compact() from suffix 0 until that gives 0.
  [[nodiscard]] bool begin_compaction(std::uint32_t stripe, std::uint64_t spare_rows);
  [[nodiscard]] std::uint64_t compact(std::uint32_t stripe, std::uint64_t suffix);

  // The table's clock: steps of the jobs that push to it, each counted once. step < 0 names none.
  std::uint32_t tick(std::uint64_t job, std::int64_t step);
  // Goes on to the last step of the jobs that have ticked it.
  void catch_up(const ClockSteps& job_steps);
  // Forgets the clocks of a job. Should it push again, its first step counts as one, as that of any job.
  void forget_job(std::uint32_t job_id);
  [[nodiscard]] std::size_t job_clocks() const;
  [[nodiscard]] std::uint32_t steps() const noexcept { return steps_.load(std::memory_order_relaxed); }

  // Ok, or why the table is refused: the SSD lost rows of it.
  [[nodiscard]] Status failure() const;
  void fail(Status why);

  // Whether a cursor wants its rows (change_log.h): only then are their writes noted. Changed under the table map's
  // lock; a writer reads it under its stripe's.
  std::atomic<bool> is_followed{false};

  // The table is out of the map and its rows are off the SSD, where another table of its id may stand. Calls that
  // began before may use it still; nothing of it goes to the SSD any more. Used by tables with an SSD alone; guarded by
  // the eviction's lock (tiering.h).
  bool is_dropped = false;

  const TableSchema schema;
  const std::shared_ptr<NamespaceMemory> memory;  // before what it counts
  const std::unique_ptr<const Optimizer> optimizer;
  const InitialRows initial_rows;
  const RowLayout layout;
  const RowCodec codec;
  const bool is_tiered;
  const std::unique_ptr<TableAdmission> admission;  // null: every key gets its row at its first push
  SweepTotals swept;
  std::array<std::unique_ptr<TableStripe>, kStripes> stripes;  // made at a stripe's first row
  // Rows that are on the SSD alone; written under the stripe's exclusive lock.
  std::array<std::atomic<std::uint64_t>, kStripes> ssd_rows{};
  std::atomic<std::uint64_t> rows_evicted{0};  // that left memory for the SSD
  mutable ExtraPins extra_pins;
  std::array<BroughtRows, kStripes> brought{};
  // Rows that were not there, since the start; what comes back from the SSD is none. Guarded by the stripes' locks.
  std::array<std::uint64_t, kStripes> rows_added{};
  std::atomic<std::uint64_t> rows_since_wakeup{
      0};  // rows, since others were last asked to leave ahead of the next ones
  // Where eviction goes on in each stripe. Guarded by the eviction's lock (tiering.h).
  std::array<std::uint64_t, kStripes> clock_hands{};

 private:
  TableStripe& stripe_at(std::uint32_t stripe);
  [[nodiscard]] std::uint32_t add_place(std::uint32_t stripe, std::uint64_t suffix);

  StorePools* pools_;
  const std::uint32_t slot_bits_in_suffix_;
  std::atomic<std::uint32_t> steps_{0};
  mutable Mutex clock_mutex_;                         // a leaf
  ClockSteps job_steps_ SR_GUARDED_BY(clock_mutex_);  // of the jobs that push to it
  std::atomic<bool> has_failed_{false};
  mutable Mutex failure_mutex_;
  Status failure_ SR_GUARDED_BY(failure_mutex_);
};

// What a walk brings into cache for its visits. kRow: all of it, for a visit that adds absent rows.
// A tiered table's rows come with their meta but for kNothing; kMeta is that alone.
enum class Fetch : std::uint8_t { kWeights, kWeightsAndHead, kRow, kMeta, kNothing };

template <Fetch kFetch>
[[nodiscard]] std::size_t fetched_bytes(const Table& table) noexcept {
  return std::min(kFetch == Fetch::kRow ? table.layout.data_bytes : table.layout.state_offset, kMaxFetched);
}

// A walk has this whose visits write to no place of their own.
struct NothingAhead {
  [[gnu::always_inline]] void operator()(std::uint16_t /*position*/) const noexcept {}
};

// Walks one stripe's keys of a block, some at a time, in three passes: fetch the buckets of the index; look up
// and fetch the rows, and with ahead(position) what else the visit touches; then `visit(position, suffix, row id or
// RowIndex::kNone)` finds all in cache. Passes beat a pipeline of single keys: a visit's stores and the fetches of rows
// would compete for the same line buffers.
template <Fetch kFetch, class Visit, class Ahead = NothingAhead>
void walk_stripe(const Table& table, const BatchOrder& order, std::uint32_t stripe, Visit&& visit, Ahead ahead = {}) {
  constexpr std::size_t kGroup = kMostProbed;  // a stripe's keys of a block are 128, give or take 11: in one group
  const TableStripe* stripe_rows = table.stripes[stripe].get();
  const auto positions = order.positions(stripe);
  const auto suffixes = order.suffixes(stripe);
  const std::size_t fetched = fetched_bytes<kFetch>(table);
  const auto fetch = [&](std::uint32_t id) __attribute__((always_inline)) {
    if (kFetch == Fetch::kNothing || id == RowIndex::kNone) return;
    if (table.is_tiered) stripe_rows->slab.fetch_meta(id);
    if (kFetch == Fetch::kMeta) return;
    if (kFetch != Fetch::kWeights) __builtin_prefetch(stripe_rows->slab.head(id), kFetch == Fetch::kRow);
    fetch_lines(stripe_rows->slab.data(id), fetched);
  };
  IndexProbe probe;
  std::array<std::uint32_t, kGroup> ids;
  for (std::size_t begin = 0; begin < positions.size(); begin += kGroup) {
    const std::size_t count = std::min(kGroup, positions.size() - begin);
    if (stripe_rows == nullptr) {
      std::fill_n(ids.begin(), count, RowIndex::kNone);
    } else {
      const auto wanted = suffixes.subspan(begin, count);
      stripe_rows->index.begin_find(wanted, ids.data(), probe);
      for (std::size_t i = 0; i < count; ++i) {
        fetch(ids[i]);
        ahead(positions[begin + i]);
      }
      stripe_rows->index.finish_find(wanted, ids.data(), probe);
      for (std::size_t j = 0; j < probe.left_count; ++j) fetch(ids[probe.left[j]]);
      if (kFetch == Fetch::kRow) {
        for (std::size_t i = 0; i < count; ++i) {
          if (ids[i] == RowIndex::kNone) stripe_rows->index.fetch_for_insert(wanted[i]);
        }
      }
    }
    for (std::size_t i = 0; i < count; ++i) visit(positions[begin + i], suffixes[begin + i], ids[i]);
  }
}

// The same for a run of stripes (BatchOrder::run_from), with `visit(stripe, position, suffix, id)`. A batch of some
// hundred keys has a few in each stripe, whose fetches would hide nothing of each other.
template <Fetch kFetch, class Visit, class Ahead = NothingAhead>
void walk_stripes(const Table& table, const BatchOrder& order, std::uint32_t first, std::uint32_t last, Visit&& visit,
                  Ahead ahead = {}) {
  static_assert(kFetch != Fetch::kNothing && kFetch != Fetch::kMeta);
  if (last == first + 1) {
    return walk_stripe<kFetch>(
        table, order, first,
        [&](std::uint16_t position, std::uint64_t suffix, std::uint32_t id) { visit(first, position, suffix, id); },
        ahead);
  }
  const std::size_t fetched = fetched_bytes<kFetch>(table);
  IndexProbe probe;
  std::array<std::uint32_t, kMostProbed> ids;
  std::array<std::size_t, kStripes> left_counts;
  const auto each = [&](auto&& act) __attribute__((always_inline)) {
    order.for_occupied(first, last, [&](std::uint32_t stripe, std::size_t begin) {
      act(stripe, table.stripes[stripe].get(), order.suffixes(stripe), begin);
    });
  };
  const auto fetch = [&](const TableStripe& rows, std::uint32_t id) __attribute__((always_inline)) {
    if (id == RowIndex::kNone) return;
    if (table.is_tiered) rows.slab.fetch_meta(id);
    if (kFetch != Fetch::kWeights) __builtin_prefetch(rows.slab.head(id), kFetch == Fetch::kRow);
    fetch_lines(rows.slab.data(id), fetched);
  };
  each([&](std::uint32_t /*stripe*/, const TableStripe* rows, auto suffixes, std::size_t begin) {
    if (rows != nullptr) rows->index.locate(suffixes, probe.buckets + begin);
  });
  each([&](std::uint32_t stripe, const TableStripe* rows, auto suffixes, std::size_t begin) {
    left_counts[stripe] = 0;
    if (rows == nullptr) {
      std::fill_n(ids.begin() + static_cast<std::ptrdiff_t>(begin), suffixes.size(), RowIndex::kNone);
      return;
    }
    left_counts[stripe] = rows->index.compare(suffixes, ids.data() + begin, probe.buckets + begin, probe.left + begin);
    const auto positions = order.positions(stripe);
    for (std::size_t i = 0; i < suffixes.size(); ++i) {
      fetch(*rows, ids[begin + i]);
      ahead(positions[i]);
    }
  });
  each([&](std::uint32_t stripe, const TableStripe* rows, auto suffixes, std::size_t begin) {
    if (left_counts[stripe] == 0) return;
    const std::uint16_t* const left = probe.left + begin;
    rows->index.finish(suffixes, ids.data() + begin, probe.buckets + begin, left, left_counts[stripe]);
    for (std::size_t j = 0; j < left_counts[stripe]; ++j) fetch(*rows, ids[begin + left[j]]);
  });
  each([&](std::uint32_t stripe, const TableStripe* /*rows*/, auto suffixes, std::size_t begin) {
    const auto positions = order.positions(stripe);
    for (std::size_t i = 0; i < suffixes.size(); ++i) visit(stripe, positions[i], suffixes[i], ids[begin + i]);
  });
}

}  // namespace sparserow
