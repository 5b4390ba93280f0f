#include "store/table.h"

namespace sparserow {
namespace {

// What the index asks of rows when it rebuilds a segment.
struct RowsOf {
  const RowSlab& slab;
  std::uint32_t table_id;

  // Always inlined, see RowIndex::prefetch.
  [[gnu::always_inline]] void prefetch(std::uint32_t row) const noexcept { __builtin_prefetch(slab.at(row)); }
  [[nodiscard]] std::uint64_t hash_of(std::uint32_t row) const noexcept {
    return row_hash(table_id, RowRef(slab.at(row)).key());
  }
};

}  // namespace

std::byte* Table::add(std::uint32_t stripe, std::uint64_t hash, std::uint64_t key, float* scratch) {
  std::unique_ptr<TableStripe>& held = stripes[stripe];
  if (held == nullptr) held = std::make_unique<TableStripe>(*pools_, layout.row_bytes);
  const std::uint32_t id = held->slab.allocate();
  if (id == RowSlab::kNone) return nullptr;
  std::byte* at = held->slab.at(id);
  RowRef row(at);
  row.set_key(key);
  row.set_update_count(0);
  if (!held->index.insert(hash, id, RowsOf{held->slab, schema.id})) {
    held->slab.free(id);
    return nullptr;
  }
  initial_rows.fill(key, scratch);
  convert_from_float(schema.dtype, scratch, row.weights(), schema.dim);
  optimizer->init_state(row.state(layout));
  return at;
}

bool Table::remove(std::uint32_t stripe, std::uint64_t hash, std::uint64_t key) {
  std::unique_ptr<TableStripe>& held = stripes[stripe];
  if (held == nullptr) return false;
  const std::uint32_t id =
      held->index.find(hash, [&](std::uint32_t row) { return RowRef(held->slab.at(row)).key() == key; });
  if (id == RowIndex::kNone) return false;
  held->index.erase(hash, id, RowsOf{held->slab, schema.id});
  held->slab.free(id);
  if (held->slab.rows() == 0) held.reset();
  return true;
}

}  // namespace sparserow
