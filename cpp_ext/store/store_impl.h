// The private part of Store: tables, stripes and the memory budget. See store.h for the contract.
#pragma once

#include <array>
#include <atomic>
#include <ctime>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <vector>

#include "store/changes/change_log.h"
#include "store/store.h"
#include "store/stripe_log.h"
#include "store/table/table.h"

namespace sparserow {

// The low half of the system's clock in milliseconds.
[[nodiscard]] std::uint32_t wall_ms() noexcept;

struct VersionFilter;

// How many cursors want each table, also one that is not there yet.
struct FollowedTables {
  [[nodiscard]] bool contains(std::uint32_t table_id) const { return all > 0 || by_id.contains(table_id); }

  std::uint32_t all = 0;                         // cursors that want every table
  std::map<std::uint32_t, std::uint32_t> by_id;  // cursors that name it
};

class Store::Impl {
 public:
  explicit Impl(const StoreOptions& store_options);
  ~Impl();

  // A group of slots, and the lock of all rows in them, whatever their table.
  struct alignas(64) Stripe {
    mutable std::shared_mutex mutex;
    std::vector<std::uint64_t> sequences;  // by SlotOrder::slot_in_stripe
    std::vector<std::uint64_t> erasures;   // likewise; the sequence of the last one: rows, or a table with all of its
    Snapshot* snapshot = nullptr;          // that is told before a row changes (snapshot.h)
    StripeLog log;                         // closed while nobody follows changes (change_log.h)
  };

  [[nodiscard]] std::shared_ptr<Table> table(std::uint32_t table_id) const;
  // The next version of the slot of `suffix`, for a row that is written, which followers of its table are told;
  // `before` is the row's version until now. The stripe's lock is held exclusively.
  [[nodiscard]] std::uint64_t written(Stripe& stripe, std::uint64_t suffix, const Table& table, std::uint64_t key,
                                      std::uint64_t before) noexcept {
    const std::uint32_t slot = slots.slot_in_stripe(suffix);
    const std::uint64_t sequence = ++stripe.sequences[slot];
    const std::uint64_t version = version_of_sequence(sequence);
    if (stripe.log.is_open() && table.is_followed.load(std::memory_order_relaxed)) {
      stripe.log.touch(slot, sequence);
      const bool is_comparable = (before ^ version) >> 48 == 0 && !counts_writes.load(std::memory_order_relaxed);
      if (stripe.log.wants(slot, is_comparable ? before & (~std::uint64_t{0} >> 16) : 0)) {
        stripe.log.written(slot, {sequence, key, table.schema.id, wall_ms()}, change_budget);
      }
    }
    return version;
  }
  void erased(Stripe& stripe, std::uint64_t suffix, std::uint32_t table_id, std::uint64_t key) noexcept {
    const std::uint32_t slot = slots.slot_in_stripe(suffix);
    const std::uint64_t sequence = ++stripe.sequences[slot];
    stripe.erasures[slot] = sequence;
    if (stripe.log.is_open()) stripe.log.erased(slot, {sequence, key, table_id, wall_ms()}, change_budget);
  }
  // A table went with all its rows: followers begin anew.
  void dropped_table() noexcept;
  [[nodiscard]] std::uint64_t version_of_sequence(std::uint64_t sequence) const noexcept {
    return static_cast<std::uint64_t>(lineage.load(std::memory_order_relaxed)) << 48 | sequence;
  }
  // Of a slot now. The stripe's lock is held.
  [[nodiscard]] std::uint64_t version_of(std::uint32_t slot) const noexcept {
    return version_of_sequence(stripes[slot % slots.stripe_count()].sequences[slot / slots.stripe_count()]);
  }

  using StripeCounts = std::array<std::uint64_t, kStripes>;
  [[nodiscard]] StripeCounts count_absent(const Table& table, std::span<const std::uint64_t> keys) const;
  // Upper bound of the memory that so many more rows of each stripe take.
  [[nodiscard]] std::uint64_t bytes_for(const Table& table, const StripeCounts& rows) const;
  Status promise(const Table& table, std::uint64_t bytes);
  Status check_share(const TableSchema& schema) const;
  void give_back(std::uint64_t bytes) noexcept { promised_bytes.fetch_sub(bytes, std::memory_order_relaxed); }

  const StoreOptions options;
  const SlotOrder slots;
  StorePools pools;  // outlive the tables
  mutable std::array<Stripe, kStripes> stripes;
  ChangeBudget change_budget;
  std::atomic<bool> counts_writes{false};  // a follower wants to know how often each row was written
  std::atomic<std::uint64_t> promised_bytes{0};
  std::mutex promise_mutex;  // leaf; makes check and promise one step

  mutable std::shared_mutex tables_mutex;
  std::map<std::uint32_t, std::shared_ptr<Table>> tables;  // guarded by tables_mutex
  FollowedTables followed;                                 // guarded by tables_mutex
  // Counts a cursor that wants these tables (ids; empty: all), or one less. True when one of them was not followed.
  bool follow(const std::vector<std::uint32_t>& wanted);
  void unfollow(const std::vector<std::uint32_t>& wanted);

  std::atomic<std::uint16_t> lineage;  // of the versions that are given now
  std::atomic<bool> has_snapshot{false};
  std::mutex snapshot_mutex;         // leaf
  std::weak_ptr<Snapshot> snapshot;  // guarded by snapshot_mutex
  // Before a batch of writes, with no lock held: while a save has no room for images of rows that change.
  void wait_for_snapshot();
  // Rows of `store`, which this is the private part of, whose weights and more are set by fill(row, index).
  using FillRow = std::function<void(RowRef, std::size_t)>;
  Status put_rows(Store& store, Table& table, std::span<const std::uint64_t> keys, std::size_t first,
                  const FillRow& fill, VersionFilter* filter = nullptr);
  // A row in memory, under its stripe's exclusive lock.
  void save_before_erasure(const Table& table, std::uint32_t stripe, std::uint64_t suffix);

  [[nodiscard]] std::uint64_t unix_seconds() const {
    return options.unix_seconds ? options.unix_seconds() : static_cast<std::uint64_t>(std::time(nullptr));
  }
  std::atomic<bool> sweeps_stopped{false};
  std::mutex steps_mutex;                           // a leaf
  std::map<std::uint64_t, std::int64_t> job_steps;  // the last of each job; guarded by steps_mutex

  std::unique_ptr<Tiering> tiering;           // null without an SSD
  std::atomic<std::uint64_t> tier_keys{0};    // of pulls and commits
  std::atomic<std::uint64_t> tier_misses{0};  // of them, looked for on the SSD
  std::atomic<std::uint64_t> tier_ahead{0};   // looked for there before anybody pulled them
  void count(std::uint64_t keys, std::uint64_t misses) noexcept {
    tier_keys.fetch_add(keys, std::memory_order_relaxed);
    tier_misses.fetch_add(misses, std::memory_order_relaxed);
  }
};

[[nodiscard]] Status unknown_table(std::uint32_t table_id);
[[nodiscard]] Status over_budget(const std::string& table, std::uint64_t budget, std::uint64_t used,
                                 std::uint64_t needed);

}  // namespace sparserow
