// Which rows of a store changed, and which are gone, for its followers: serving processes, checkpoints.
//
// A follower opens a *cursor*: for each slot the version up to which it has everything (0: it has nothing,
// kNotFollowed: it does not want the slot). While a cursor is open each stripe keeps notes of the last writes to tables
// that a cursor wants, and each slot a ring of tombstones of all tables (stripe_log.h), within
// StoreOptions::change_log_bytes for all of them; without a cursor there are none. A write to a table without followers
// costs one test, and its slot is not read. What every cursor has passed is dropped; what does not fit is
// forgotten, oldest first.
//
// read() says what a slot has for a cursor. The newest row wins: a read names keys, whose rows are read afterwards and
// may be newer.
//   kDelta     keys from the notes, or, where those do not suffice, from a scan of the slot by version; and tombstones.
//              The notes are insufficient when they were truncated, or when the cursor's version did not come from
//              an earlier read() of this log.
//   kSnapshot  every key of the slot: the follower *replaces* what it has. When tombstones were forgotten, a table that
//              the cursor wants was dropped or made again, or the cursor is of another lineage or has nothing.
//
// So nothing is lost however far behind a cursor is, and a read may be repeated: only ack() moves the cursor.
//
// What a page has no room for comes in *parts*: first tombstones, then rows in the order of (table, hash). All parts
// bring the slot to the version that it had at the first; a part of a snapshot replaces its own range. The cursor
// keeps up to where parts were acknowledged (SlotPlace), and moves with the last of them.
//
// A cursor may let rows wait that have changed little (send_threshold.h). Then it moves past rows that the follower
// lacks; the versions that the follower may record are lower (safe versions).
//
// Thread-safe. Locks: cursors_mutex_, then one stripe; writers of rows, which have a stripe's lock, never take the
// former.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "store/change_signal.h"
#include "store/changes/send_threshold.h"
#include "store/store.h"
#include "store/table/row.h"
#include "util/mutex.h"

namespace sparserow {

// A row that was written, and existed then.
struct ChangedRow {
  std::uint64_t key = 0;
  std::uint32_t table_id = 0;
  std::uint32_t times = 0;  // how often it was, where SlotChanges::is_counted
};
// A row that was erased: at this version, so it is older, or was created again.
struct ErasedRow {
  std::uint64_t key = 0;
  std::uint64_t version = 0;
  std::uint32_t table_id = 0;
};

// Where a part of a slot's changes begins. Rows are in the order of (table_id, suffix).
struct SlotPlace {
  std::uint64_t erased_after = 0;  // sequence: tombstones up to it were sent
  std::uint32_t table_id = 0;
  std::uint64_t suffix = 0;

  [[nodiscard]] std::pair<std::uint32_t, std::uint64_t> row() const noexcept { return {table_id, suffix}; }
  friend bool operator==(const SlotPlace&, const SlotPlace&) = default;
};

inline constexpr SlotPlace kSlotEnd{0, UINT32_MAX, UINT64_MAX};  // beyond every row

// What changed in one slot, or a part of it.
struct SlotChanges {
  enum class Kind : std::uint8_t { kDelta = 0, kSnapshot = 1 };
  std::uint32_t slot = 0;
  Kind kind = Kind::kDelta;
  bool is_noted = false;              // the rows are from notes, and those that wait were not passed over
  bool is_counted = false;            // every write of them is noted, not each row once
  std::uint32_t oldest_at_ms = 0;     // when the first of them was made, low half of the system's clock; 0: not known
  std::uint64_t since = 0;            // version; 0 of a snapshot
  std::uint64_t until = 0;            // version: with these changes a follower has everything up to it
  SlotPlace from{};                   // where they begin
  std::optional<SlotPlace> to{};      // where the next part begins; none: this is the last
  std::vector<ChangedRow> written{};  // by table, then by hash; each once
  std::vector<ErasedRow> erased{};    // oldest first
};

// What changed in some slots of one stripe.
struct StripeChanges {
  struct Row {
    std::uint64_t key = 0;
    std::uint32_t table_id = 0;
    std::uint32_t slot = 0;  // index in slots
  };
  std::vector<SlotChanges> slots;  // without the rows that were written: those are in `written`, or not looked for yet
  std::vector<Row> written;        // of the slots that are noted, in the order of the writes
  bool may_repeat = false;         // a row may be there more than once
};

// What a changed row takes on a page: its weights, key and version.
[[nodiscard]] inline std::uint64_t bytes_of_changed_row(const TableSchema& schema) noexcept {
  return row_bytes(schema.dtype, schema.dim) + 2 * sizeof(std::uint64_t);
}

// Sorts rows by table and hash, and joins those of one name.
void join_rows(std::vector<ChangedRow>& rows);

// One row as this store holds it.
struct RowFacts {
  bool exists = false;
  bool is_in_memory = false;  // else, where it exists, on the SSD alone
  std::uint64_t version = 0;
  std::uint32_t update_count = 0;
  std::int64_t age_ms = -1;  // since it was last written: from the log, or from the table's stamps; -1: not known
};

struct ChangeLogStats {
  std::uint64_t cursors = 0;
  std::uint64_t used_bytes = 0;
  std::uint64_t forgotten = 0;     // changes that had no room
  std::uint64_t scans = 0;         // reads that had to look at every row of a slot
  std::uint64_t snapshots = 0;     // reads that gave a whole slot
  std::uint64_t waiting_rows = 0;  // that wait, since they have changed little
};

class ChangeLog {
 public:
  static constexpr std::uint64_t kNotFollowed = UINT64_MAX;

  explicit ChangeLog(Store& store) noexcept : store_(&store) {}
  ChangeLog(const ChangeLog&) = delete;
  ChangeLog& operator=(const ChangeLog&) = delete;

  // Wakes a reader at the next change of a table that some cursor wants (change_signal.h).
  [[nodiscard]] ChangeSignal& signal() noexcept;

  // (slot_count) the version of each slot now: a cursor that has everything.
  [[nodiscard]] std::vector<std::uint64_t> versions() const;

  // versions: (slot_count). Tables: ids, empty for all. A cursor of this name begins anew. It ends by close(), or when
  // it was not used for idle_limit (zero: never). InvalidArgument; ResourceExhausted when there is no room for rings.
  Status open(const std::string& name, std::span<const std::uint64_t> versions, std::vector<std::uint32_t> tables,
              std::chrono::seconds idle_limit, const ThresholdOptions& threshold = {});
  void close(const std::string& name);
  void close_idle();
  [[nodiscard]] bool is_open(const std::string& name) const;

  // What a cursor has not got: slots, from `begin` on in the order of stripes: those of the first stripe, ascending,
  // then those of the next one. 0: a round begins, with no slot in parts. NotFound.
  struct Begun {  // a slot of which parts were acknowledged
    SlotChanges::Kind kind = SlotChanges::Kind::kDelta;
    std::uint64_t until = 0;  // version
    SlotPlace from;           // where the rest begins
  };
  struct Behind {
    struct Slot {
      std::uint32_t slot = 0;
      std::uint64_t since = 0;    // version up to which the cursor has it
      bool is_read_pass = false;  // and it is a read pass's (stripe_log.h)
      std::optional<Begun> begun = std::nullopt;
    };
    std::vector<Slot> slots;
    std::vector<std::uint32_t> tables;         // that it wants, ascending; empty: all
    std::shared_ptr<SendThreshold> threshold;  // what holds rows back; null when nothing does
  };
  Result<Behind> behind(const std::string& name, std::uint32_t begin);
  // What `begin` is for a slot; > 0.
  [[nodiscard]] std::uint32_t begin_of(std::uint32_t slot) const noexcept;
  // What some of these slots, all of one stripe, have for the cursor; does not move it. NotFound: no cursor is open any
  // more.
  Result<StripeChanges> read(const Behind& behind, std::span<const Behind::Slot> slots);
  // Finds the rows in [from, to) of a slot that are newer than `since`, of these tables (ascending; empty: all), by a
  // look at all of its rows from there on: as many as come in most_bytes, or one; `to` is where the rest begins.
  Status find_rows(SlotChanges& changes, const std::vector<std::uint32_t>& wanted, std::uint64_t most_bytes) const;
  // Counts such a look where it goes to the follower, and is of a slot's first part.
  void count_look(const SlotChanges& changes) noexcept {
    if (changes.from == SlotPlace()) ++(changes.kind == SlotChanges::Kind::kSnapshot ? snapshots_ : scans_);
  }
  // A part of a slot that is not the last goes to the follower; returns its number, which is > 0. NotFound.
  Result<std::uint64_t> sent(const std::string& name, const SlotChanges& changes);
  // The follower has taken what read() gave up to these versions: (n) each. A version of another lineage, or one older
  // than acknowledged, changes nothing; nor does one that is not of the last read of a cursor that holds rows back.
  // part: the number of a part that it has taken too, which changes nothing when another was sent of its slot since; 0:
  // none. NotFound; InvalidArgument, then nothing is acknowledged.
  Status ack(const std::string& name, std::span<const std::uint32_t> slots, std::span<const std::uint64_t> versions,
             std::uint64_t part = 0);

  // The cursor moves past slots, or parts of them, of a read() of which nothing was to be sent. NotFound.
  Status passed(const std::string& name, std::span<const SlotChanges> slots);

  // Sets weights of a store that follows, to rows and the versions (n) that they have elsewhere; passes over rows that
  // are here in the same version or, without `replaces`, a newer one. Returns how many were written. As
  // Store::assign().
  Result<std::uint64_t> assign_newest(std::uint32_t table_id, std::span<const std::uint64_t> keys, const float* rows,
                                      const std::uint64_t* versions, bool replaces);

  // Every row of a slot in [from, to), by table, then by hash.
  Result<std::vector<ChangedRow>> rows_of(std::uint32_t slot, const SlotPlace& from, const SlotPlace& to) const;

  // What is known of a row. NotFound: no such table.
  Result<RowFacts> facts(std::uint32_t table_id, std::uint64_t key) const;

  [[nodiscard]] ChangeLogStats stats() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Cursor {
    std::vector<std::uint64_t> versions;     // (slot_count)
    std::vector<std::uint8_t> is_read_pass;  // (slot_count) whether it is a read pass's
    std::vector<std::uint32_t> tables;       // ascending; empty: all
    std::chrono::seconds idle_limit{0};
    Clock::time_point used_at;
    std::shared_ptr<SendThreshold> threshold;  // null: no row waits
    struct Parts {
      std::uint32_t slot = 0;
      Begun begun;
      SlotPlace next;            // where the rest begins when the part that was sent last is acknowledged
      std::uint64_t number = 0;  // of that part
    };
    std::optional<Parts> parts{};  // of the slot that comes in parts in this round, until the last is acknowledged
    std::uint64_t parts_sent = 0;
  };

  [[nodiscard]] std::vector<std::uint64_t> touched_versions() const;
  Cursor* find(const std::string& name) SR_REQUIRES(cursors_mutex_);
  void drop(std::map<std::string, Cursor>::iterator cursor) SR_REQUIRES(cursors_mutex_);
  Status start_rings() SR_REQUIRES(cursors_mutex_);
  void end_rings() SR_REQUIRES(cursors_mutex_);
  void pass_all() SR_REQUIRES(cursors_mutex_);
  void pass(std::span<const std::uint32_t> slots) SR_REQUIRES(cursors_mutex_);

  Store* store_;
  mutable Mutex cursors_mutex_;
  std::map<std::string, Cursor> cursors_ SR_GUARDED_BY(cursors_mutex_);
  std::uint64_t ring_bytes_ SR_GUARDED_BY(cursors_mutex_) = 0;  // of all rings while they are empty
  std::atomic<std::uint64_t> scans_{0};
  std::atomic<std::uint64_t> snapshots_{0};
};

}  // namespace sparserow
