#include "store/snapshot_page.h"

#include <utility>

namespace sparserow {

SnapshotPageWriter::SnapshotPageWriter(const Table& table, const SlotOrder& slots, std::uint32_t steps,
                                       std::uint64_t max_bytes, SnapshotPage used)
    : table_(table), slots_(slots), steps_(steps), page_(std::move(used)) {
  std::size_t expected = max_bytes / (table.layout.data_bytes + SnapshotPage::kHeadBytes) + 1;
  expected += expected / 8;  // the last slot goes beyond
  page_.keys.clear();
  page_.versions.clear();
  page_.update_counts.clear();
  page_.weights.clear();
  page_.state.clear();
  page_.age_steps.clear();
  page_.push_seconds.clear();
  page_.keys.reserve(expected);  // memory that is not touched costs nothing
  page_.versions.reserve(expected);
  page_.update_counts.reserve(expected);
  page_.weights.reserve(expected * table.schema.dim * size_of(table.schema.dtype));
  page_.state.reserve(expected * table.optimizer->state_floats());
}

void SnapshotPageWriter::put(std::uint32_t stripe, std::uint64_t suffix, std::uint64_t version,
                             std::uint32_t update_count, const std::byte* data) {
  const RowPolicy& policy = table_.schema.policy;
  page_.keys.push_back(key_of_hash(table_.schema.id, slots_.hash(stripe, suffix)));
  page_.versions.push_back(version);
  page_.update_counts.push_back(update_count);
  page_.weights.insert(page_.weights.end(), data, data + table_.schema.dim * size_of(table_.schema.dtype));
  const auto* state = reinterpret_cast<const float*>(data + table_.layout.state_offset);
  page_.state.insert(page_.state.end(), state, state + table_.optimizer->state_floats());
  const auto* stamp = reinterpret_cast<const std::uint32_t*>(data + table_.layout.stamp_offset);
  if (policy.stamps_steps()) page_.age_steps.push_back(steps_ - *stamp++);
  if (policy.stamps_seconds()) page_.push_seconds.push_back(*stamp);
}

SnapshotPage SnapshotPageWriter::take(std::uint32_t first_slot, std::uint32_t end_slot) {
  page_.first_slot = first_slot;
  page_.end_slot = end_slot;
  return std::move(page_);
}

}  // namespace sparserow
