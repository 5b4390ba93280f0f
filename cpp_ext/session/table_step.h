// The rows and gradient sums of one table within one step.
//
// A key is pulled once per step and gets an index; indexes grow and never move until clear(). Keys come in
// batches, each grouped by shard, so that a step with one batch pulls into, and commits from, this memory
// without a copy. The ids of a lookup are remembered with the tensor they came from and compared before they
// are trusted, so the backward pass and a recomputation hash nothing.
//
//   add(ids)* -> pending() -> [pull] -> confirm() | rollback()     then recall / stage / seal; clear() ends it
//
// Invariants:
//  1. keys are unique; rows of confirmed keys never change and stay readable through every Lookup given out.
//  2. A rollback leaves the object as it was before the first unconfirmed add().
//  3. A sum exists only where staged is not kNotStaged.
// Not thread-safe: Binding holds the lock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "session/lookup.h"
#include "shards/shards.h"
#include "util/partition.h"

namespace sparserow {

class TableStep {
 public:
  TableStep(std::string name, std::uint32_t table_id, std::uint32_t schema_version, std::uint32_t dim,
            RowReader& shards);

  // The lookup of these ids when it is remembered and still the same; verified id by id.
  [[nodiscard]] std::optional<Lookup> recall(const IdsRef& ids) const;
  // The lookup of ids that are all known; nullopt and `missing` (an id) when one is not.
  [[nodiscard]] std::optional<Lookup> find(const IdsRef& ids, std::int64_t* missing);
  // Gives every id of every lookup an index. New keys are pending until confirm(). ids must be >= 0.
  void add(std::span<const IdsRef> lookups, Partitioner& partitioner);

  // Requests for the keys without a row, rows pointing into this object; empty when there are none.
  void pending(std::vector<TablePull>& out);
  void confirm();
  void rollback();
  [[nodiscard]] std::size_t pending_keys() const noexcept { return keys_.size() - confirmed_; }
  [[nodiscard]] std::size_t keys() const noexcept { return keys_.size(); }
  [[nodiscard]] std::span<const std::uint64_t> all_keys() const noexcept { return keys_; }
  [[nodiscard]] std::uint32_t dim() const noexcept { return dim_; }
  [[nodiscard]] bool empty() const noexcept { return keys_.empty(); }

  // Requests for every key, rows pointing into this object. Only before a Lookup was given out (invariant 1).
  void requests(std::vector<TablePull>& out);
  // Moves the confirmed keys and rows of `ahead` in; keys known here keep their rows. Leaves `ahead` empty.
  void take(TableStep& ahead, Partitioner& partitioner);

  // Copies the rows of pending keys that `other` has confirmed. Returns how many keys it had.
  std::size_t fill_pending(TableStep& other);
  // The lookup of ids that are all known, remembered or not; nullopt when one is not. Remembers nothing.
  [[nodiscard]] std::optional<Lookup> known(const IdsRef& ids);
  // The index of each marked key; what stands for the others is not said. The first marked key that is not known, as
  // an id; nullopt when all are.
  [[nodiscard]] std::optional<std::int64_t> indexes_of(std::span<const std::uint64_t> keys,
                                                       std::span<const std::uint8_t> marks,
                                                       std::vector<std::uint32_t>& out);
  // Forgets which tensors were looked up when there are more than `most`; keys and rows stay.
  void trim_memos(std::size_t most);
  // The memory that this object has allocated.
  [[nodiscard]] std::uint64_t bytes() const noexcept;

  // Where sums of known keys go; sized for all of them. Sums that were lent are copied there first.
  float* sums();
  std::uint8_t* staged() noexcept { return staged_.data(); }
  // Takes the sums of these keys as those of the step without a copy, and true: they stay valid, and seal() may change
  // them, until clear() or drop_sums(). False where these are not all keys of the step in order, or one has a sum.
  [[nodiscard]] bool take_sums(std::span<const std::uint64_t> keys, std::span<float> sums);

  // Forgets all sums; keys, rows and remembered lookups stay.
  void drop_sums();

  struct Seal {
    std::uint64_t rows = 0;
    std::uint64_t nonfinite_rows = 0;
    std::uint64_t first_nonfinite_key = 0;
    std::uint64_t clipped_rows = 0;
  };
  // Multiplies the sums by `scale`, counts rows with NaN or Inf, shortens those whose L2 norm is above
  // `clip_row_norm` (infinity: none) to it, and makes the push. Without a copy when the step had one batch and every
  // key of it has a gradient.
  Seal seal(float scale, float clip_row_norm);
  // Valid after seal() until clear(). `lr` is the caller's.
  [[nodiscard]] TablePush push(float lr) const;

  void clear();

 private:
  struct Batch {
    std::size_t begin = 0;                   // first key
    std::vector<std::uint32_t> shard_begin;  // (shards + 1), relative to begin
  };
  struct Memo {
    const void* source = nullptr;
    std::size_t offset = 0;
    std::size_t n = 0;
    std::shared_ptr<Lookup::Indexes> indexes;
  };

  [[nodiscard]] bool is_memo_of(const Memo& memo, std::span<const std::int64_t> ids) const noexcept;
  void requests_from(std::size_t batch, std::vector<TablePull>& out);
  std::shared_ptr<Lookup::Indexes> fresh_indexes(std::size_t n);
  std::size_t index_known(std::span<const std::int64_t> ids, Lookup::Indexes& indexes);
  void append_fresh();
  void remember(const TensorView& source, std::size_t offset, std::size_t n,
                const std::shared_ptr<Lookup::Indexes>& indexes);
  [[nodiscard]] Lookup lookup_of(const Memo& memo) const;
  void build_map();
  void map_insert(std::uint32_t index);
  [[nodiscard]] std::uint32_t map_find(std::uint64_t key) const noexcept;
  void grow_rows(std::size_t keys);
  void move_rows(std::size_t capacity, std::size_t rows);
  void gather_pushes();
  [[nodiscard]] const float* sums_now() const noexcept {
    if (!lent_.empty()) return lent_.data();
    return sums_ ? sums_->data() : nullptr;
  }

  std::string name_;
  std::uint32_t table_id_;
  std::uint32_t schema_version_;
  std::uint32_t dim_;
  RowReader* shards_;  // whose rows these are
  std::uint32_t shard_count_;

  std::vector<std::uint64_t> keys_;  // (u)
  std::size_t confirmed_ = 0;        // keys [0, confirmed) have rows
  std::vector<Batch> batches_;
  std::size_t batches_used_ = 0;
  std::size_t batches_confirmed_ = 0;
  std::shared_ptr<RowMemory> rows_;  // (capacity, dim)
  std::size_t row_capacity_ = 0;

  // Key -> index by linear probing; built when a second batch of ids arrives. Entries are index + 1.
  std::vector<std::uint32_t> map_;
  std::size_t mapped_ = 0;  // keys [0, mapped) are in the map

  std::vector<Memo> memos_;
  std::vector<std::shared_ptr<Lookup::Indexes>> pool_;  // every index array, reused when no lookup reads it

  std::shared_ptr<RowMemory> sums_;   // (>= u, dim); null before the first sum
  std::span<float> lent_;             // in their place where it is not empty
  std::vector<std::uint8_t> staged_;  // (u), of Staged

  bool direct_push_ = false;
  std::vector<std::uint64_t> push_keys_;
  std::vector<std::uint32_t> push_shard_begin_;
  std::shared_ptr<RowMemory> push_grads_;

  Partition fresh_;
  std::vector<std::int64_t> joined_ids_;
  std::vector<std::uint64_t> missing_ids_;
  std::vector<std::uint32_t> missing_at_;
};

}  // namespace sparserow
