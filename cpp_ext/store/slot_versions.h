// Versions of rows: a slot counts its changes, and each change is noted for followers while there are any.
//
// A version is lineage << 48 | the slot's sequence at the change. The sequences of a stripe are guarded by the
// stripe's lock; the rest is atomic.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "store/change_signal.h"
#include "store/stripe_log.h"
#include "store/table/table.h"

namespace sparserow {

// The low half of the system's clock in milliseconds.
[[nodiscard]] std::uint32_t wall_ms() noexcept;

// The sequences of one stripe's slots, and the log of what changed in them.
struct StripeSequences {
  std::vector<std::uint64_t> sequences;  // by SlotOrder::slot_in_stripe
  std::vector<std::uint64_t> erasures;   // likewise; the sequence of the last erasure: of rows, or of a whole table
  StripeLog log;                         // closed while there are no followers (change_log.h)
};

class SlotVersions {
 public:
  SlotVersions(std::uint16_t lineage, std::uint64_t change_log_bytes) : lineage_(lineage) {
    change_budget.limit_bytes = change_log_bytes;
  }

  // The next version of a slot, for a row that is written, which followers of its table see. `before` is the
  // row's version until now.
  [[nodiscard]] std::uint64_t written(StripeSequences& stripe, std::uint32_t slot, const Table& table,
                                      std::uint64_t key, std::uint64_t before) noexcept {
    const std::uint64_t sequence = ++stripe.sequences[slot];
    const std::uint64_t version = of_sequence(sequence);
    if (stripe.log.is_open() && table.is_followed.load(std::memory_order_relaxed)) {
      stripe.log.touch(slot, sequence);
      signal.changed();
      const bool is_comparable = (before ^ version) >> 48 == 0 && !stripe.log.counts();
      if (stripe.log.wants(slot, is_comparable ? before & kSequence : 0)) {
        stripe.log.written(slot, {sequence, key, table.schema.id, wall_ms()}, change_budget);
      }
    }
    return version;
  }
  void erased(StripeSequences& stripe, std::uint32_t slot, std::uint32_t table_id, std::uint64_t key) noexcept {
    const std::uint64_t sequence = ++stripe.sequences[slot];
    stripe.erasures[slot] = sequence;
    if (!stripe.log.is_open()) return;
    stripe.log.erased(slot, {sequence, key, table_id, wall_ms()}, change_budget);
    signal.changed();
  }
  // A table went with all its rows, or came back: its followers get the stripe's slots whole. The slots go on with one
  // sequence, so that one number says of all of them which changes are older.
  void reset_table(StripeSequences& stripe, std::uint32_t table_id, bool is_followed) noexcept {
    const std::uint64_t sequence = 1 + *std::max_element(stripe.sequences.begin(), stripe.sequences.end());
    std::fill(stripe.sequences.begin(), stripe.sequences.end(), sequence);
    std::fill(stripe.erasures.begin(), stripe.erasures.end(), sequence);
    if (!stripe.log.is_open()) return;
    stripe.log.reset_table(table_id, sequence, is_followed, change_budget);
    signal.changed();
  }

  [[nodiscard]] std::uint64_t of_sequence(std::uint64_t sequence) const noexcept {
    return static_cast<std::uint64_t>(lineage()) << 48 | sequence;
  }
  [[nodiscard]] std::uint16_t lineage() const noexcept { return lineage_.load(std::memory_order_relaxed); }
  void set_lineage(std::uint16_t lineage) noexcept { lineage_ = lineage; }

  ChangeBudget change_budget;
  ChangeSignal signal;

 private:
  std::atomic<std::uint16_t> lineage_;  // of the versions that are given now
};

}  // namespace sparserow
