#include "session/device_directory.h"

#include <algorithm>

#include "util/hash.h"

namespace sparserow {
namespace {

constexpr std::uint8_t kMostUses = 255;
constexpr std::uint8_t kHalveEvery = 64;  // replacements of a set

}  // namespace

void DeviceDirectory::add_table(std::uint32_t table_id, std::uint32_t dim) {
  const std::lock_guard lock(mutex_);
  tables_.push_back({table_id, dim});
  make_pools();
}

void DeviceDirectory::make_pools() {
  std::uint64_t row_of_each = 0;
  for (const Table& table : tables_) row_of_each += row_bytes(dtype_, table.dim);
  const std::uint64_t rows = bytes_ / row_of_each;
  pools_.clear();
  for (const Table& table : tables_) {
    const auto is_alike = [&table](const auto& other) { return other.dim == table.dim; };
    if (std::any_of(pools_.begin(), pools_.end(), is_alike)) continue;
    const auto alike = static_cast<std::uint64_t>(std::count_if(tables_.begin(), tables_.end(), is_alike));
    Pool pool;
    pool.dim = table.dim;
    pool.sets = std::min<std::uint64_t>(rows * alike, INT32_MAX) / kWays;
    pool.entries.resize(pool.sets * kWays);
    pool.replaced.resize(pool.sets);
    pools_.push_back(std::move(pool));
  }
  ++generation_;
}

std::vector<DeviceDirectory::Store> DeviceDirectory::stores() const {
  const std::lock_guard lock(mutex_);
  std::vector<Store> out;
  for (const Pool& pool : pools_) out.push_back({pool.dim, pool.sets * kWays});
  return out;
}

std::uint64_t DeviceDirectory::generation() const {
  const std::lock_guard lock(mutex_);
  return generation_;
}

DeviceDirectory::Pool* DeviceDirectory::pool_of(std::uint32_t table_id) noexcept {
  const auto table =
      std::find_if(tables_.begin(), tables_.end(), [table_id](const Table& one) { return one.id == table_id; });
  if (table == tables_.end()) return nullptr;
  const auto pool =
      std::find_if(pools_.begin(), pools_.end(), [&table](const Pool& one) { return one.dim == table->dim; });
  return pool == pools_.end() || pool->sets == 0 ? nullptr : &*pool;
}

std::uint64_t DeviceDirectory::set_of(const Pool& pool, std::uint32_t table_id, std::uint64_t key) noexcept {
  return ((row_hash(table_id, key) >> 32) * pool.sets) >> 32;
}

std::int64_t DeviceDirectory::make_room(Pool& pool, std::uint64_t set) const noexcept {
  std::int64_t best = -1;
  for (std::uint64_t place = set * kWays; place < (set + 1) * kWays; ++place) {
    const Entry& entry = pool.entries[place];
    if (entry.table_id == 0) return static_cast<std::int64_t>(place);
    if (entry.used == plan_) continue;
    const Entry* other = best < 0 ? nullptr : &pool.entries[static_cast<std::size_t>(best)];
    if (other == nullptr || entry.uses < other->uses || (entry.uses == other->uses && entry.used < other->used)) {
      best = static_cast<std::int64_t>(place);
    }
  }
  if (best >= 0 && ++pool.replaced[set] == kHalveEvery) {
    pool.replaced[set] = 0;
    for (std::uint64_t place = set * kWays; place < (set + 1) * kWays; ++place) pool.entries[place].uses /= 2;
  }
  return best;
}

DeviceDirectory::Planning::Planning(DeviceDirectory& directory) : directory_(directory), lock_(directory.mutex_) {
  ++directory_.plan_;
}

DeviceDirectory::Plan DeviceDirectory::Planning::table(std::uint32_t table_id, std::span<const std::uint64_t> keys,
                                                       std::span<const std::uint32_t> indexes, const float* rows,
                                                       std::span<const std::uint8_t> skips) {
  Plan plan;
  plan.generation = directory_.generation_;
  plan.dtype = directory_.dtype_;
  Pool* pool = directory_.pool_of(table_id);
  const auto is_skipped = [&skips](std::size_t i) { return !skips.empty() && skips[i] != 0; };
  std::vector<std::int32_t> unknown;
  std::vector<XXH128_hash_t> hashes(pool == nullptr ? 0 : keys.size());
  std::vector<std::byte> converted(pool == nullptr ? 0 : row_bytes(plan.dtype, pool->dim));
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const auto row = static_cast<std::int32_t>(i);
    if (is_skipped(i)) continue;
    if (pool == nullptr) {
      plan.sent.push_back(row);
      continue;
    }
    convert_from_float(plan.dtype, rows + std::size_t{indexes[i]} * pool->dim, converted.data(), pool->dim);
    hashes[i] = XXH3_128bits(converted.data(), converted.size());
    Entry* const first = pool->entries.data() + set_of(*pool, table_id, keys[i]) * kWays;
    Entry* const entry = std::find_if(first, first + kWays,
                                      [&](const Entry& one) { return one.key == keys[i] && one.table_id == table_id; });
    if (entry == first + kWays) {
      unknown.push_back(row);
      plan.sent.push_back(row);
      continue;
    }
    const auto place = static_cast<std::int32_t>(entry - pool->entries.data());
    const bool is_same = entry->hash_low == hashes[i].low64 && entry->hash_high == hashes[i].high64;
    (is_same ? plan.kept : plan.put).push_back(row);
    (is_same ? plan.kept_at : plan.put_at).push_back(place);
    if (!is_same) plan.sent.push_back(row);
    entry->hash_low = hashes[i].low64;
    entry->hash_high = hashes[i].high64;
    entry->used = directory_.plan_;
    entry->uses = static_cast<std::uint8_t>(std::min<unsigned>(entry->uses + 1u, kMostUses));
  }
  for (const std::int32_t row : unknown) {
    const auto i = static_cast<std::size_t>(row);
    const std::int64_t place = directory_.make_room(*pool, set_of(*pool, table_id, keys[i]));
    if (place < 0) continue;
    pool->entries[static_cast<std::size_t>(place)] = {keys[i],  hashes[i].low64,  hashes[i].high64,
                                                      table_id, directory_.plan_, 0};
    plan.put.push_back(row);
    plan.put_at.push_back(static_cast<std::int32_t>(place));
  }
  return plan;
}

}  // namespace sparserow
