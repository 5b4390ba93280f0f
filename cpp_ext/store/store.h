// The row store of one shard: every table's rows, in memory, and with an SSD also on it.
//
// Rows lie in slab chunks cut from huge-page arenas that all tables share (row.h, row_slab.h). Each (table, stripe)
// has an index of small segments that grow and split one at a time, so no growth step is longer than one segment; it
// is ordered by slot, and so are scans (slot_order.h, row_index.h).
//
// Invariants:
//  1. A pull never changes logical state; an absent row reads as its initial row, a pure function of
//     (seed, table id, key). Rows are created only by apply() and assign().
//  2. version = lineage << 48 | sequence, the slot's own sequence at the row's last change; it only grows.
//  3. A batch that cannot get its memory is refused before its first row changes.
//  4. Resident overhead is about 31 bytes per row beyond weights and state from a million rows on, at any fill; 33
//     with an SSD. Pages that are touched ahead of rows are beside it (arena_reserve.h).
//  5. Every call gives the same bits with an SSD as without: where a row is shows in time only (tiering.h).
//
// With an SSD, pull, reserve, apply, assign, erase and scan may read or write it: they block for as long as it takes.
// A row that the SSD lost makes its table fail with kDataLoss.
//
// Thread-safe. Locks: the table map, one stripe at a time and the arenas', never two of one kind, in this
// order; nothing is called out under a lock. A table that is dropped lives until its last call returns.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "schema/schema.h"
#include "store/ssd/ssd_tier.h"
#include "store/table/admission.h"
#include "store/table/arena_pool.h"
#include "store/table/sweep.h"
#include "util/hash.h"
#include "util/status.h"

namespace sparserow {

struct StoreOptions {
  std::uint64_t memory_budget_bytes = 0;  // of rows and indexes; 0 = no budget
  std::uint32_t slot_count = kDefaultSlotCount;
  std::uint16_t lineage = 1;                  // to begin with
  std::uint64_t change_log_bytes = 64 << 20;  // of changes that followers have not read; 0 bytes without followers
  SsdOptions ssd = {};                        // with a path: rows beyond the budget, which must not be 0, go to an SSD
  std::function<std::uint64_t()> unix_seconds = nullptr;  // null: the system's clock
};

struct TableStats {
  std::uint32_t table_id = 0;
  std::string name;
  std::uint64_t rows = 0;          // wherever they are
  std::uint64_t row_bytes = 0;     // weights and state
  std::uint64_t total_bytes = 0;   // in memory, with headers, index and slack, as allocated
  std::uint64_t ssd_rows = 0;      // of the rows: on the SSD alone
  std::uint64_t ssd_bytes = 0;     // of those, as they are stored
  std::uint64_t rows_added = 0;    // since the start, by pushes and as stored rows
  std::uint64_t rows_evicted = 0;  // since the start, from memory to the SSD
  AdmissionStats admission = {};
  std::uint64_t sweeps = 0;                             // that were carried out
  std::array<std::uint64_t, kSweepRules> swept_rows{};  // by rule
  RowAges ages;                                         // as the last whole sweep saw them
  LockTimes sweep_longest_lock;                         // of a stripe by a sweep
};

struct TierStats {
  std::uint64_t hits = 0;                // keys of pulls and commits whose rows were in memory
  std::uint64_t misses = 0;              // that were looked for on the SSD
  std::uint64_t prefetched = 0;          // keys that fetch_to_memory() looked for there before anybody pulled them
  std::uint64_t rows_evicted = 0;        // from memory
  std::uint64_t background_evicted = 0;  // of them, before anybody needed their room
  bool is_making_room = false;           // some leave ahead now, or are about to
  std::uint64_t resident_bytes = 0;      // of rows and their indexes in memory: of arenas that have pages
  LockTimes longest_lock;                // of a stripe that pulls wait for, by eviction and by rows that come back
  SsdStats ssd;
};

// Optional outputs of a pull; each is empty or has n entries.
struct PullExtras {
  std::span<std::uint64_t> versions = {};  // (n); 0 for an absent row
  std::span<std::uint8_t> found = {};      // (n); 1 when the row exists, 0 when the initial row was given
};

// Page of a scan. Rows are float32 whatever the stored dtype.
struct ScanPage {
  std::vector<std::uint64_t> keys;           // (n)
  std::vector<std::uint64_t> versions;       // (n)
  std::vector<std::uint32_t> update_counts;  // (n)
  std::vector<float> rows;                   // (n, dim)
  std::vector<float> state;                  // (n, state_floats), empty unless asked
  std::uint64_t next_cursor = 0;             // pass to the next call; 0 = the end was reached
};

// Rows as a snapshot gave them (snapshot.h).
struct StoredRows {
  std::span<const std::uint64_t> keys;           // (n)
  std::span<const std::uint64_t> versions;       // (n)
  std::span<const std::uint32_t> update_counts;  // (n)
  std::span<const std::byte> weights;            // (n, dim) as stored
  std::span<const float> state;                  // (n, state floats); empty: initial, and no update is counted
  // (n) steps since the last push to a row, and when that was; empty: now. What the table's policy does not ask for is
  // passed over.
  std::span<const std::uint32_t> age_steps = {};
  std::span<const std::uint32_t> push_seconds = {};
};

class BatchOrder;
class ChangeLog;
class Table;
struct ApplyOptions;
class GroupedKeys;
struct SnapshotOptions;
struct LastPush;
struct NamespaceMemory;
struct WriteOptions;

class Store {
 public:
  // Memory promised to a batch; consumed by the apply() that names it, the rest given back when destroyed. With an
  // SSD, the batch's rows that exist are in memory and stay there as long. Must not outlive the store. Several threads
  // may apply parts of one batch under it.
  class Reservation {
   public:
    Reservation() = default;
    Reservation(Reservation&& other) noexcept;
    Reservation& operator=(Reservation&& other) noexcept;
    ~Reservation();

   private:
    friend class Store;
    explicit Reservation(Store* store) : store_(store) {}  // of nothing
    Reservation(Store* store, std::uint64_t bytes, std::shared_ptr<NamespaceMemory> memory)
        : store_(store), bytes_(bytes), memory_(std::move(memory)) {}
    void release() noexcept;
    void consume(std::uint64_t bytes) noexcept;

    struct Pin {
      std::uint64_t suffix;
      std::uint32_t stripe;
    };
    Store* store_ = nullptr;
    std::atomic<std::uint64_t> bytes_{0};
    std::shared_ptr<NamespaceMemory> memory_;  // that has the promise; null: of nothing
    std::shared_ptr<Table> table_;             // of the pins
    std::vector<Pin> pins_;                    // by stripe, block by block
    bool has_absent_ = true;                   // some row may have to be created
    // Row hashes that were nowhere when their token (tiering.h) was this; apply() need not look them up again.
    std::unordered_map<std::uint64_t, std::uint32_t> absences_;
  };

  // InvalidArgument names the option; with an SSD also as open_ssd_tier().
  static Result<std::unique_ptr<Store>> create(const StoreOptions& options);
  ~Store();

  // Idempotent. FailedPrecondition when the id exists with another schema (names the field).
  Status create_table(const TableSchema& schema);
  Status drop_table(std::uint32_t table_id);  // NotFound
  [[nodiscard]] std::optional<TableSchema> schema(std::uint32_t table_id) const;
  [[nodiscard]] std::vector<std::uint32_t> table_ids() const;  // ascending

  // Copies rows as `out_dtype` into out (n, dim), in the order of keys; keys may repeat, in any order.
  Status pull(std::uint32_t table_id, std::span<const std::uint64_t> keys, Dtype out_dtype, std::byte* out,
              PullExtras extras = {}) const;

  // Promises memory for the rows of `keys` that do not exist, and brings the others to it. ResourceExhausted when over
  // budget (the message says budget, use and need), or when the rest is kept for other namespaces; NotFound.
  Result<Reservation> reserve(std::uint32_t table_id, std::span<const std::uint64_t> keys);

  // Applies one gradient per key, in order: grads (n, dim) float32. Absent rows are created from their initial
  // row, if the table's policy admits the key; else the gradient is dropped and counted. Under a reservation of the
  // same keys it cannot fail for the budget; without one, and with a budget, it reserves for all keys first (so a batch
  // that threads share by parts should have a reservation).
  Status apply(std::uint32_t table_id, std::span<const std::uint64_t> keys, const float* grads,
               const ApplyOptions& options);

  // The keys of a batch for several threads that each apply a part of it: they group the keys once, and together, where
  // each would group all of them. `keys` outlive it.
  [[nodiscard]] std::shared_ptr<GroupedKeys> grouped(std::uint32_t table_id, std::span<const std::uint64_t> keys) const;

  // A step of a job ended: tables that the job pushes to grow older by it, also where it brought them nothing.
  // `job` is a clock: the id of a job in the low 32 bits, above it the job's generation.
  void note_step(std::uint64_t job, std::int64_t step);
  // A job has ended: its clocks are forgotten.
  void forget_job(std::uint32_t job_id);
  [[nodiscard]] std::size_t job_clocks() const;  // that the store and its tables remember

  // Sets weights, creating rows; state of a new row is initial, of an existing one unchanged.
  Status assign(std::uint32_t table_id, std::span<const std::uint64_t> keys, const float* rows);  // (n, dim)
  // As assign(), with the versions that the rows have elsewhere (n), by which this store's copies can be compared.
  Status assign_versions(std::uint32_t table_id, std::span<const std::uint64_t> keys, const float* rows,
                         const std::uint64_t* versions);
  // Removes rows; returns how many existed. With if_versions (n): only those that still have that version and that no
  // prepared commit needs.
  Result<std::uint64_t> erase(std::uint32_t table_id, std::span<const std::uint64_t> keys,
                              std::span<const std::uint64_t> if_versions = {});

  // Removes the rows that the table's policy no longer wants, in slices: a stripe is held for about a tenth of a
  // millisecond at a time. A row that changes meanwhile stays. NotFound; kDataLoss as pull().
  Result<SweepReport> sweep(std::uint32_t table_id, const SweepOptions& options);
  // Ends sweeps under way, soon, and lets later ones end at once.
  void stop_sweeps() noexcept;

  // Replaces the shares of the memory budget that namespaces have for themselves, by name (table/memory_shares.h).
  // InvalidArgument unless each is in (0, 7/8], and all together too.
  Status set_memory_shares(std::map<std::string, double> shares);

  // What a slot remembers of keys without a row (admission.h), and back. NotFound; DataLoss when it is no image;
  // FailedPrecondition for a table that remembers none.
  [[nodiscard]] Result<std::vector<std::uint64_t>> filter_image(std::uint32_t table_id, std::uint32_t slot) const;
  Status load_filter(std::uint32_t table_id, std::uint32_t slot, std::span<const std::uint64_t> image);

  // Puts rows as they were: weights, state, versions and update counts, in place of what is there. InvalidArgument:
  // lengths that do not agree; else as apply().
  Status install(std::uint32_t table_id, const StoredRows& rows);
  // The last sequence given in a slot; it may go down. To be called when rows were installed.
  void set_sequence(std::uint32_t slot, std::uint64_t sequence);
  // The lineage of the versions that are given from now on.
  void set_lineage(std::uint16_t lineage) noexcept;
  [[nodiscard]] std::uint16_t lineage() const noexcept;
  class Snapshot;
  // The rows of this moment, to be handed out while writes go on; no write may be under way, for an instant of all
  // stripes. FailedPrecondition while there is one already. snapshot.h
  Result<std::shared_ptr<Snapshot>> snapshot(SnapshotOptions options);

  // Brings rows from the SSD to memory, as far as there is room that colder rows can make; for keys that are about to
  // be used. Changes nothing else, and does nothing without an SSD. NotFound. kPull: what is not in memory counts as
  // a miss of the pull that follows. kPrefetch: the rows stay until their next use, as long as there are others to go.
  enum class FetchCause : std::uint8_t { kPrefetch, kPull };
  Status fetch_to_memory(std::uint32_t table_id, std::span<const std::uint64_t> keys,
                         FetchCause cause = FetchCause::kPrefetch);
  // Whether fetch_to_memory() would look any of them up: cheap, and never blocks for a disk.
  [[nodiscard]] bool would_block(std::uint32_t table_id, std::span<const std::uint64_t> keys) const;
  // Whether rows that were read from the SSD lately had to wait for the disk, one in 16 at least; true while too few
  // were read to know. Else reads are work for CPUs, and to do them early saves no time.
  [[nodiscard]] bool waits_for_disk() const noexcept;
  // Writes every row that changed to the SSD, and there to the disk. Rows stay in memory, but for those that the SSD's
  // index takes the room of. FailedPrecondition without one.
  Status write_back();

  // Rows by stripe, then by slot, then by hash. Rows present throughout the scan are returned exactly once; rows
  // created or erased meanwhile may or may not be.
  Result<ScanPage> scan(std::uint32_t table_id, std::uint64_t cursor, std::uint32_t max_rows, bool with_state) const;

  [[nodiscard]] ChangeLog& changes() noexcept;  // for followers: store/changes/change_log.h

  // The tables of these ids that exist; all tables when none is named.
  [[nodiscard]] std::vector<TableStats> stats(std::span<const std::uint32_t> ids = {}) const;
  [[nodiscard]] std::uint64_t used_bytes() const noexcept;
  [[nodiscard]] ReserveStats reserve_stats() const noexcept;  // beside used_bytes()
  [[nodiscard]] const StoreOptions& options() const noexcept;
  [[nodiscard]] bool has_ssd() const noexcept { return !options().ssd.path.empty(); }
  [[nodiscard]] std::optional<TierStats> tier_stats() const;  // nullopt without an SSD

 private:
  class Impl;
  class Tiering;
  friend class ChangeLog;
  friend class SlotRange;
  class Sweep;
  struct Absences;
  explicit Store(const StoreOptions& options);
  template <class Visit>
  std::optional<std::uint64_t> write_stripe(Table& table, std::uint32_t stripe, const BatchOrder& order,
                                            std::span<const std::uint64_t> block, const WriteOptions& write,
                                            Absences* absences, Visit&& visit);
  Status set_rows(std::uint32_t table_id, std::span<const std::uint64_t> keys, const float* rows,
                  const std::uint64_t* versions);
  [[nodiscard]] LastPush last_push_of(Table& table, std::uint64_t job, std::int64_t step) const;
  Result<Reservation> reserve_tiered(const std::shared_ptr<Table>& table, std::span<const std::uint64_t> keys);
  Status find_absent(Table& table, const BatchOrder& order, std::span<const std::uint64_t> block, std::uint32_t part,
                     std::uint32_t parts, const Reservation& reservation, Absences& absences);
  void unpin(const Table& table, const std::vector<Reservation::Pin>& pins) noexcept;
  Result<ScanPage> scan_tiered(Table& table, std::uint64_t cursor, std::uint32_t max_rows, bool with_state) const;
  std::unique_ptr<Impl> impl_;
  std::unique_ptr<ChangeLog> changes_;
};

struct ApplyOptions {
  float lr = 0.0f;
  float grad_scale = 1.0f;
  // Only stripes with stripe % parts == part are touched, so threads can share a batch.
  std::uint32_t part = 0;
  std::uint32_t parts = 1;
  GroupedKeys* grouped = nullptr;  // what grouped() gave for the same keys, for the threads of all parts; or null
  std::uint32_t dim = 0;  // columns of grads; NotFound when the table, made anew meanwhile, has others; 0 = not checked
  Store::Reservation* reservation = nullptr;      // what reserve() gave for the same keys, or null
  std::uint64_t job = 0;                          // whose step it is
  std::int64_t step = -1;                         // for the table's clock; -1: none
  std::optional<std::uint64_t> observation = {};  // what numbers the push for admit_probability; none: counted here
  bool* has_changed = nullptr;  // set before the first row may change; of a batch that fails: whether a part is applied
};

}  // namespace sparserow
