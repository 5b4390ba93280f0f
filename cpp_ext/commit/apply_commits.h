// Puts commits into the store: one alone, or those of one step reduced in rank order.
//
// Thread-safe: it has no state of its own. Takes no lock but the store's.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "commit/commit.h"
#include "commit/reduce.h"
#include "store/store.h"
#include "util/status.h"

namespace sparserow {

// A commit that is accepted but not applied, with the memory that it was promised.
struct Kept {
  Commit commit;
  std::vector<Store::Reservation> reservations;  // of each block
  std::uint64_t bytes = 0;                       // of keys and gradients
};

// How an attempt to apply commits ended.
struct ApplyOutcome {
  Status status;
  bool has_changed = false;  // a row may have changed, also when it failed
};

class CommitApplier {
 public:
  // parallel_for: null runs the `parts` of a batch in turn.
  CommitApplier(Store& store, std::uint32_t parts, ParallelFor parallel_for)
      : store_(store), parts_(parts), parallel_for_(std::move(parallel_for)) {}

  // Looks every key up and promises memory for the absent ones. NotFound (table), ResourceExhausted.
  Result<Kept> reserve(Commit commit) const;
  // Applies one commit, gradients scaled by 1/workers unless they are sums. What a table that was dropped
  // meanwhile would have got goes with it. Fails only for what the store itself reports, or for want of memory; throws
  // nothing.
  ApplyOutcome apply(Kept& kept, std::uint32_t workers) const noexcept;
  // commits: of one step, in rank order.
  ApplyOutcome apply_step(std::span<Kept> commits, std::uint32_t workers) const noexcept;
  [[nodiscard]] bool has_table(std::uint32_t table_id) const { return store_.schema(table_id).has_value(); }

 private:
  void apply_commit(Kept& kept, std::uint32_t workers, ApplyOutcome& outcome) const;
  void reduce_and_apply(std::span<Kept> commits, std::uint32_t workers, ApplyOutcome& outcome) const;
  void apply_block(const GradBlock& block, const Commit& commit, float scale, Store::Reservation& reservation,
                   ApplyOutcome& outcome) const;
  void apply_slice(const GradBlock& block, std::size_t begin, std::size_t rows, std::uint32_t parts,
                   const Commit& commit, float scale, Store::Reservation& reservation, ApplyOutcome& outcome) const;

  Store& store_;
  const std::uint32_t parts_;
  const ParallelFor parallel_for_;
};

}  // namespace sparserow
