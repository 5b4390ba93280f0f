// The last changes, for followers: notes of (sequence, table, key), oldest first, that grow while their budget lets
// them, and then lose the oldest. Changes of a slot up to floor() may be missing, so the notes are insufficient for a
// reader that is behind it.
//
// Not thread-safe: guarded by their stripe's lock (store_impl.h). The budget is shared and atomic.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace sparserow {

struct Change {
  std::uint64_t sequence = 0;  // the slot's
  std::uint64_t key = 0;
  std::uint32_t table_id = 0;
  std::uint32_t at_ms = 0;  // of the system's clock, low half
};

// Memory of all rings of a store.
struct ChangeBudget {
  std::uint64_t limit_bytes = 0;
  std::atomic<std::uint64_t> used_bytes{0};
  std::atomic<std::uint64_t> forgotten{0};  // changes that no reader had taken

  // False when there is no room.
  [[nodiscard]] bool take(std::uint64_t bytes) noexcept {
    std::uint64_t used = used_bytes.load(std::memory_order_relaxed);
    do {
      if (used + bytes > limit_bytes) return false;
    } while (!used_bytes.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
    return true;
  }
  void give_back(std::uint64_t bytes) noexcept { used_bytes.fetch_sub(bytes, std::memory_order_relaxed); }
};

class ChangeRing {
 public:
  explicit ChangeRing(std::uint64_t floor = 0) noexcept : floor_(floor) {}

  [[nodiscard]] std::uint64_t floor() const noexcept { return floor_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  // Changes up to `sequence` count as missing; there are none of them in the ring.
  void raise_floor(std::uint64_t sequence) noexcept { floor_ = std::max(floor_, sequence); }

  void add(const Change& change, ChangeBudget& budget) noexcept {
    if (size_ == entries_.size() && !grow(budget)) {
      budget.forgotten.fetch_add(1, std::memory_order_relaxed);
      floor_ = size_ == 0 ? change.sequence : front().sequence;
      if (size_ == 0) return;
      pop();
    }
    entries_[place(size_++)] = change;
  }

  // Changes up to `sequence` are needed no more.
  void pass(std::uint64_t sequence, ChangeBudget& budget) noexcept {
    while (size_ > 0 && front().sequence <= sequence) {
      floor_ = front().sequence;
      pop();
    }
    if (size_ == 0) release(budget);
  }

  // Forgets all; changes up to `floor` are missing.
  void reset(std::uint64_t floor, ChangeBudget& budget) noexcept {
    size_ = 0;
    floor_ = floor;
    release(budget);
  }

  // Calls visit(change) for those after `since`, oldest first.
  template <class Visit>
  void visit_after(std::uint64_t since, Visit&& visit) const {
    std::size_t low = 0;
    std::size_t high = size_;
    while (low < high) {
      const std::size_t middle = (low + high) / 2;
      entries_[place(middle)].sequence <= since ? low = middle + 1 : high = middle;
    }
    for (; low < size_; ++low) visit(entries_[place(low)]);
  }

 private:
  static constexpr std::size_t kFirst = 8;
  static constexpr std::size_t kMost = std::size_t{1} << 20;

  [[nodiscard]] std::size_t place(std::size_t index) const noexcept { return (head_ + index) & (entries_.size() - 1); }
  [[nodiscard]] const Change& front() const noexcept { return entries_[head_]; }
  void pop() noexcept {
    head_ = (head_ + 1) & (entries_.size() - 1);
    --size_;
  }

  bool grow(ChangeBudget& budget) noexcept {
    const std::size_t more = entries_.empty() ? kFirst : entries_.size();
    if (entries_.size() >= kMost || !budget.take(more * sizeof(Change))) return false;
    try {
      std::vector<Change> larger(entries_.size() + more);
      for (std::size_t i = 0; i < size_; ++i) larger[i] = entries_[place(i)];
      entries_ = std::move(larger);
      head_ = 0;
      return true;
    } catch (const std::bad_alloc&) {
      budget.give_back(more * sizeof(Change));
      return false;
    }
  }
  void release(ChangeBudget& budget) noexcept {
    budget.give_back(entries_.size() * sizeof(Change));
    entries_ = {};
    head_ = 0;
  }

  std::vector<Change> entries_;  // a power of two, or none
  std::size_t head_ = 0;
  std::size_t size_ = 0;
  std::uint64_t floor_;
};

// The slots of one stripe: rows that were written, and tombstones of rows that are gone. Not thread-safe: guarded by
// the stripe's lock.
//
// A *read pass* takes all notes of a slot. A row that is written again is not noted again before the next pass over its
// slot, since that pass reads the row as it is. So a slot has one note of a row for each pass, however hot the row is.
// A note means that its row changed between the note and the next pass. Notes cannot show which rows changed after a
// version that was no pass's (change_log.h).
//
// Writes of all slots lie one behind the other, in order, and readers take all slots of the stripe in one go. A ring
// for each of 16,384 slots cost 150 ns a write (lines that are in no cache, growth of thousands of small rings),
// this 15.
class StripeLog {
 public:
  [[nodiscard]] bool is_open() const noexcept { return !erased_.empty(); }

  // What a log of so many slots takes while it has no notes.
  [[nodiscard]] static std::uint64_t bytes_for(std::uint64_t slots) noexcept {
    return slots * (sizeof(ChangeRing) + 4 * sizeof(std::uint64_t));
  }
  // Begins: nothing is missing after these sequences of the slots.
  void open(const std::vector<std::uint64_t>& sequences) {
    erased_.clear();
    for (const std::uint64_t sequence : sequences) erased_.emplace_back(sequence);
    floors_ = seen_ = touched_ = sequences;
    resets_ = {};
  }
  // Tables are followed from now on that were not: their writes up to these sequences are not noted.
  void widen(const std::vector<std::uint64_t>& sequences) {
    for (std::size_t slot = 0; slot < floors_.size(); ++slot) floors_[slot] = std::max(floors_[slot], sequences[slot]);
    touched_ = sequences;
  }
  // A follower wants to know how often each row was written: every write after these sequences is noted.
  void count(const std::vector<std::uint64_t>& sequences) {
    if (!counts()) counted_ = sequences;
  }
  [[nodiscard]] bool counts() const noexcept { return !counted_.empty(); }
  // Whether every write after this sequence was noted. Before, a row's first write after a read pass is.
  [[nodiscard]] bool counts_since(std::uint32_t slot, std::uint64_t sequence) const noexcept {
    return counts() && sequence >= counted_[slot];
  }
  void close(ChangeBudget& budget) noexcept {
    for (ChangeRing& ring : erased_) ring.reset(0, budget);
    erased_ = {};
    floors_ = seen_ = touched_ = counted_ = {};
    resets_ = {};
    written_.clear();
    release(budget);
  }

  // Whether a write of a row must be noted. before: the sequence of the row's last change; 0: it has none, or every
  // write is noted.
  [[nodiscard]] bool wants(std::uint32_t slot, std::uint64_t before) const noexcept { return before <= seen_[slot]; }
  // A row of a table that is followed has changed.
  void touch(std::uint32_t slot, std::uint64_t sequence) noexcept { touched_[slot] = sequence; }
  // The sequence of the last change of the slot that a follower may want.
  [[nodiscard]] std::uint64_t touched(std::uint32_t slot) const noexcept { return touched_[slot]; }
  void written(std::uint32_t slot, Change change, ChangeBudget& budget) noexcept {
    if (written_.size() == room_ && !grow(budget) && !forget(slot, change.sequence, budget)) return;
    change.sequence |= std::uint64_t{slot} << kSlotShift;
    written_.push_back(change);
  }
  void erased(std::uint32_t slot, const Change& change, ChangeBudget& budget) noexcept {
    touch(slot, change.sequence);
    erased_[slot].add(change, budget);
  }

  // A read pass took the notes of a slot up to `sequence`, its last one.
  void see(std::uint32_t slot, std::uint64_t sequence) noexcept { seen_[slot] = std::max(seen_[slot], sequence); }
  // The sequence of the last read pass over a slot.
  [[nodiscard]] std::uint64_t seen(std::uint32_t slot) const noexcept { return seen_[slot]; }
  // Notes of writes up to this sequence may be missing.
  [[nodiscard]] std::uint64_t floor(std::uint32_t slot) const noexcept { return floors_[slot]; }
  [[nodiscard]] const ChangeRing& erasures(std::uint32_t slot) const noexcept { return erased_[slot]; }

  // Forgets all of a slot up to `floor`, which is its last sequence.
  void reset(std::uint32_t slot, std::uint64_t floor, ChangeBudget& budget) noexcept {
    floors_[slot] = std::max(floors_[slot], floor);
    erased_[slot].reset(floor, budget);
    touch(slot, floor);
    see(slot, floor);
  }
  // A table went with all its rows, or came back, when every slot of the stripe was at `sequence`: its followers get
  // the slots whole, and the followers of other tables go on.
  void reset_table(std::uint32_t table_id, std::uint64_t sequence, bool is_followed, ChangeBudget& budget) noexcept {
    if (!note_reset(table_id, sequence)) {  // so that every follower gets the slots whole
      for (std::uint32_t slot = 0; slot < erased_.size(); ++slot) reset(slot, sequence, budget);
      resets_.clear();
    }
    if (!is_followed) return;
    for (std::uint32_t slot = 0; slot < erased_.size(); ++slot) touch(slot, sequence);
  }
  // The newest sequence at which one of these tables (ascending; empty: all) went or came back; 0: not known of any.
  [[nodiscard]] std::uint64_t last_reset(const std::vector<std::uint32_t>& tables) const noexcept {
    std::uint64_t last = 0;
    for (const Reset& reset : resets_) {
      if (tables.empty() || std::binary_search(tables.begin(), tables.end(), reset.table_id)) {
        last = std::max(last, reset.sequence);
      }
    }
    return last;
  }
  // Changes of slots up to these sequences (one for each slot of the stripe) are needed no more.
  void pass(const std::vector<std::uint64_t>& sequences, ChangeBudget& budget) noexcept {
    for (std::size_t slot = 0; slot < erased_.size(); ++slot) {
      erased_[slot].pass(sequences[slot], budget);
      floors_[slot] = std::max(floors_[slot], sequences[slot]);
    }
    forget_resets(sequences);
    std::erase_if(written_, [&](const Change& change) { return sequence_of(change) <= floors_[slot_of(change)]; });
    if (written_.empty()) release(budget);
  }

  // Calls visit(slot, change) for the writes that are noted, in order. Some may be no newer than their slot's floor.
  template <class Visit>
  void visit_written(Visit&& visit) const {
    for (Change change : written_) {
      const std::uint32_t slot = slot_of(change);
      change.sequence = sequence_of(change);
      visit(slot, change);
    }
  }

 private:
  static constexpr int kSlotShift = 48;  // of a slot's number beside the sequence
  static constexpr std::size_t kFirst = 64;
  static constexpr std::size_t kForgotten = 8;  // part that goes at once when there is no room
  static constexpr std::size_t kMostResets = 1024;

  struct Reset {
    std::uint32_t table_id = 0;
    std::uint64_t sequence = 0;
  };

  [[nodiscard]] static std::uint32_t slot_of(const Change& change) noexcept {
    return static_cast<std::uint32_t>(change.sequence >> kSlotShift);
  }
  [[nodiscard]] static std::uint64_t sequence_of(const Change& change) noexcept {
    return change.sequence & ((std::uint64_t{1} << kSlotShift) - 1);
  }

  bool grow(ChangeBudget& budget) noexcept {
    const std::size_t more = room_ == 0 ? kFirst : room_;
    if (!budget.take(more * sizeof(Change))) return false;
    try {
      written_.reserve(room_ + more);
    } catch (const std::bad_alloc&) {
      budget.give_back(more * sizeof(Change));
      return false;
    }
    room_ += more;
    return true;
  }
  // Forgets the oldest writes; false when there is no room for any, so that this one is forgotten too.
  bool forget(std::uint32_t slot, std::uint64_t sequence, ChangeBudget& budget) noexcept {
    const std::size_t count = (written_.size() + kForgotten - 1) / kForgotten;
    for (std::size_t i = 0; i < count; ++i) {
      std::uint64_t& floor = floors_[slot_of(written_[i])];
      floor = std::max(floor, sequence_of(written_[i]));
    }
    written_.erase(written_.begin(), written_.begin() + static_cast<std::ptrdiff_t>(count));
    budget.forgotten.fetch_add(std::max<std::size_t>(count, 1), std::memory_order_relaxed);
    if (count == 0) floors_[slot] = sequence;
    return count > 0;
  }
  // False when there is no room for the note.
  bool note_reset(std::uint32_t table_id, std::uint64_t sequence) noexcept {
    for (Reset& reset : resets_) {
      if (reset.table_id != table_id) continue;
      reset.sequence = sequence;
      return true;
    }
    if (resets_.size() == kMostResets) return false;
    try {
      resets_.push_back({table_id, sequence});
      return true;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }
  // Drops the resets that every cursor has passed. A cursor that is opened later at an older version gets its slots
  // whole, because the floors say so from now on.
  void forget_resets(const std::vector<std::uint64_t>& passed) noexcept {
    if (resets_.empty()) return;
    const std::uint64_t least = *std::min_element(passed.begin(), passed.end());
    std::uint64_t forgotten = 0;
    std::erase_if(resets_, [&](const Reset& reset) {
      if (reset.sequence > least) return false;
      forgotten = std::max(forgotten, reset.sequence);
      return true;
    });
    for (ChangeRing& ring : erased_) ring.raise_floor(forgotten);
  }
  void release(ChangeBudget& budget) noexcept {
    budget.give_back(room_ * sizeof(Change));
    written_ = {};
    room_ = 0;
  }

  std::vector<ChangeRing> erased_;      // by slot; empty without followers
  std::vector<std::uint64_t> seen_;     // by slot
  std::vector<std::uint64_t> floors_;   // by slot, of writes
  std::vector<std::uint64_t> touched_;  // by slot
  std::vector<std::uint64_t> counted_;  // by slot; empty: no follower counts
  std::vector<Reset> resets_;           // the last one of each table, until every cursor has passed it
  std::vector<Change> written_;         // in order; the slot beside the sequence
  std::size_t room_ = 0;                // that the budget has given for them
};

}  // namespace sparserow
