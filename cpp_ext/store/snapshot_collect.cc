// Collects the rows of a slot or a stripe as they were at the cut, from memory, saved images and the SSD. See
// snapshot.h.
#include <algorithm>
#include <cstring>

#include "store/snapshot.h"
#include "store/tiering.h"

namespace sparserow {
namespace {

constexpr std::size_t kBytesUnderLock = 256u << 10;  // about so many are copied before the stripe is let go
constexpr std::size_t kFetchedAhead = 4;             // rows

}  // namespace

void Store::Snapshot::add(Slot& slot, const Table& table, std::uint64_t suffix, std::uint64_t version,
                          std::uint32_t update_count, const std::byte* data) const {
  slot.rows.push_back({suffix, version, update_count, slot.data.size()});
  slot.data.insert(slot.data.end(), data, data + table.layout.data_bytes);
}

// Rows in memory that did not change since the cut, and saved images of those that did.
void Store::Snapshot::collect_memory(Dump& dump, std::uint32_t slot, Slot& out, bool& may_be_on_ssd) {
  const Table& table = *dump.table;
  const SlotOrder& slots = store_.slots;
  const std::uint32_t stripe = slot % slots.stripe_count();
  const std::uint32_t in_stripe = slot / slots.stripe_count();
  const std::size_t fetched = std::min(table.layout.data_bytes + RowLayout::kHeadBytes, kMaxFetched);
  std::uint64_t suffix = slots.first_suffix(in_stripe);
  for (bool is_end = false; !is_end;) {
    const std::shared_lock lock(store_.stripes[stripe].mutex);
    const std::size_t most = out.data.size() + kBytesUnderLock;
    may_be_on_ssd = may_be_on_ssd || table.ssd_rows[stripe].load(std::memory_order_relaxed) > 0;
    const TableStripe* stripe_rows = table.stripes[stripe].get();
    is_end = stripe_rows == nullptr;
    while (!is_end && out.data.size() < most) {
      out.entries.clear();  // a segment has rows of other slots too
      const std::uint64_t next = stripe_rows->index.visit_range(suffix, [&](std::uint64_t at, std::uint32_t id) {
        if (at >= suffix && slots.slot_in_stripe(at) == in_stripe) out.entries.push_back({at, id});
      });
      for (std::size_t i = 0; i < out.entries.size(); ++i) {
        if (i + kFetchedAhead < out.entries.size()) {
          fetch_lines(stripe_rows->slab.data(out.entries[i + kFetchedAhead].row), fetched);
        }
        const RowRef row = stripe_rows->slab.at(out.entries[i].row);
        if (!is_wanted(slot, row.version())) continue;
        add(out, table, out.entries[i].suffix, row.version(), row.update_count(), row.weights());
      }
      suffix = next;
      is_end = suffix == 0 || slots.slot_in_stripe(suffix) != in_stripe;
    }
    // A row of a store with an SSD may move between the tiers after this look, so the rows are handed out at the end.
    if (!table.is_tiered) take_images(dump, slot, suffix, is_end, out);
  }
}

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
bool Store::Snapshot::collect_stripe(Dump& dump, std::uint32_t stripe, Slot& out) {
  const Table& table = *dump.table;
  const SlotOrder& slots = store_.slots;
  const std::uint32_t stripes = slots.stripe_count();
  const auto per_stripe = static_cast<std::uint32_t>(slot_versions_.size()) / stripes;
  const std::shared_lock lock(store_.stripes[stripe].mutex);
  if (table.ssd_rows[stripe] > 0) return false;
  if (const TableStripe* rows = table.stripes[stripe].get(); rows != nullptr) {
    for (std::uint64_t suffix = 0;;) {
      out.entries.clear();
      const std::uint64_t next =
          rows->index.visit_range(suffix, [&](std::uint64_t at, std::uint32_t id) { out.entries.push_back({at, id}); });
      for (const RowIndex::Entry& entry : out.entries) {
        const RowRef row = rows->slab.at(entry.row);
        const std::uint32_t slot = slots.slot_in_stripe(entry.suffix) * stripes + stripe;
        if (is_wanted(slot, row.version()))
          add(out, table, entry.suffix, row.version(), row.update_count(), row.weights());
      }
      if (next == 0) break;
      suffix = next;
    }
  }
  const bool has_images = !dump.sides[stripe].by_slot.empty();
  for (std::uint32_t at = has_images ? 0 : per_stripe - 1; at < per_stripe; ++at) {
    take_images(dump, at * stripes + stripe, 0, true, out);
  }
  return true;
}

// Takes the images of suffixes before end_suffix (of the whole slot, at its end); these suffixes count as handed out
// from now on. The caller shares the stripe's lock: only writers, which have it exclusively, read sides.
void Store::Snapshot::take_images(Dump& dump, std::uint32_t slot, std::uint64_t end_suffix, bool is_end, Slot& out) {
  const SlotOrder& slots = store_.slots;
  const std::uint32_t stripe = slot % slots.stripe_count();
  const std::uint32_t in_stripe = slot / slots.stripe_count();
  Side& side = dump.sides[stripe];
  SavedImage* taken = nullptr;
  SavedImage* last = nullptr;
  std::size_t count = 0;
  for (SavedImage** at = side.by_slot.empty() ? &taken : &side.by_slot[in_stripe]; *at != nullptr;) {
    SavedImage* const image = *at;
    if (!is_end && image->suffix >= end_suffix) {
      at = &image->next;
      continue;
    }
    const auto known = out.by_path.find(image->suffix);
    if (known == out.by_path.end()) {
      add(out, *dump.table, image->suffix, image->version, image->update_count, image->data());
    } else {  // read from the SSD, which may have an older one
      Row& row = out.rows[known->second];
      row.version = image->version;
      row.update_count = image->update_count;
      std::memcpy(out.data.data() + row.at, image->data(), dump.table->layout.data_bytes);
    }
    ++count;
    *at = image->next;
    image->next = taken;
    taken = image;
    if (last == nullptr) last = image;
  }
  dump.images->give(taken, last, count);
  side.dumped = is_end ? slots.first_suffix(in_stripe + 1) : end_suffix;
  side.is_done = is_end && slot + slots.stripe_count() >= slot_versions_.size();
  side_bytes_ -= count * (dump.table->layout.data_bytes + kImageBytes);
}

Status Store::Snapshot::collect(Dump& dump, std::uint32_t slot, Slot& out) {
  bool may_be_on_ssd = false;
  collect_memory(dump, slot, out, may_be_on_ssd);
  Table& table = *dump.table;
  if (table.is_tiered) {
    for (std::size_t i = 0; i < out.rows.size(); ++i) out.by_path.emplace(out.rows[i].suffix, i);
    if (may_be_on_ssd) {
      if (store_.tables.find(table.schema.id) != dump.table) {
        return {Code::kNotFound, "table " + table.schema.name + " was dropped while it was saved"};
      }
      const std::uint64_t first = store_.slots.first_suffix(slot / store_.slots.stripe_count());
      SR_RETURN_IF_ERROR(
          store_.tiering->visit_slot(table, slot, first, [&](std::uint64_t suffix, const RowImage& image) {
            if (is_wanted(slot, image.version) && out.by_path.emplace(suffix, out.rows.size()).second)
              add(out, table, suffix, image.version, image.update_count, image.data);
            return true;
          }));
    }
    const std::unique_lock lock(store_.stripes[slot % store_.slots.stripe_count()].mutex);
    take_images(dump, slot, 0, true, out);
  }
  std::sort(out.rows.begin(), out.rows.end(),
            [](const Row& left, const Row& right) { return left.suffix < right.suffix; });
  note_progress();
  return Status::ok();
}

}  // namespace sparserow
