#include "store/table.h"

namespace sparserow {

std::uint32_t Table::add(std::uint32_t stripe, std::uint64_t path, std::uint64_t key, float* scratch) {
  std::unique_ptr<TableStripe>& held = stripes[stripe];
  if (held == nullptr) held = std::make_unique<TableStripe>(*pools_, layout.data_bytes);
  const std::uint32_t id = held->slab.allocate();
  if (id == RowSlab::kNone) return RowIndex::kNone;
  if (!held->index.insert(path, id)) {
    held->slab.free(id);
    return RowIndex::kNone;
  }
  RowRef row = held->slab.at(id);
  row.set_version(0);
  row.set_update_count(0);
  initial_rows.fill(key, scratch);
  convert_from_float(schema.dtype, scratch, row.weights(), schema.dim);
  optimizer->init_state(row.state(layout));
  return id;
}

bool Table::remove(std::uint32_t stripe, std::uint64_t path) {
  std::unique_ptr<TableStripe>& held = stripes[stripe];
  if (held == nullptr) return false;
  const std::uint32_t id = held->index.erase(path);
  if (id == RowIndex::kNone) return false;
  held->slab.free(id);
  if (held->slab.rows() == 0) held.reset();
  return true;
}

}  // namespace sparserow
