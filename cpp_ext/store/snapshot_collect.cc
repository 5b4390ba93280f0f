// Collects the rows of a slot or a stripe as they were at the cut, from memory, saved images and the SSD. See
// snapshot.h.
#include <algorithm>

#include "store/snapshot.h"

namespace sparserow {
bool Store::Snapshot::is_small(const Table& table, std::uint64_t max_bytes) const {
  std::uint64_t rows = 0;
  for (std::uint32_t stripe = 0; stripe < store_.slots.stripe_count(); ++stripe) {
    const std::shared_lock lock(store_.stripes[stripe].mutex);
    if (table.stripes[stripe] != nullptr) rows += table.stripes[stripe]->slab.rows();
    rows += table.ssd_rows[stripe];
  }
  return rows * (table.layout.data_bytes + SnapshotPage::kHeadBytes) <= std::min(max_bytes, kSmallTableBytes);
}

// As collect(), of all slots of a stripe at once. False, and nothing is taken, when the SSD alone has some of its rows.
bool Store::Snapshot::collect_stripe(Dump& dump, std::uint32_t stripe, SlotRange& out) {
  const Table& table = *dump.table;
  const SlotOrder& slots = store_.slots;
  const std::uint32_t stripes = slots.stripe_count();
  const auto per_stripe = static_cast<std::uint32_t>(slot_versions_.size()) / stripes;
  out.clear();
  const std::shared_lock lock(store_.stripes[stripe].mutex);
  if (table.ssd_rows[stripe] > 0) return false;
  if (const TableStripe* rows = table.stripes[stripe].get(); rows != nullptr) {
    for (std::uint64_t suffix = 0;;) {
      suffix = rows->index.visit_range(suffix, [&](std::uint64_t at, std::uint32_t id) {
        const RowRef row = rows->slab.at(id);
        const Versions wanted = versions_of(slots.slot_in_stripe(at) * stripes + stripe);
        if (row.version() < wanted.first || row.version() > wanted.last) return;
        out.add(at, row.version(), row.update_count(), row.weights(), table.layout.data_bytes);
      });
      if (suffix == 0) break;
    }
    out.sort();
  }
  if (!dump.sides[stripe].by_slot.empty()) {
    for (std::uint32_t at = 0; at < per_stripe; ++at) take_images(dump, at * stripes + stripe, 0, out);
  }
  dump.sides[stripe].is_done = true;
  return true;
}

// Takes the images of a slot's suffixes before `end` (0: all): in place of rows that are there, which were read from
// the SSD, that may have older ones, or changed between the copy and this; the others in their places by suffix.
void Store::Snapshot::take_images(Dump& dump, std::uint32_t slot, std::uint64_t end, SlotRange& out) {
  Side& side = dump.sides[slot % store_.slots.stripe_count()];
  if (side.by_slot.empty()) return;
  const std::size_t bytes = dump.table->layout.data_bytes;
  const std::size_t sorted = out.rows().size();
  SavedImage* taken = nullptr;
  SavedImage* last = nullptr;
  std::size_t count = 0;
  for (SavedImage** at = &side.by_slot[slot / store_.slots.stripe_count()]; *at != nullptr;) {
    SavedImage* const image = *at;
    if (end != 0 && image->suffix >= end) {
      at = &image->next;
      continue;
    }
    if (!out.replace(sorted, image->suffix, image->version, image->update_count, image->data(), bytes)) {
      out.add(image->suffix, image->version, image->update_count, image->data(), bytes);
    }
    ++count;
    *at = image->next;
    image->next = taken;
    taken = image;
    if (last == nullptr) last = image;
  }
  if (out.rows().size() > sorted) out.sort();
  dump.images->give(taken, last, count);
  side_bytes_ -= count * (bytes + kImageBytes);
}

// A range of the slot that begins at `from`, of at most most_rows; what was erased of it since the cut is beyond that.
Status Store::Snapshot::collect(Dump& dump, std::uint32_t slot, std::uint64_t from, std::uint64_t most_rows,
                                SlotRange& out) {
  Table& table = *dump.table;
  const std::uint32_t stripes = store_.slots.stripe_count();
  const std::uint64_t next_slot = store_.slots.first_suffix(slot / stripes + 1);
  const Versions wanted = versions_of(slot);
  SR_RETURN_IF_ERROR(out.read(store_, table, slot, std::max(from, store_.slots.first_suffix(slot / stripes)),
                              {.first_version = wanted.first, .last_version = wanted.last, .most_rows = most_rows}));
  if (table.is_tiered && store_.tables.find(table.schema.id) != dump.table) {
    return {Code::kNotFound, "table " + table.schema.name + " was dropped while it was saved"};
  }
  {
    // Shared suffices: only writers, which have it exclusively, read sides.
    const std::shared_lock lock(store_.stripes[slot % stripes].mutex);
    take_images(dump, slot, out.end(), out);
    Side& side = dump.sides[slot % stripes];
    side.dumped = out.end() == 0 ? next_slot : out.end();
    side.is_done = out.end() == 0 && slot + stripes >= slot_versions_.size();
  }
  note_progress();
  return Status::ok();
}

}  // namespace sparserow
