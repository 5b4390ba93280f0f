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

struct TableStripe {
  TableStripe(ArenaPool& pool, std::size_t row_bytes) : slab(pool, row_bytes), index(pool) {}
  [[nodiscard]] std::uint64_t bytes() const noexcept { return slab.bytes() + index.bytes(); }

  RowSlab slab;
  RowIndex index;
};

class Table {
 public:
  Table(const TableSchema& table_schema, ArenaPool& pool)
      : schema(table_schema),
        optimizer(make_optimizer(schema)),
        initial_rows(schema),
        layout(schema.dim, schema.dtype, optimizer->state_floats()),
        pool_(&pool) {}

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
  ArenaPool* pool_;
};

// Walks one stripe's keys of a block in a pipeline: the index's bucket is fetched kIndexAhead keys ahead, the
// row that its tag points at kRowAhead ahead, so that `visit(position, candidate row id)` finds both in cache.
template <class Visit>
void walk_stripe(const TableStripe* held, const BatchOrder& order, std::uint32_t stripe, std::size_t row_bytes_used,
                 Visit&& visit) {
  constexpr std::size_t kIndexAhead = 32;
  constexpr std::size_t kRowAhead = 16;
  constexpr std::size_t kLine = 64;
  constexpr std::size_t kMaxFetched = 1024;  // beyond it the hardware's own prefetcher follows
  const auto positions = order.of_stripe(stripe);
  if (held == nullptr) {
    for (const std::uint16_t position : positions) visit(position, RowIndex::kNone);
    return;
  }
  std::array<std::uint32_t, kRowAhead> candidates;
  const std::size_t fetched = std::min(row_bytes_used, kMaxFetched);
  const auto look_ahead = [&](std::size_t i) {
    const std::uint32_t row = held->index.find(order.hash(positions[i]), [](std::uint32_t) { return true; });
    candidates[i % kRowAhead] = row;
    if (row == RowIndex::kNone) return;
    const std::byte* at = held->slab.at(row);
    for (std::size_t offset = 0; offset < fetched; offset += kLine) __builtin_prefetch(at + offset);
    __builtin_prefetch(at + fetched - 1);
  };
  const std::size_t count = positions.size();
  for (std::size_t i = 0; i < std::min(count, kIndexAhead); ++i) held->index.prefetch(order.hash(positions[i]));
  for (std::size_t i = 0; i < std::min(count, kRowAhead); ++i) look_ahead(i);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t candidate = candidates[i % kRowAhead];
    if (i + kIndexAhead < count) held->index.prefetch(order.hash(positions[i + kIndexAhead]));
    if (i + kRowAhead < count) look_ahead(i + kRowAhead);
    visit(positions[i], candidate);
  }
}

}  // namespace sparserow
