// What a change log finds in the rows themselves.
#include <algorithm>
#include <cstring>
#include <utility>

#include "store/changes/change_log.h"
#include "store/slot_range.h"
#include "store/store_impl.h"
#include "store/tiering.h"
#include "util/hash.h"

namespace sparserow {
namespace {

constexpr std::uint64_t kLeastLooked = 4096;  // rows at a time, for few of them may be newer

// From the stamp of a table whose policy goes by seconds.
std::int64_t stamped_age_ms(const Table& table, const std::byte* data, std::uint64_t now_seconds) {
  const RowPolicy& policy = table.schema.policy;
  if (!policy.stamps_seconds()) return -1;
  std::uint32_t stamp = 0;
  const std::size_t before = policy.stamps_steps() ? sizeof stamp : 0;
  std::memcpy(&stamp, data + table.layout.stamp_offset + before, sizeof stamp);
  return std::int64_t{static_cast<std::uint32_t>(now_seconds) - stamp} * 1000;
}

}  // namespace

Status ChangeLog::find_rows(SlotChanges& changes, const std::vector<std::uint32_t>& wanted,
                            std::uint64_t most_bytes) const {
  const Store::Impl& store = *store_->impl_;
  const SlotOrder& slots = store.slots;
  const std::uint32_t stripe = changes.slot % slots.stripe_count();
  const std::uint64_t first = slots.first_suffix(changes.slot / slots.stripe_count());
  SlotRange::Wanted newer{.first_version = changes.since + 1, .with_data = false};
  SlotRange range;
  std::uint64_t bytes = 0;
  for (const auto& table : wanted.empty() ? store.tables.all() : store.tables.named(wanted)) {
    const std::uint32_t id = table->schema.id;
    if (id < changes.from.table_id || !store.has_rows(*table, stripe)) continue;
    if (changes.to && id > changes.to->table_id) break;
    const std::uint64_t end = changes.to && id == changes.to->table_id ? changes.to->suffix : UINT64_MAX;
    const std::uint64_t row_bytes = bytes_of_changed_row(table->schema);
    std::uint64_t from = std::max(first, id == changes.from.table_id ? changes.from.suffix : 0);
    do {
      newer.most_rows = 1 + (most_bytes - std::min(bytes, most_bytes)) / row_bytes;
      if (changes.since > 0) newer.most_rows = std::max(newer.most_rows, kLeastLooked);
      SR_RETURN_IF_ERROR(range.read(store, *table, changes.slot, from, newer));
      for (const SlotRange::Row& row : range.rows()) {
        if (row.suffix >= end) return Status::ok();
        bytes += row_bytes;
        if (bytes > most_bytes && !changes.written.empty()) {
          changes.to = SlotPlace{changes.until & kSequence, id, row.suffix};
          return Status::ok();
        }
        changes.written.push_back({key_of_hash(id, slots.hash(stripe, row.suffix)), id, 0});
      }
      from = range.end();
    } while (from != 0 && from < end);
  }
  return Status::ok();
}

Result<std::vector<ChangedRow>> ChangeLog::rows_of(std::uint32_t slot, const SlotPlace& from,
                                                   const SlotPlace& to) const {
  SlotChanges changes{.slot = slot, .from = from, .to = to};
  SR_RETURN_IF_ERROR(find_rows(changes, {}, UINT64_MAX));
  return std::move(changes.written);
}

Result<RowFacts> ChangeLog::facts(std::uint32_t table_id, std::uint64_t key) const {
  const Store::Impl& store = *store_->impl_;
  const std::shared_ptr<Table> table = store.tables.find(table_id);
  if (table == nullptr) return unknown_table(table_id);
  const std::uint64_t hash = row_hash(table_id, key);
  const std::uint32_t stripe = store.slots.stripe(hash);
  const std::uint64_t suffix = store.slots.suffix(hash);
  RowFacts facts;
  std::int64_t logged_age_ms = -1;
  bool may_be_on_ssd = false;
  const auto take = [&](std::uint64_t version, std::uint32_t updates, const std::byte* data) {
    facts.exists = true;
    facts.version = version;
    facts.update_count = updates;
    facts.age_ms = stamped_age_ms(*table, data, store.unix_seconds());
  };
  {
    const std::shared_lock lock(store.stripes[stripe].mutex);
    if (const std::uint32_t id = table->find(stripe, suffix); id != RowIndex::kNone) {
      const RowRef row = table->row(stripe, id);
      take(row.version(), row.update_count(), row.weights());
      facts.is_in_memory = true;
    }
    may_be_on_ssd = table->ssd_rows[stripe].load(std::memory_order_relaxed) > 0;
    if (const StripeLog& log = store.stripes[stripe].log; log.is_open()) {
      // A row is noted at its first change since the last read, so its last change may be a little younger, never older
      // than what the slot noted last before it.
      bool is_noted = false;
      const std::uint32_t in_stripe = store.slots.slot_in_stripe(suffix);
      log.visit_written([&](std::uint32_t noted, const Change& change) {
        if (noted != in_stripe || change.sequence <= log.floor(in_stripe)) return;
        is_noted |= change.key == key && change.table_id == table_id;
        if (is_noted && (!facts.exists || change.sequence <= (facts.version & kSequence))) {
          logged_age_ms = std::uint32_t{wall_ms() - change.at_ms};
        }
      });
    }
  }
  if (!facts.exists && may_be_on_ssd) {
    SR_RETURN_IF_ERROR(store.tiering->read_stored(
        *table, key, [&](const RowImage& image) { take(image.version, image.update_count, image.data); }));
  }
  if (facts.exists && logged_age_ms >= 0) facts.age_ms = logged_age_ms;
  return facts;
}

}  // namespace sparserow
