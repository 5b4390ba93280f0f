// How rows are written, under their stripe's lock: what apply() (store_write.cc) and what puts rows in place of others
// (store_install.cc) have in common.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "store/snapshot.h"
#include "store/store_impl.h"
#include "store/tiering.h"

namespace sparserow {

inline Status out_of_memory(const Table& table) {
  return {Code::kResourceExhausted, "table " + table.schema.name +
                                        ": the system refuses more memory, a part of the batch is applied; free "
                                        "memory on this machine or set memory_budget_bytes"};
}

inline std::uint64_t bytes_of(const std::unique_ptr<TableStripe>& stripe_rows) noexcept {
  return stripe_rows == nullptr ? 0 : stripe_rows->slab.bytes() + stripe_rows->index.bytes();
}

// Versions that rows have elsewhere: what is here already is passed over.
struct VersionFilter {
  const std::uint64_t* versions = nullptr;
  bool replaces = false;                          // any other version is taken, else newer ones
  std::size_t first = 0;                          // index of the first version of the batch
  std::span<const std::uint32_t> positions = {};  // where each key was before the batch was sorted; empty: it was not
  std::size_t begin = 0;                          // of the block in the batch
  std::uint64_t passed_over = 0;

  bool takes(std::uint64_t stored, std::uint16_t position) noexcept {
    const std::size_t at = begin + position;
    const std::uint64_t version = versions[first + (positions.empty() ? at : positions[at])];
    const bool is_taken = stored == 0 || (replaces ? stored != version : stored < version);
    passed_over += is_taken ? 0 : 1;
    return is_taken;
  }
};

// How the rows of a batch are written.
struct WriteOptions {
  LastPush last_push;
  float* scratch = nullptr;  // (dim); null: the caller sets the weights of new rows too
  bool admits_all = false;   // also keys that the table's policy would refuse
  std::uint64_t observation = 0;
  VersionFilter* filter = nullptr;  // null: every row is written
};

// Which keys of one block are known to have no row, and which must be looked up again.
struct Store::Absences {
  static constexpr std::uint64_t kUnknown = ~std::uint64_t{0};
  std::vector<std::uint64_t> tokens;  // by position
  std::vector<std::uint16_t>
      deferred;  // positions whose row left memory, or was erased, between two locks of its stripe
};

// Rows of a stripe that are to be created, so that its index grows once for all of them.
inline void make_room(Table& table, std::uint32_t stripe, const BatchOrder& order) {
  std::vector<std::uint64_t> absent;
  walk_stripe<Fetch::kNothing>(table, order, stripe,
                               [&](std::uint16_t /*position*/, std::uint64_t suffix, std::uint32_t id) {
                                 if (id == RowIndex::kNone) absent.push_back(suffix);
                               });
  if (!absent.empty()) table.make_room(stripe, absent);
}

// Whether a batch from elsewhere brings few rows that are not here, most likely: then to look for those first, so that
// the index grows once, costs more than it saves (live sync: 145 -> 123 ns a row).
inline bool has_most(const Table& table, std::uint32_t stripe, const BatchOrder& order, const WriteOptions& write) {
  constexpr std::size_t kMany = 8;  // times as many rows as the batch has
  const TableStripe* const stripe_rows = table.stripes[stripe].get();
  return stripe_rows != nullptr && write.filter != nullptr && !write.filter->replaces &&
         stripe_rows->slab.rows() / kMany >= order.positions(stripe).size();
}

// The rows of a stripe that a batch has created, as a Bloom filter with one bit each: most keys come once, and need no
// second search.
class CreatedRows {
 public:
  void add(std::uint64_t suffix) noexcept { bits_[bit_of(suffix) / 64] |= std::uint64_t{1} << bit_of(suffix) % 64; }
  [[nodiscard]] bool may_have(std::uint64_t suffix) const noexcept {
    return (bits_[bit_of(suffix) / 64] >> bit_of(suffix) % 64 & 1) != 0;
  }

 private:
  static constexpr std::size_t kBits = 2048;
  static std::size_t bit_of(std::uint64_t suffix) noexcept { return suffix >> 20 & (kBits - 1); }
  std::array<std::uint64_t, kBits / 64> bits_{};
};

// Finds or bears every row of the block that belongs to `stripe` and calls visit(row, position), but for those that the
// policy refuses. With an SSD a row is created only when it is known to be nowhere.
// Returns the memory that it took, or nothing when the system refused more.
template <class Visit>
std::optional<std::uint64_t> Store::write_stripe(Table& table, std::uint32_t stripe, const BatchOrder& order,
                                                 std::span<const std::uint64_t> block, const WriteOptions& write,
                                                 Absences* absences, Visit&& visit) {
  Impl::Stripe& locked = impl_->stripes[stripe];
  TableAdmission* const admission = write.admits_all ? nullptr : table.admission.get();
  bool has_memory = true;
  const std::uint64_t bytes_before = bytes_of(table.stripes[stripe]);
  if (write.scratch == nullptr && absences == nullptr && !has_most(table, stripe, order, write)) {
    make_room(table, stripe, order);
  }
  CreatedRows created;
  Snapshot::Side* const side = locked.snapshot == nullptr ? nullptr : locked.snapshot->side(table, stripe);
  walk_stripe<Fetch::kRow>(table, order, stripe, [&](std::uint16_t position, std::uint64_t suffix, std::uint32_t id) {
    // Created since, by an earlier key of this batch?
    if (id == RowIndex::kNone && created.may_have(suffix)) id = table.find(stripe, suffix);
    if (id == RowIndex::kNone && absences != nullptr) {
      const bool is_known =
          !absences->tokens.empty() && absences->tokens[position] == impl_->tiering->token(stripe, suffix);
      if (!is_known) {
        absences->deferred.push_back(position);
        return;
      }
    }
    if (id == RowIndex::kNone && admission != nullptr &&
        !admission->admit(impl_->slots, stripe, suffix, write.observation))
      return;
    if (id == RowIndex::kNone) {
      created.add(suffix);
      id = table.add(stripe, suffix, block[position], write.scratch);
    }
    if (id == RowIndex::kNone) {
      has_memory = false;
      return;
    }
    RowRef row = table.row(stripe, id);
    if (write.filter != nullptr && !write.filter->takes(row.version(), position)) return;
    if (side != nullptr) {
      locked.snapshot->save(*side, table, stripe, suffix, row.version(), row.update_count(), row.weights());
    }
    row.set_version(impl_->written(locked, suffix, table, block[position], row.version()));
    std::copy_n(write.last_push.values.begin(), write.last_push.count, row.stamps(table.layout));
    if (absences != nullptr && table.stripes[stripe]->slab.meta(id).push()) table.brought[stripe].add_pushed();
    visit(row, position);
  });
  if (!has_memory) return std::nullopt;
  const std::uint64_t bytes_after = bytes_of(table.stripes[stripe]);
  return bytes_after - std::min(bytes_after, bytes_before);
}

}  // namespace sparserow
