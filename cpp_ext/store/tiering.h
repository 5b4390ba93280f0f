// The two tiers of a store: rows that memory has no room for are on the SSD, and come back when they are used.
//
// Where a row is: in memory (with or without an image on the SSD, perhaps an older one: memory is right), on the SSD
// alone (Table::ssd_rows counts them), or nowhere (absent). Only eviction takes rows out of memory; only resolve()
// brings them back. Nobody reads or writes the SSD under a stripe's lock. Instead every eviction and deletion of a row
// raises one of its stripe's *tokens*: what was read from the SSD holds, under the stripe's lock, as long as the token
// has not moved since before the read; else it is read again.
//
// Rows leave by stripe: a clock hand goes round each stripe of each table. Of a segment it takes the rows that came
// last and were not used again, eldest first; where these are few, it cools the others (row_meta.h) and takes the
// coldest that have had fewest updates for their age (eviction_policy.cc). Where one table grows while another is
// colder, the colder one's rows go, and what is left is moved together, so that memory moves.
//
// Rows leave ahead of those that come: after some have come a thread of its own makes as much room again, so that a
// request finds room and only reads. Where it does not keep up (its priority is low), requests make what they need.
//
// Locks: evicting_ (one thread evicts, deletes or drops at a time), then the table map, then one stripe. claims_mutex_
// and background_mutex_ are leaves. Thread-safe.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <thread>
#include <unordered_set>
#include <vector>

#include "store/ssd/ssd_tier.h"
#include "store/store_impl.h"
#include "util/hash_set.h"
#include "util/mutex.h"

namespace sparserow {

// Fills `suffixes` from the first of the items, as far as these are of one stripe. Returns how many there are.
template <class Item>
std::size_t suffixes_of_stripe(std::span<const Item> items, std::span<std::uint64_t> suffixes) noexcept {
  std::size_t count = 0;
  for (; count < std::min(items.size(), suffixes.size()) && items[count].stripe == items[0].stripe; ++count) {
    suffixes[count] = items[count].suffix;
  }
  return count;
}

class Store::Tiering {
 public:
  // A key that is not in memory.
  struct Miss {
    std::uint64_t key = 0;
    std::uint64_t suffix = 0;
    std::uint32_t position = 0;  // the caller's
    std::uint32_t token = 0;
    std::uint16_t stripe = 0;
  };
  // Called once per miss under its stripe's exclusive lock: the row in memory (id), or its image on the SSD when there
  // is no room for it in memory, or neither: it is absent as long as the token does not move.
  using Visit = std::function<void(const Miss& miss, std::uint32_t id, const RowImage* image)>;
  using Counts = std::array<std::uint64_t, kStripes>;  // rows by stripe

  Tiering(Impl& store, std::unique_ptr<SsdTier> ssd);
  Tiering(const Tiering&) = delete;
  Tiering& operator=(const Tiering&) = delete;
  ~Tiering();

  [[nodiscard]] std::uint32_t token(std::uint32_t stripe, std::uint64_t suffix) const noexcept {
    return token_at(stripe, suffix).load(std::memory_order_acquire);
  }

  // Looks misses up on the SSD and brings what it has to memory. must_install: even over budget (it was promised).
  // Two callers that miss one key read it once. kDataLoss: the table is refused from now on.
  Status resolve(Table& table, std::vector<Miss> misses, bool must_install, const Visit& visit);

  // Evicts until `rows` more rows of the table by stripe fit into the budget, for rows that can be read where they are:
  // it does not queue behind one that waits for room on a full SSD. kResourceExhausted when they never do.
  Status make_room(Table& table, const Counts& rows);
  // The same, but it waits, and promises them the bytes that it returns, which the caller gives back to the budget.
  // kResourceExhausted also when the SSD is full.
  Result<std::uint64_t> promise_room(Table& table, const Counts& rows);
  // After so many rows came: that others leave ahead of the next ones. Returns at once.
  void request_background_evict(Table& table, std::uint64_t rows);

  // As Store::erase.
  Result<std::uint64_t> erase(Table& table, std::span<const std::uint64_t> keys,
                              std::span<const std::uint64_t> if_versions);
  // Removes the table from the map and from the SSD.
  Status drop(std::uint32_t table_id);
  // Every row that the SSD does not have is written to it. Rows stay in memory, but for those that the SSD's index
  // takes the room of.
  Status write_back();
  // Rows of one slot that are on the SSD from a suffix on, in the order of their suffixes, until visit() gives false.
  // Also older images of rows that are in memory.
  using VisitStored = std::function<bool(std::uint64_t suffix, const RowImage& image)>;
  Status visit_slot(Table& table, std::uint32_t slot, std::uint64_t from, const VisitStored& visit);

  // The stamps of a row's data.
  [[nodiscard]] static SsdStamps stamps_of(const Table& table, const std::byte* data) noexcept;

  // Rows of a table that are on the SSD, as SsdTier::visit_table says; visit() gives false to end. Also older images of
  // rows that are in memory.
  using VisitRow = std::function<Result<bool>(std::uint32_t stripe, std::uint64_t suffix, const RowImage& image)>;
  Status visit_table(Table& table, const SsdTier::WantsStamps& wants, const VisitRow& visit);

  // Calls visit(image) with what the SSD has of one row, if it has one; perhaps an older image of a row in memory.
  Status read_stored(Table& table, std::uint64_t key, const std::function<void(const RowImage& image)>& visit);

  [[nodiscard]] SsdStats ssd_stats() const { return ssd_->stats(); }
  [[nodiscard]] double waited_share() const noexcept { return ssd_->waited_share(); }
  [[nodiscard]] std::uint64_t rows_evicted() const noexcept { return rows_evicted_; }
  [[nodiscard]] std::uint64_t background_evicted() const noexcept { return background_evicted_; }
  [[nodiscard]] bool is_making_room() const;
  [[nodiscard]] LockTimes longest_lock() const noexcept { return longest_lock_.longest(); }

 private:
  static constexpr std::uint32_t kTokens = 8192;  // of each stripe
  // Rows that come or go under one lock of a stripe, so that a pull waits for few of them. A pull meets every stripe.
  static constexpr std::size_t kRowsAtOnce = 32;

  struct Victim {
    std::uint64_t key = 0;
    std::uint64_t suffix = 0;
    std::uint64_t version = 0;
    std::uint16_t stripe = 0;
    bool is_changed = false;
  };
  struct Cold {  // a row that may leave
    std::uint64_t suffix = 0;
    std::uint32_t row = 0;
    float worth = 0;
  };
  struct SegmentRows {            // of the index, that may leave
    std::vector<Cold> probation;  // the first to leave first
    std::vector<Cold> main;       // without heat or with
    std::vector<Cold> victims;    // of both
    std::uint64_t rows = 0;
  };
  struct Eviction {
    std::vector<Victim> victims;  // by stripe
    SsdBatch batch;               // images of those that changed
    std::vector<std::byte> image;
  };
  struct Place {
    std::shared_ptr<Table> table;
    std::uint32_t stripe = 0;
    double heat = 0;
  };

  [[nodiscard]] std::atomic<std::uint32_t>& token_at(std::uint32_t stripe, std::uint64_t suffix) const noexcept {
    return tokens_[stripe * kTokens + (suffix * 0x9e3779b97f4a7c15ull >> 51)];
  }
  [[nodiscard]] static SsdBatch::Before before_of(RowMeta meta) noexcept {
    return meta.is_stored() ? SsdBatch::Before::kImage : SsdBatch::Before::kNothing;
  }
  [[nodiscard]] SsdKey key_of(const Table& table, std::uint64_t key) const noexcept;
  [[nodiscard]] Status lost(Table& table, const Status& why) const;

  Status look_up(Table& table, std::vector<Miss>& misses, bool must_install, const Visit& visit,
                 std::vector<Miss>& again);
  void save_before_erasure(const Table& table, std::uint64_t key, const RowImage* image);
  void visit_resident(Table& table, std::vector<Miss>& misses, const Visit& visit);
  // The keys that one thread looks up, so that no other does; the others wait. `theirs` gets the misses that another
  // thread has, and has room for all.
  class Claims {
   public:
    Claims(Tiering& tiering, const Table& table, std::vector<Miss>& misses, std::vector<Miss>& theirs);
    Claims(const Claims&) = delete;
    Claims& operator=(const Claims&) = delete;
    ~Claims();

   private:
    Tiering& tiering_;
    std::vector<std::uint64_t> mine_;
  };
  Status wait_for(const Table& table, const std::vector<Miss>& misses);

  static bool is_spared(const Table& table, std::uint32_t stripe, std::uint32_t id, const std::uint64_t* version);
  void run_background_evict();
  Status background_evict(std::uint32_t table_id);
  Status make_room_and(Table& table, const Counts& rows, bool waits, const std::function<bool()>& take);
  Status evict_until(Table& table, const Counts& rows, const std::function<bool()>& take) SR_REQUIRES(evicting_);
  [[nodiscard]] std::uint64_t excess(const Table& table, const Counts& rows) const;
  [[nodiscard]] bool is_colder_elsewhere(const Table& table, const Counts& rows) SR_REQUIRES(evicting_);
  [[nodiscard]] Counts missing_places(const Table& table, const Counts& rows) const;
  Status evict_own(Table& table, const Counts& missing, std::uint64_t& progress) SR_REQUIRES(evicting_);
  void collect_more(Table& table, const Counts& collected, Eviction& out) SR_REQUIRES(evicting_);
  Status evict_for(Table& table, const Counts& rows, std::uint64_t& progress) SR_REQUIRES(evicting_);
  Status shrink(std::uint64_t bytes, const Table& table, const Counts& rows, std::uint64_t& progress)
      SR_REQUIRES(evicting_);
  [[nodiscard]] std::uint64_t excess_of_share(const Table& table, std::uint64_t more) const;
  [[nodiscard]] Place coldest_place(const Table& wanting, bool own_only = false) SR_REQUIRES(evicting_);
  [[nodiscard]] Place coldest_of(const std::vector<std::shared_ptr<Table>>& tables) SR_REQUIRES(evicting_);
  [[nodiscard]] double heat_of(const Table& table, std::uint32_t stripe) SR_REQUIRES(evicting_);
  [[nodiscard]] bool is_back_soon(const Table& table, const Miss& miss, const RowImage& image) const noexcept;
  [[nodiscard]] std::uint64_t updates_since(std::uint32_t stripe, std::uint64_t suffix,
                                            std::uint64_t version) const noexcept;
  [[nodiscard]] double soon(const Table& table) const noexcept;
  [[nodiscard]] std::uint64_t age_of(std::uint32_t stripe, std::uint64_t suffix, RowRef row) const noexcept;
  [[nodiscard]] std::uint64_t sort_out(const Table& table, std::uint32_t stripe, std::uint64_t suffix,
                                       const std::unordered_set<std::uint64_t>& taken, SegmentRows& out) const;
  static std::uint64_t end_probation(const Table& table, std::uint32_t stripe, SegmentRows& segment,
                                     std::uint64_t beyond, std::uint64_t most, std::uint64_t most_waiting);
  void end_stay(const Table& table, std::uint32_t stripe, SegmentRows& segment, std::uint64_t most) const;
  void add_victims(const Table& table, std::uint32_t stripe, const SegmentRows& segment, Eviction& out) const;
  void collect(Table& table, std::uint32_t stripe, std::uint64_t want, Eviction& out) SR_REQUIRES(evicting_);
  [[nodiscard]] float worth_of(std::uint32_t stripe, std::uint64_t suffix, RowRef row) const noexcept;
  Status write_to_ssd(SsdBatch& batch);
  Status carry_out(Table& table, Eviction& eviction, std::uint64_t& removed) SR_REQUIRES(evicting_);
  void compact(Table& table, std::uint32_t stripe, std::uint64_t spare_rows);
  template <class Move>
  void empty_arenas(ArenaPool& pool, const Move& move);
  void close_holes();
  [[nodiscard]] std::uint64_t next_random() noexcept SR_REQUIRES(evicting_);

  Impl& store_;
  const std::unique_ptr<SsdTier> ssd_;
  const std::unique_ptr<std::atomic<std::uint32_t>[]> tokens_;
  std::atomic<std::uint64_t> rows_evicted_{0};
  std::atomic<std::uint64_t> background_evicted_{0};
  LongestLock longest_lock_;

  Mutex evicting_;
  std::atomic<int> wanting_{0};  // requests that wait for evicting_, to make room
  std::uint64_t random_ SR_GUARDED_BY(evicting_) = 0x5eed;

  Mutex claims_mutex_;
  CondVar claims_changed_;
  HashSet claims_ SR_GUARDED_BY(claims_mutex_);  // row hashes that are being looked up

  mutable Mutex background_mutex_;
  CondVar ahead_asked_;
  std::set<std::uint32_t> background_tables_ SR_GUARDED_BY(background_mutex_);  // tables that rows came to
  bool is_leaving_ahead_ SR_GUARDED_BY(background_mutex_) = false;
  bool is_ending_ SR_GUARDED_BY(background_mutex_) = false;
  std::thread ahead_;  // the last: it uses all of the above
};

}  // namespace sparserow
