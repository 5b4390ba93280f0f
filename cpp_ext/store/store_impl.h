// The private part of Store: stripes, and what they share. See store.h for the contract.
#pragma once

#include <array>
#include <atomic>
#include <ctime>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <vector>

#include "store/slot_versions.h"
#include "store/store.h"
#include "store/table/arena_reserve.h"
#include "store/table/job_steps.h"
#include "store/table/memory_budget.h"
#include "store/table/table.h"
#include "store/table/table_map.h"
#include "util/fair_mutex.h"
#include "util/mutex.h"

namespace sparserow {

struct VersionFilter;

class Store::Impl {
 public:
  explicit Impl(const StoreOptions& store_options);
  ~Impl();

  // A group of slots, and the lock of all rows in them, whatever their table.
  struct alignas(64) Stripe : StripeSequences {
    mutable FairMutex mutex;
    Snapshot* snapshot = nullptr;  // that saves a row before it changes (snapshot.h)
  };

  // Shared locks of the stripes [first, last) that have keys of a batch: at most kMostStripes (BatchOrder::run_from),
  // since a thread that is displaced holds them meanwhile. Whoever locks several stripes does so in rising order and to
  // read; a thread that writes holds one.
  class ReadLocks {
   public:
    ReadLocks(const Impl& store, const BatchOrder& order, std::uint32_t first, std::uint32_t last)
        : store_(store), order_(order), first_(first), last_(last) {
      each([](FairMutex& mutex) { __builtin_prefetch(&mutex); });
      each([](FairMutex& mutex) { std::invoke(&FairMutex::lock_shared, mutex); });  // clang cannot follow an array
    }
    ReadLocks(const ReadLocks&) = delete;
    ReadLocks& operator=(const ReadLocks&) = delete;
    ~ReadLocks() {
      each([](FairMutex& mutex) { std::invoke(&FairMutex::unlock_shared, mutex); });
    }

   private:
    template <class Act>
    void each(Act act) const {
      order_.for_occupied(first_, last_, [&](std::uint32_t stripe, std::size_t) { act(store_.stripes[stripe].mutex); });
    }

    const Impl& store_;
    const BatchOrder& order_;
    const std::uint32_t first_;
    const std::uint32_t last_;
  };

  // The next version of the slot of `suffix`, for a row that is written; `before` is its version until now. The caller
  // has the stripe's lock exclusively.
  [[nodiscard]] std::uint64_t written(Stripe& stripe, std::uint64_t suffix, const Table& table, std::uint64_t key,
                                      std::uint64_t before) noexcept {
    return versions.written(stripe, slots.slot_in_stripe(suffix), table, key, before);
  }
  void erased(Stripe& stripe, std::uint64_t suffix, std::uint32_t table_id, std::uint64_t key) noexcept {
    versions.erased(stripe, slots.slot_in_stripe(suffix), table_id, key);
  }
  // A table went with all its rows, or came back: its followers begin anew, and those of other tables go on.
  void reset_table(std::uint32_t table_id) noexcept;
  // The version of a slot now. The caller has the stripe's lock.
  [[nodiscard]] std::uint64_t version_of(std::uint32_t slot) const noexcept {
    return versions.of_sequence(stripes[slot % slots.stripe_count()].sequences[slot / slots.stripe_count()]);
  }

  // Calls write(stripe), which gives a Status, once for each of the stripes, under its lock. A stripe that another
  // thread has now is left for later: else writers of many rows follow each other from stripe to stripe, each waiting
  // for the one before it.
  template <class Write>
  Status write_each(std::vector<std::uint32_t> left, Write&& write) const {
    while (!left.empty()) {
      std::size_t kept = 0;
      for (std::size_t i = 0; i < left.size(); ++i) {
        const std::uint32_t stripe = left[i];
        std::unique_lock lock(stripes[stripe].mutex, std::try_to_lock);
        const bool none_was_free = kept == i && i + 1 == left.size();
        if (!lock.owns_lock() && none_was_free) lock.lock();
        if (lock.owns_lock()) {
          SR_RETURN_IF_ERROR(write(stripe));
        } else {
          left[kept++] = stripe;
        }
      }
      left.resize(kept);
    }
    return Status::ok();
  }

  // Whether a table may have rows in a stripe.
  [[nodiscard]] bool has_rows(const Table& table, std::uint32_t stripe) const {
    const std::shared_lock lock(stripes[stripe].mutex);
    return table.stripes[stripe] != nullptr || table.ssd_rows[stripe].load(std::memory_order_relaxed) > 0;
  }

  using StripeCounts = std::array<std::uint64_t, kStripes>;
  [[nodiscard]] StripeCounts count_absent(const Table& table, std::span<const std::uint64_t> keys) const;
  void fetch_rows(const Table& table, const BatchOrder& order) const;
  // Upper bound of the memory that so many more rows of each stripe take.
  [[nodiscard]] std::uint64_t bytes_for(const Table& table, const StripeCounts& rows) const;
  [[nodiscard]] static std::uint64_t bytes_if_absent(const Table& table, std::uint64_t rows);

  const StoreOptions options;
  const SlotOrder slots;
  StorePools pools;  // outlive the tables
  mutable std::array<Stripe, kStripes> stripes;
  SlotVersions versions;
  MemoryBudget budget;
  ArenaReserve reserve;
  TableMap tables;

  // Promises memory; the reserve makes room for it (memory_budget.h). With an SSD no namespace is refused for others:
  // eviction makes room (eviction_policy.cc).
  Status promise(const Table& table, std::uint64_t bytes) {
    SR_RETURN_IF_ERROR(budget.promise(table.schema.name, *table.memory, bytes, /*by_share=*/tiering == nullptr));
    reserve.shrink_to_budget();
    return Status::ok();
  }

  std::atomic<bool> has_snapshot{false};
  Mutex snapshot_mutex;  // leaf
  std::weak_ptr<Snapshot> snapshot SR_GUARDED_BY(snapshot_mutex);
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
  JobSteps job_steps;

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
// Appends a row to a page of a scan; `data` is laid out as a row of the table is.
void append_row(ScanPage& page, const Table& table, std::uint64_t key, std::uint64_t version,
                std::uint32_t update_count, const std::byte* data, bool with_state);

}  // namespace sparserow
