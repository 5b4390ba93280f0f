// The private part of Store: tables, stripes and the memory budget. See store.h for the contract.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "store/store.h"
#include "store/table.h"

namespace sparserow {

class Store::Impl {
 public:
  explicit Impl(const StoreOptions& store_options);
  ~Impl();

  // A group of slots, and the lock of all rows in them, whatever their table.
  struct alignas(64) Stripe {
    mutable std::shared_mutex mutex;
    std::vector<std::uint64_t> sequences;  // by SlotOrder::slot_in_stripe
  };

  [[nodiscard]] std::shared_ptr<Table> table(std::uint32_t table_id) const;
  // The next version of the slot of `path`. The stripe's lock is held exclusively.
  [[nodiscard]] std::uint64_t next_version(Stripe& stripe, std::uint64_t path) const noexcept {
    return static_cast<std::uint64_t>(options.lineage) << 48 | ++stripe.sequences[slots.slot_in_stripe(path)];
  }

  using StripeCounts = std::array<std::uint64_t, kStripes>;
  [[nodiscard]] StripeCounts count_absent(const Table& held, std::span<const std::uint64_t> keys) const;
  // Upper bound of the memory that so many more rows of each stripe take.
  [[nodiscard]] std::uint64_t bytes_for(const Table& held, const StripeCounts& rows) const;
  Status promise(const Table& held, std::uint64_t bytes);
  void give_back(std::uint64_t bytes) noexcept { promised_bytes.fetch_sub(bytes, std::memory_order_relaxed); }

  const StoreOptions options;
  const SlotOrder slots;
  StorePools pools;  // outlive the tables
  mutable std::array<Stripe, kStripes> stripes;
  std::atomic<std::uint64_t> promised_bytes{0};
  std::mutex promise_mutex;  // leaf; makes check and promise one step

  mutable std::shared_mutex tables_mutex;
  std::map<std::uint32_t, std::shared_ptr<Table>> tables;  // guarded by tables_mutex

  std::unique_ptr<Tiering> tiering;  // null without an SSD
  std::atomic<std::uint64_t> tier_hits{0};
  std::atomic<std::uint64_t> tier_misses{0};
  void count(std::uint64_t keys, std::uint64_t misses) noexcept {
    tier_hits.fetch_add(keys - misses, std::memory_order_relaxed);
    tier_misses.fetch_add(misses, std::memory_order_relaxed);
  }
};

[[nodiscard]] Status unknown_table(std::uint32_t table_id);
[[nodiscard]] Status over_budget(const std::string& table, std::uint64_t budget, std::uint64_t used,
                                 std::uint64_t needed);

}  // namespace sparserow
