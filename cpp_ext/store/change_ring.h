// What changed in one slot of late, oldest first: a ring of (sequence, table, key) that grows while its budget lets
// it, and then forgets the oldest. floor() says up to which sequence changes may be missing, so a reader who is behind
// it knows that the ring cannot tell.
//
// Not thread-safe: guarded by its stripe's lock (store_impl.h). The budget is shared and atomic.
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

// What a slot has to tell followers: rows that were written, and tombstones of rows that are gone.
struct SlotLog {
  explicit SlotLog(std::uint64_t floor = 0) noexcept : written(floor), erased(floor) {}
  ChangeRing written;
  ChangeRing erased;
};

// The slots of one stripe. Not thread-safe: guarded by the stripe's lock.
//
// A row that was written again is not noted again as long as nobody has looked at its slot: whoever looks then finds
// the row as it is. So a slot holds a row once for each look, however hot it is.
//
// Writes are noted one after the other, and sorted into their slots some hundreds at a time: each would else meet two
// lines of memory that are in no cache (16,384 slots: 190 ns a write).
class StripeLog {
 public:
  [[nodiscard]] bool is_open() const noexcept { return !slots_.empty(); }

  // Begins: nothing is missing after these sequences of the slots. most_fresh: writes that lie unsorted.
  void open(const std::vector<std::uint64_t>& sequences, std::size_t most_fresh) {
    slots_.clear();
    for (const std::uint64_t sequence : sequences) slots_.emplace_back(sequence);
    seen_ = sequences;
    most_fresh_ = most_fresh;
    fresh_.reserve(most_fresh + 1);
  }
  void close(ChangeBudget& budget) noexcept {
    for (SlotLog& log : slots_) {
      log.written.reset(0, budget);
      log.erased.reset(0, budget);
    }
    slots_ = {};
    seen_ = {};
    fresh_ = {};
  }

  // before: the sequence of the row's last change; 0: it has none, or is_counted: every write is noted.
  void written(std::uint32_t slot, const Change& change, std::uint64_t before, ChangeBudget& budget) noexcept {
    if (before > seen_[slot]) return;
    fresh_.push_back(change);
    fresh_.back().sequence |= std::uint64_t{slot} << kSlotShift;
    if (fresh_.size() >= most_fresh_) sort_in(budget);
  }
  void erased(std::uint32_t slot, const Change& change, ChangeBudget& budget) noexcept {
    slots_[slot].erased.add(change, budget);
  }
  // Somebody has what there is of a slot up to `sequence`.
  void see(std::uint32_t slot, std::uint64_t sequence) noexcept { seen_[slot] = std::max(seen_[slot], sequence); }
  // Forgets all of a slot up to `floor`, which is its last sequence.
  void reset(std::uint32_t slot, std::uint64_t floor, ChangeBudget& budget) noexcept {
    sort_in(budget);
    slots_[slot].written.reset(floor, budget);
    slots_[slot].erased.reset(floor, budget);
    see(slot, floor);
  }
  [[nodiscard]] SlotLog& slot(std::uint32_t slot, ChangeBudget& budget) noexcept {
    sort_in(budget);
    return slots_[slot];
  }
  // Calls visit(change) for the writes of a slot, oldest first.
  template <class Visit>
  void visit_written(std::uint32_t slot, Visit&& visit) const {
    slots_[slot].written.visit_after(slots_[slot].written.floor(), visit);
    for (const Change& change : fresh_) {
      if (change.sequence >> kSlotShift == slot) visit(sorted(change));
    }
  }

 private:
  static constexpr int kSlotShift = 48;  // of a slot's number beside the sequence of a fresh write
  [[nodiscard]] static Change sorted(Change change) noexcept {
    change.sequence &= (std::uint64_t{1} << kSlotShift) - 1;
    return change;
  }
  void sort_in(ChangeBudget& budget) noexcept {
    for (const Change& change : fresh_) slots_[change.sequence >> kSlotShift].written.add(sorted(change), budget);
    fresh_.clear();
  }

  std::vector<SlotLog> slots_;       // empty while nobody follows
  std::vector<std::uint64_t> seen_;  // by slot
  std::vector<Change> fresh_;        // in order
  std::size_t most_fresh_ = 0;
};

}  // namespace sparserow
