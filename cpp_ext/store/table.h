// One table's rows, by stripe. Everything below TableStripe is guarded by that stripe's lock (store.cc);
// the rest of a Table is immutable.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "optim/optimizer.h"
#include "store/batch_order.h"
#include "store/initial_rows.h"
#include "store/row.h"
#include "store/row_index.h"
#include "store/row_slab.h"
#include "store/schema.h"

namespace sparserow {

// Memory of all tables. Rows and indexes have arenas of their own: chunks of rows divide an arena without a rest,
// and index segments between them would spoil that.
struct StorePools {
  [[nodiscard]] std::uint64_t used_bytes() const noexcept { return rows.used_bytes() + indexes.used_bytes(); }

  ArenaPool rows;
  ArenaPool indexes;
};

struct TableStripe {
  TableStripe(StorePools& pools, std::size_t row_bytes) : slab(pools.rows, row_bytes), index(pools.indexes) {}
  [[nodiscard]] std::uint64_t bytes() const noexcept { return slab.bytes() + index.bytes(); }

  RowSlab slab;
  RowIndex index;
};

class Table {
 public:
  Table(const TableSchema& table_schema, StorePools& pools)
      : schema(table_schema),
        optimizer(make_optimizer(schema)),
        initial_rows(schema),
        layout(schema.dim, schema.dtype, optimizer->state_floats()),
        pools_(&pools) {}

  // The row of `key`, or null. `candidate` is a row id that the caller expects it at, or RowIndex::kNone.
  [[nodiscard]] std::byte* find(std::uint32_t stripe, std::uint64_t hash, std::uint64_t key,
                                std::uint32_t candidate) const {
    const TableStripe* held = stripes[stripe].get();
    if (held == nullptr) return nullptr;
    const auto is_key = [held, key](std::uint32_t row) { return RowRef(held->slab.at(row)).key() == key; };
    if (candidate != RowIndex::kNone && is_key(candidate)) return held->slab.at(candidate);
    const std::uint32_t row = held->index.find(hash, is_key);
    return row == RowIndex::kNone ? nullptr : held->slab.at(row);
  }

  // Adds an absent row with its initial weights and state, update count 0 and version 0 (the caller sets it).
  // Null when the system has no memory. scratch: (dim).
  [[nodiscard]] std::byte* add(std::uint32_t stripe, std::uint64_t hash, std::uint64_t key, float* scratch);
  // True when the row existed.
  bool remove(std::uint32_t stripe, std::uint64_t hash, std::uint64_t key);

  const TableSchema schema;
  const std::unique_ptr<const Optimizer> optimizer;
  const InitialRows initial_rows;
  const RowLayout layout;
  std::array<std::unique_ptr<TableStripe>, kStripes> stripes;  // made at a stripe's first row

 private:
  StorePools* pools_;
};

// Always inlined, see RowIndex::prefetch. bytes > 0.
[[gnu::always_inline]] inline void fetch_lines(const std::byte* at, std::size_t bytes) noexcept {
  constexpr std::size_t kLine = 64;
  for (std::size_t offset = 0; offset < bytes; offset += kLine) __builtin_prefetch(at + offset);
  __builtin_prefetch(at + bytes - 1);
}

// Walks one stripe's keys of a block, some at a time, in three passes: fetch the buckets of the index; look up
// and fetch the rows; then `visit(position, hash, candidate row id)` finds both in cache. Passes beat a pipeline
// of single keys: a visit's stores and the fetches of rows would compete for the same line buffers.
template <class Visit>
void walk_stripe(const TableStripe* held, const BatchOrder& order, std::uint32_t stripe, std::size_t row_bytes_used,
                 Visit&& visit) {
  constexpr std::size_t kGroup = 128;
  constexpr std::size_t kMaxFetched = 1024;  // beyond it the hardware's own prefetcher follows
  const auto positions = order.positions(stripe);
  const auto hashes = order.hashes(stripe);
  const std::size_t fetched = std::min(row_bytes_used, kMaxFetched);
  std::array<std::uint32_t, kGroup> candidates;
  for (std::size_t begin = 0; begin < positions.size(); begin += kGroup) {
    const std::size_t count = std::min(kGroup, positions.size() - begin);
    if (held == nullptr) {
      std::fill_n(candidates.begin(), count, RowIndex::kNone);
    } else {
      for (std::size_t i = 0; i < count; ++i) held->index.prefetch(hashes[begin + i]);
      for (std::size_t i = 0; i < count; ++i) {
        candidates[i] = held->index.find(hashes[begin + i], [](std::uint32_t) { return true; });
        if (candidates[i] != RowIndex::kNone) fetch_lines(held->slab.at(candidates[i]), fetched);
      }
    }
    for (std::size_t i = 0; i < count; ++i) visit(positions[begin + i], hashes[begin + i], candidates[i]);
  }
}

}  // namespace sparserow
