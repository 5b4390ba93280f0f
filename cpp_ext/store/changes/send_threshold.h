// Lets rows wait that have changed little since they were last sent to a follower.
//
// With ThresholdOptions a changed row goes to the follower when one of these holds, and waits until then:
//   - it was written `updates` times since it was last sent (0: they are not counted), or how often is not known: it
//     was written before a follower with `updates` came;
//   - its weights are further than `move` (L2) from those that were last sent (0: not measured), or it is not known
//     what was sent: the row is new, or its copy had no room within `bytes`;
//   - it has waited for `longest`.
// Erasures, rows that were erased and created again, and whole slots do not wait. So a follower lacks nothing for
// longer than `longest`, and at the end of all writes has everything that much later.
//
// A *read pass* over a slot is what one read() of it found: begin(), choose() for each table, end(); so for each part
// of a slot that comes in parts. It counts from commit() on, when the follower has acknowledged the last of them; one
// that is never acknowledged is forgotten by the next pass, a part that is read again by that. The
// version that a follower may record is safe(): everything up to it was sent, also when this object is gone.
//
// Thread-safe: its mutex is a leaf. Passes over one slot follow each other.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "util/mutex.h"

namespace sparserow {

struct SlotChanges;
struct ChangedRow;

struct ThresholdOptions {
  std::uint32_t updates = 0;
  float move = 0.0f;
  std::chrono::milliseconds longest{0};
  std::uint64_t bytes = 64 << 20;  // of the weights that were last sent, for `move`

  [[nodiscard]] bool is_on() const noexcept { return updates > 0 || move > 0.0f; }
};

class SendThreshold {
 public:
  explicit SendThreshold(const ThresholdOptions& options) noexcept : options_(options) {}

  // Names the rows that wait in `changes` too, wherever in the slot they are.
  void begin(SlotChanges& changes);
  // Which rows go now: (n) 1 or 0. names: (n) of one table, some of changes.written; rows: (n, dim) as they are now;
  // found: (n), 0 where the row is gone.
  std::vector<std::uint8_t> choose(const SlotChanges& changes, std::span<const ChangedRow> names, std::uint32_t dim,
                                   std::span<const float> rows, std::span<const std::uint8_t> found);
  // Ends a pass, or a part of it. When nothing is sent at its end, it is committed. oldest_at_ms: of what goes, as in
  // SlotChanges.
  struct PassEnd {
    std::uint64_t safe = 0;
    std::uint32_t oldest_at_ms = 0;
  };
  PassEnd end(const SlotChanges& changes, bool is_sent);

  // The follower has what the pass that ended at version `position` sent. False when that is not the last pass.
  bool commit(std::uint32_t slot, std::uint64_t position);
  // The slot's version for the follower, which has acknowledged `position`.
  [[nodiscard]] std::uint64_t safe(std::uint32_t slot, std::uint64_t position) const;

  // Slots with rows that have waited long enough.
  [[nodiscard]] std::unordered_set<std::uint32_t> due() const;
  [[nodiscard]] std::uint64_t rows() const;  // that wait

 private:
  using Clock = std::chrono::steady_clock;
  using RowName = std::pair<std::uint32_t, std::uint64_t>;  // table id, key
  struct WaitingRow {
    std::uint32_t updates = 0;
    std::uint32_t at_ms = 0;    // of its first change, or earlier
    std::uint64_t since = 0;    // version that its first change is newer than
    Clock::time_point until{};  // it goes then
  };
  struct Pending {
    std::uint64_t position = 0;
    bool is_snapshot = false;
    bool has_uncopied = false;  // rows go of which there is no copy here for want of room
    std::uint32_t oldest_at_ms = 0;
    std::map<RowName, WaitingRow> waiting;
    std::map<RowName, std::vector<float>> sent;
    std::uint64_t sent_bytes = 0;
    std::set<RowName> gone;

    void forget_sent(const RowName& name);
  };
  struct Slot {
    std::map<RowName, WaitingRow> waiting;
    std::map<RowName, std::vector<float>> sent;  // weights that the follower has
    std::optional<Pending> pass;
  };

  [[nodiscard]] bool has_moved(const Slot& slot, const RowName& name, std::span<const float> row) const;
  [[nodiscard]] static std::uint64_t bytes_of(const std::vector<float>& row) noexcept;
  void forget_sent(Slot& slot, const RowName& name) SR_REQUIRES(mutex_);
  void keep_sent(std::uint32_t number, Slot& slot) SR_REQUIRES(mutex_);
  void empty_another(std::uint32_t number) SR_REQUIRES(mutex_);
  bool commit_locked(std::uint32_t number, std::uint64_t position) SR_REQUIRES(mutex_);
  [[nodiscard]] static std::uint64_t safe_of(const std::map<RowName, WaitingRow>& waiting,
                                             std::uint64_t position) noexcept;

  const ThresholdOptions options_;
  mutable Mutex mutex_;
  std::map<std::uint32_t, Slot> slots_ SR_GUARDED_BY(mutex_);
  std::uint64_t sent_bytes_ SR_GUARDED_BY(mutex_) = 0;
  std::uint64_t refused_bytes_ SR_GUARDED_BY(mutex_) = 0;  // of copies that had no room, since a slot gave up its own
  std::uint32_t emptied_ SR_GUARDED_BY(mutex_) = 0;        // the slot whose copies made room last
};

}  // namespace sparserow
