// The rows of a store as they were at one instant, handed out while the store goes on.
//
// Copy-on-write is per row: one that is not yet handed out has its image saved in a side buffer before its first
// change (write_stripe, erase). That it is the first is known from its version: a row whose version lies beyond its
// slot's at the cut was changed, or created, since. The side buffer has a budget; the dump takes what it holds out of
// turn from a quarter of that on, and when it is full, writers wait, and that is counted. A dump that does not move is
// given up after `longest_stall`, for training goes on rather than a save. A dump that takes CPUs from writers pauses.
//
// Rows come table by table, slot by slot, in the order of their hashes (slot_range.h). Rows on the SSD are read from
// there, and do not come to memory.
//
// One at a time per store. Its pages belong to one thread; the writers' side is thread-safe. Must not outlive the
// store; a writer may hold it a little longer than the dump, which ends it by end(). Locks: a stripe's, then nothing;
// wait_for_room() is called with none.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "store/saved_images.h"
#include "store/slot_range.h"
#include "store/snapshot_page.h"
#include "store/store.h"
#include "store/store_impl.h"
#include "store/table/lock_timer.h"
#include "util/mutex.h"

namespace sparserow {

struct SnapshotOptions {
  // For images, three quarters of it, and for three pages of page_bytes(). 0: a tenth of what rows and indexes take, at
  // least kLeastSideBytes.
  std::uint64_t side_budget_bytes = 0;
  std::chrono::milliseconds longest_stall{10'000};
  // (slot_count) versions: only rows that changed after them, but a slot whole from which rows were erased since.
  // Empty: all.
  std::vector<std::uint64_t> since = {};
};

struct SnapshotStats {
  std::uint64_t rows_saved = 0;       // to the side buffer
  std::uint64_t side_bytes_most = 0;  // that it held at once
  std::uint64_t writes_stalled = 0;   // batches that waited for room in it
};

class Store::Snapshot {
 public:
  static constexpr std::uint64_t kLeastSideBytes = 4u << 20;
  static constexpr std::uint64_t kLeastPageBytes = 4u << 20;

  Snapshot(Impl& store, SnapshotOptions options);
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;
  ~Snapshot();  // end()

  // ---- the dump

  [[nodiscard]] std::vector<TableSchema> tables() const;
  // Null: there was no such table at the cut.
  [[nodiscard]] const TableSchema* schema(std::uint32_t table_id) const noexcept;
  [[nodiscard]] std::uint16_t lineage() const noexcept { return lineage_; }
  // (slot_count) the last version given in each slot.
  [[nodiscard]] const std::vector<std::uint64_t>& slot_versions() const noexcept { return slot_versions_; }
  // Whether a slot comes with all its rows, in place of those that another snapshot gave.
  [[nodiscard]] bool is_whole(std::uint32_t slot) const noexcept;
  // What a page should hold so that three have room beside the images: a sixteenth of the budget, at least
  // kLeastPageBytes, at most `most`.
  [[nodiscard]] std::uint64_t page_bytes(std::uint64_t most) const noexcept;
  // The next rows of a table: at most max_bytes of them, or one row; beyond that, which the side buffer bounds, rows
  // that were erased since the cut. end_slot is the slot count at the end. A table of few rows
  // comes in one page, by stripe and hash: its cost is that of its rows, not of the slots. kResourceExhausted when it
  // was given up, kDataLoss when the SSD lost rows, NotFound. used: its memory is used again.
  Result<SnapshotPage> next(std::uint32_t table_id, std::uint64_t max_bytes, SnapshotPage used = {});
  // Rows of slots that next() has not come to, which it will leave out: images, about max_bytes of them, when the side
  // buffer is a quarter full. By stripe and hash; none of a table that has an SSD, which may have rows twice. Errors as
  // next().
  Result<SnapshotPage> next_images(std::uint32_t table_id, std::uint64_t max_bytes, SnapshotPage used = {});
  // What a slot of a table remembered of keys without a row, as Store::filter_image gives it; empty: nothing.
  [[nodiscard]] std::vector<std::uint64_t> filter_image(std::uint32_t table_id, std::uint32_t slot) const;
  [[nodiscard]] SnapshotStats stats() const noexcept;
  // From now on nothing is saved, and no writer waits. Idempotent.
  void end();

  // What a thread of the dump has computed since it last paused. Belongs to that thread.
  struct Pace {
    LockTimer slice;
    LockTimes sum;
    std::uint64_t batches = 0;  // written when it last looked
  };
  // Between small parts of the dump's work; pauses where that takes CPUs from writers. What the thread does after
  // pace.slice began anew counts as computing.
  void keep_pace(Pace& pace);

  // ---- the writers

  // What is saved of one stripe of one table. Guarded by the stripe's lock.
  struct Side {
    std::uint64_t dumped = 0;  // suffixes before it are handed out
    bool is_done = false;      // all are
    SavedImagePool* pool = nullptr;
    SavedImage* spare = nullptr;       // places for further images
    std::vector<SavedImage*> by_slot;  // in the stripe: not yet handed out, the last first; empty until the first
  };
  // Null when the table came after the cut, or is handed out. Under the stripe's exclusive lock, as save().
  [[nodiscard]] Side* side(const Table& table, std::uint32_t stripe) noexcept;
  // Before a row is changed or removed.
  void save(Side& side, const Table& table, std::uint32_t stripe, std::uint64_t suffix, std::uint64_t version,
            std::uint32_t update_count, const std::byte* data);
  // Before a batch of writes; returns at once while there is room.
  void wait_for_room();

 private:
  static constexpr std::size_t kImageBytes = sizeof(SavedImage);  // of an image beside its data
  // The most bytes of a table's rows that come in one page; a 64th of them is copied under a stripe's lock.
  static constexpr std::uint64_t kSmallTableBytes = 4u << 20;

  struct Dump {  // of one table
    std::shared_ptr<Table> table;
    std::uint32_t slot = 0;                                             // the next one
    std::uint64_t suffix = 0;                                           // where its rest begins; 0: all of it
    std::uint32_t steps = 0;                                            // of the table's clock at the cut
    std::array<std::vector<TableAdmission::Filter>, kStripes> filters;  // by stripe and slot in stripe
    std::unique_ptr<SavedImagePool> images;
    std::array<Side, kStripes> sides;
  };
  struct Versions {  // of the rows of a slot that are wanted, both included
    std::uint64_t first, last;
  };

  // ---- collecting rows: snapshot_collect.cc
  Status collect(Dump& dump, std::uint32_t slot, std::uint64_t from, std::uint64_t most_rows, SlotRange& out);
  [[nodiscard]] bool is_small(const Table& table, std::uint64_t max_bytes) const;
  [[nodiscard]] bool collect_stripe(Dump& dump, std::uint32_t stripe, SlotRange& out);
  void take_images(Dump& dump, std::uint32_t slot, std::uint64_t end, SlotRange& out);
  [[nodiscard]] Versions versions_of(std::uint32_t slot) const noexcept {
    return {options_.since.empty() ? 0 : options_.since[slot] + 1, slot_versions_[slot]};
  }

  Result<SnapshotPage> whole_table(Dump& dump, std::uint64_t max_bytes, SnapshotPage used);
  [[nodiscard]] SnapshotPageWriter begin_page(const Dump& dump, std::uint64_t max_bytes, SnapshotPage used) const;
  [[nodiscard]] Status failure() const;
  void note_progress();
  void give_up();

  Impl& store_;
  SnapshotOptions options_;
  std::uint64_t image_budget_ = 0;  // bytes
  std::uint16_t lineage_ = 0;
  std::vector<std::uint64_t> slot_versions_;
  std::unordered_map<std::uint32_t, std::unique_ptr<Dump>> dumps_;  // by table id; fixed once made
  std::unordered_map<const Table*, Dump*> by_table_;
  SlotRange range_;  // the dump's: memory that grew under a lock once need not do so again

  std::atomic<std::uint64_t> side_bytes_{0};
  std::atomic<std::uint64_t> side_bytes_most_{0};
  std::atomic<std::uint64_t> rows_saved_{0};
  std::atomic<std::uint64_t> writes_stalled_{0};
  std::atomic<std::uint64_t> batches_{0};  // written since the cut
  std::atomic<bool> is_given_up_{false};
  Mutex mutex_;  // leaf
  CondVar moved_;
  std::uint64_t pages_ SR_GUARDED_BY(mutex_) = 0;  // slots handed out
  int waiting_ SR_GUARDED_BY(mutex_) = 0;          // writers, for room
  bool is_over_ SR_GUARDED_BY(mutex_) = false;
};

}  // namespace sparserow
