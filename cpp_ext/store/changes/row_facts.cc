#include <cstring>

#include "store/changes/change_log.h"
#include "store/store_impl.h"
#include "store/tiering.h"
#include "util/hash.h"

namespace sparserow {
namespace {

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
        if (is_noted && (!facts.exists || change.sequence <= (facts.version & (~std::uint64_t{0} >> 16)))) {
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
