// Deletion of rows that the SSD may have, and of tables. See tiering.h.
#include <unordered_set>

#include "store/snapshot.h"
#include "store/tiering.h"

namespace sparserow {

// Before the SSD forgets a row: a save that is under way must find it. image: null for a row in memory.
void Store::Tiering::save_before_erasure(const Table& table, std::uint64_t key, const RowImage* image) {
  if (!store_.has_snapshot) return;
  const std::uint64_t hash = row_hash(table.schema.id, key);
  const std::uint32_t stripe = store_.slots.stripe(hash);
  const std::uint64_t suffix = store_.slots.suffix(hash);
  const std::unique_lock lock(store_.stripes[stripe].mutex);
  if (image == nullptr || table.find(stripe, suffix) != RowIndex::kNone) {
    store_.save_before_erasure(table, stripe, suffix);
    return;
  }
  Snapshot* const snapshot = store_.stripes[stripe].snapshot;
  if (Snapshot::Side* const side = snapshot == nullptr ? nullptr : snapshot->side(table, stripe); side != nullptr) {
    snapshot->save(*side, table, stripe, suffix, image->version, image->update_count, image->data);
  }
}

// Whether a conditional deletion spares a row that is in memory.
bool Store::Tiering::is_spared(const Table& table, std::uint32_t stripe, std::uint32_t id,
                               const std::uint64_t* version) {
  if (version == nullptr) return false;
  return table.row(stripe, id).version() != *version || table.stripes[stripe]->slab.meta(id).is_pinned();
}

Result<std::uint64_t> Store::Tiering::erase(Table& table, std::span<const std::uint64_t> keys,
                                            std::span<const std::uint64_t> if_versions) {
  SR_RETURN_IF_ERROR(table.failure());
  const MutexLock lock(evicting_);  // nothing is written meanwhile that was read before
  if (table.is_dropped) return unknown_table(table.schema.id);
  SsdBatch batch;
  std::vector<SsdKey> asked;
  std::vector<std::size_t> asked_at;
  const auto version_at = [&](std::size_t i) { return if_versions.empty() ? nullptr : &if_versions[i]; };
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::uint64_t hash = row_hash(table.schema.id, keys[i]);
    const std::uint32_t stripe = store_.slots.stripe(hash);
    const std::shared_lock stripe_lock(store_.stripes[stripe].mutex);
    const std::uint32_t id = table.find(stripe, store_.slots.suffix(hash));
    if (id != RowIndex::kNone) {
      if (is_spared(table, stripe, id, version_at(i))) continue;
      if (table.stripes[stripe]->slab.meta(id).is_stored()) batch.erase(key_of(table, keys[i]));
    } else if (table.ssd_rows[stripe] > 0) {
      asked.push_back(key_of(table, keys[i]));
      asked_at.push_back(i);
    }
  }
  SsdImages images;
  if (Status status = ssd_->read(asked, images); !status.is_ok()) return lost(table, status);
  std::unordered_set<std::uint64_t> on_ssd;
  for (std::size_t i = 0; i < asked.size(); ++i) {
    if (images.at(i).empty()) continue;
    const std::uint64_t key = keys[asked_at[i]];
    const auto image = table.codec.decode(key, images.at(i));
    if (!image.is_ok()) return lost(table, image.status());
    const std::uint64_t* version = version_at(asked_at[i]);
    if (version != nullptr && image.value().version != *version) continue;
    on_ssd.insert(key);
    batch.erase(asked[i]);
    save_before_erasure(table, key, &image.value());
  }
  for (const std::uint64_t key : keys) save_before_erasure(table, key, nullptr);
  SR_RETURN_IF_ERROR(write_to_ssd(batch));
  std::uint64_t erased = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::uint64_t key = keys[i];
    const std::uint64_t hash = row_hash(table.schema.id, key);
    const std::uint32_t stripe = store_.slots.stripe(hash);
    const std::uint64_t suffix = store_.slots.suffix(hash);
    const std::unique_lock stripe_lock(store_.stripes[stripe].mutex);
    const std::uint32_t id = table.find(stripe, suffix);
    if (id != RowIndex::kNone && is_spared(table, stripe, id, version_at(i))) {
      table.stripes[stripe]->slab.meta(id).set_unstored();
      continue;
    }
    if (version_at(i) != nullptr && id == RowIndex::kNone && !on_ssd.contains(key)) continue;
    token_at(stripe, suffix).fetch_add(1, std::memory_order_release);
    const bool was_in_memory = table.remove(stripe, suffix);
    const bool was_on_ssd = on_ssd.erase(key) > 0;
    if (!was_in_memory && !was_on_ssd) continue;
    if (!was_in_memory) --table.ssd_rows[stripe];
    store_.erased(store_.stripes[stripe], suffix, table.schema.id, key);
    ++erased;
  }
  return erased;
}

Status Store::Tiering::drop(std::uint32_t table_id) {
  const MutexLock lock(evicting_);
  const std::shared_ptr<Table> dropped = store_.tables.find(table_id);
  if (dropped == nullptr) return unknown_table(table_id);
  SR_RETURN_IF_ERROR(ssd_->erase_table(table_id, store_.options.slot_count));
  store_.pools.ssd_index = ssd_->index_bytes();
  static_cast<void>(store_.tables.remove(table_id));
  dropped->is_dropped = true;
  store_.reset_table(table_id);
  return Status::ok();
}

}  // namespace sparserow
