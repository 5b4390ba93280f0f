#include "session/device_directory.h"

#include <algorithm>

#include "util/hash.h"

namespace sparserow {
namespace {

constexpr std::uint8_t kMostUses = 255;
constexpr std::uint8_t kHalveEvery = 64;  // replacements of a set
constexpr std::size_t kTogether = 32;     // rows whose memory is fetched ahead at a time
constexpr std::size_t kLine = 64;         // bytes

}  // namespace

void DeviceDirectory::add_table(std::uint32_t table_id, std::uint32_t dim) {
  const MutexLock lock(mutex_);
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
    pool.sets.resize(std::min<std::uint64_t>(rows * alike, INT32_MAX) / kWays);
    pool.rows.resize(pool.sets.size() * kWays);
    pools_.push_back(std::move(pool));
  }
  ++generation_;
}

std::vector<DeviceDirectory::Store> DeviceDirectory::stores() const {
  const MutexLock lock(mutex_);
  std::vector<Store> out;
  for (const Pool& pool : pools_) out.push_back({pool.dim, pool.rows.size()});
  return out;
}

std::uint64_t DeviceDirectory::generation() const {
  const MutexLock lock(mutex_);
  return generation_;
}

DeviceDirectory::Pool* DeviceDirectory::pool_of(std::uint32_t table_id) noexcept {
  const auto table =
      std::find_if(tables_.begin(), tables_.end(), [table_id](const Table& one) { return one.id == table_id; });
  if (table == tables_.end()) return nullptr;
  const auto pool =
      std::find_if(pools_.begin(), pools_.end(), [&table](const Pool& one) { return one.dim == table->dim; });
  return pool == pools_.end() || pool->sets.empty() ? nullptr : &*pool;
}

DeviceDirectory::Spot DeviceDirectory::spot_of(const Pool& pool, std::uint32_t table_id, std::uint64_t key) noexcept {
  const std::uint64_t hash = row_hash(table_id, key);
  return {((hash >> 32) * pool.sets.size()) >> 32, static_cast<std::uint32_t>(hash) | 1u};
}

std::uint32_t DeviceDirectory::way_of(const Pool& pool, Spot spot, std::uint32_t table_id, std::uint64_t key) noexcept {
  for (std::uint32_t way = 0; way < kWays; ++way) {
    if (pool.sets[spot.set].tags[way] != spot.tag) continue;
    const Row& row = pool.rows[spot.set * kWays + way];
    if (row.key == key && row.table_id == table_id) return way;
  }
  return kWays;
}

std::uint32_t DeviceDirectory::make_room(Set& set) const noexcept {
  const auto age_of = [&](std::uint32_t way)
                          SR_REQUIRES(mutex_) { return static_cast<std::uint16_t>(plan_bits() - set.used[way]); };
  std::uint32_t best = kWays;
  for (std::uint32_t way = 0; way < kWays; ++way) {
    if (set.tags[way] == 0) return way;
    if (set.used[way] == plan_bits()) continue;
    if (best == kWays || set.uses[way] < set.uses[best] ||
        (set.uses[way] == set.uses[best] && age_of(way) > age_of(best))) {
      best = way;
    }
  }
  if (best < kWays && ++set.replaced == kHalveEvery) {
    set.replaced = 0;
    for (std::uint8_t& uses : set.uses) uses /= 2;
  }
  return best;
}

struct DeviceDirectory::Planning::Unknown {
  std::int32_t row;
  Spot spot;
  XXH128_hash_t hash;
};

DeviceDirectory::Planning::Planning(DeviceDirectory& directory) : directory_(directory), lock_(directory.mutex_) {
  ++directory_.plan_;
}

DeviceDirectory::Plan DeviceDirectory::Planning::table(std::uint32_t table_id, std::span<const std::uint64_t> keys,
                                                       std::span<const std::uint32_t> indexes, const float* rows,
                                                       std::span<const std::uint8_t> skips) {
  directory_.mutex_.assume_locked();  // lock_ has it
  Plan plan;
  plan.generation = directory_.generation_;
  plan.dtype = directory_.dtype_;
  Pool* pool = directory_.pool_of(table_id);
  const auto is_skipped = [&skips](std::size_t i) { return !skips.empty() && skips[i] != 0; };
  if (pool == nullptr) {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (!is_skipped(i)) plan.sent.push_back(static_cast<std::int32_t>(i));
    }
    return plan;
  }
  std::vector<Unknown> unknown;
  std::vector<std::byte> converted(row_bytes(plan.dtype, pool->dim));
  std::array<Spot, kTogether> spots;
  for (std::size_t begin = 0; begin < keys.size(); begin += kTogether) {
    const std::size_t count = std::min(kTogether, keys.size() - begin);
    for (std::size_t j = 0; j < count; ++j) {
      spots[j] = spot_of(*pool, table_id, keys[begin + j]);
      __builtin_prefetch(&pool->sets[spots[j].set]);
      const auto* row = reinterpret_cast<const std::byte*>(rows + std::size_t{indexes[begin + j]} * pool->dim);
      for (std::size_t at = 0; at < pool->dim * sizeof(float); at += kLine) __builtin_prefetch(row + at);
    }
    for (std::size_t j = 0; j < count; ++j) {
      const auto& tags = pool->sets[spots[j].set].tags;
      const auto way = static_cast<std::size_t>(std::find(tags.begin(), tags.end(), spots[j].tag) - tags.begin());
      if (way < kWays) __builtin_prefetch(&pool->rows[spots[j].set * kWays + way]);
    }
    for (std::size_t j = 0; j < count; ++j) {
      const std::size_t i = begin + j;
      if (is_skipped(i)) continue;
      const auto row = static_cast<std::int32_t>(i);
      convert_from_float(plan.dtype, rows + std::size_t{indexes[i]} * pool->dim, converted.data(), pool->dim);
      const XXH128_hash_t hash = XXH3_128bits(converted.data(), converted.size());
      Set& set = pool->sets[spots[j].set];
      const std::uint32_t way = way_of(*pool, spots[j], table_id, keys[i]);
      if (way == kWays) {
        unknown.push_back({row, spots[j], hash});
        plan.sent.push_back(row);
        continue;
      }
      const std::size_t place = spots[j].set * kWays + way;
      Row& known = pool->rows[place];
      const bool is_same = known.hash_low == hash.low64 && known.hash_high == hash.high64;
      (is_same ? plan.kept : plan.put).push_back(row);
      (is_same ? plan.kept_at : plan.put_at).push_back(static_cast<std::int32_t>(place));
      if (!is_same) plan.sent.push_back(row);
      known.hash_low = hash.low64;
      known.hash_high = hash.high64;
      set.used[way] = directory_.plan_bits();
      set.uses[way] = static_cast<std::uint8_t>(std::min<unsigned>(set.uses[way] + 1u, kMostUses));
    }
  }
  for (const auto& [row, spot, hash] : unknown) {
    Set& set = pool->sets[spot.set];
    const std::uint32_t way = directory_.make_room(set);
    if (way == kWays) continue;
    const std::size_t place = spot.set * kWays + way;
    pool->rows[place] = {keys[static_cast<std::size_t>(row)], hash.low64, hash.high64, table_id};
    set.tags[way] = spot.tag;
    set.used[way] = directory_.plan_bits();
    set.uses[way] = 0;
    plan.put.push_back(row);
    plan.put_at.push_back(static_cast<std::int32_t>(place));
  }
  return plan;
}

}  // namespace sparserow
