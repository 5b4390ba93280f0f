#include "session/session_cache.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "session/session_state.h"

namespace sparserow {
namespace {

constexpr std::uint64_t kOutdated = UINT64_MAX;

// The request for what `found` does not say to be here. Keys keep their order, so they stay grouped by shard.
template <class Part>
void ask_for_rest(const rpc::TablePull& table, Part& part) {
  part.keys.clear();
  part.positions.clear();
  part.shard_begin.assign(1, 0);
  std::size_t at = 0;
  for (std::size_t shard = 0; shard + 1 < table.shard_begin.size(); ++shard) {
    for (; at < table.shard_begin[shard + 1]; ++at) {
      if (part.found[at] == Cached::kHit) continue;
      part.versions[part.keys.size()] = part.versions[at];
      part.keys.push_back(table.keys[at]);
      part.positions.push_back(static_cast<std::uint32_t>(at));
    }
    part.shard_begin.push_back(static_cast<std::uint32_t>(part.keys.size()));
  }
  part.rows.resize(part.keys.size() * table.dim);
  if (part.stale == 0) return;
  for (std::size_t i = 0; i < part.positions.size(); ++i) {
    const std::size_t from = part.positions[i];
    if (part.found[from] == Cached::kMiss) continue;
    std::memcpy(part.rows.data() + i * table.dim, table.rows + from * table.dim, table.dim * sizeof(float));
  }
}

}  // namespace

Status SessionCache::add_table(const std::string& name, std::uint32_t table_id, std::uint32_t dim) {
  const std::lock_guard lock(mutex_);
  std::uint64_t row_of_each = RowCache::bytes_per_row(dim);
  for (const Table& table : tables_) row_of_each += RowCache::bytes_per_row(table.dim);
  if (const std::uint64_t least = row_of_each * RowCache::kWays; options_.bytes < least) {
    return {Code::kInvalidArgument, "cache.bytes: " + std::to_string(options_.bytes) +
                                        " is not allowed; allowed with table '" + name + "' of dim " +
                                        std::to_string(dim) + ": >= " + std::to_string(least)};
  }
  tables_.push_back({table_id, dim});
  pools_.clear();
  return Status::ok();
}

const SessionCache::Table* SessionCache::table_of(std::uint32_t table_id) const noexcept {
  const auto found =
      std::find_if(tables_.begin(), tables_.end(), [table_id](const Table& one) { return one.id == table_id; });
  return found == tables_.end() ? nullptr : &*found;
}

void SessionCache::make_pools() {
  if (!pools_.empty()) return;
  std::uint64_t row_of_each = 0;
  for (const Table& table : tables_) row_of_each += RowCache::bytes_per_row(table.dim);
  for (const Table& table : tables_) {
    if (pool_of(table.dim) != nullptr) continue;
    const auto alike =
        std::count_if(tables_.begin(), tables_.end(), [&](const Table& t) { return t.dim == table.dim; });
    const auto rows = options_.bytes / row_of_each * static_cast<std::uint64_t>(alike);
    pools_.push_back(
        std::make_unique<Pool>(Pool{table.dim, RowCache(rows * RowCache::bytes_per_row(table.dim), table.dim)}));
  }
}

RowCache* SessionCache::pool_of(std::uint32_t dim) noexcept {
  for (const auto& pool : pools_) {
    if (pool->dim == dim) return &pool->rows;
  }
  return nullptr;
}

std::uint64_t SessionCache::probe(std::span<const rpc::TablePull> tables, std::int64_t step, std::vector<Part>& parts) {
  const std::int64_t oldest = options_.staleness == 0 ? INT64_MAX : step - options_.staleness;
  const std::lock_guard lock(mutex_);
  make_pools();
  if (!spare_.empty()) {
    parts = std::move(spare_.back());
    spare_.pop_back();
  }
  parts.resize(tables.size());
  for (std::size_t p = 0; p < tables.size(); ++p) {
    const rpc::TablePull& table = tables[p];
    Part& part = parts[p];
    part.hits = part.stale = 0;
    part.dim = table_of(table.table_id) == nullptr ? 0 : table.dim;
    if (part.dim == 0) continue;
    part.found.resize(table.keys.size());
    part.versions.resize(table.keys.size());
    pool_of(table.dim)->probe(table.table_id, table.keys, oldest, part.found.data(), part.versions.data(), table.rows);
    for (const Cached found : part.found) {
      part.hits += found == Cached::kHit ? 1 : 0;
      part.stale += found == Cached::kStale ? 1 : 0;
    }
  }
  return expiries_;
}

Status SessionCache::pull(SessionState& state, std::span<const rpc::TablePull> tables, rpc::CallOptions options,
                          bool before_asking) {
  std::vector<Part> parts;
  std::uint64_t expiries = probe(tables, options.step, parts);
  std::vector<rpc::TablePull> asked;
  std::uint64_t plain = 0;
  for (std::size_t p = 0; p < tables.size(); ++p) {
    Part& part = parts[p];
    rpc::TablePull table = tables[p];
    if (part.dim == 0) {
      plain += table.keys.size();
      asked.push_back(table);
      continue;
    }
    if (part.hits == table.keys.size()) continue;
    if (part.hits > 0) {
      ask_for_rest(table, part);
      table.keys = part.keys;
      table.shard_begin = part.shard_begin;
      table.rows = part.rows.data();
    }
    table.versions = part.versions.data();
    if (part.stale > 0) {
      part.changed.resize(table.keys.size());
      table.known = part.versions.data();
      table.changed = part.changed.data();
    }
    asked.push_back(table);
  }
  const std::int64_t step = options.step;
  if (!asked.empty()) {
    if (before_asking) SR_RETURN_IF_ERROR(state.wait_for_commit());
    // A prefetch pulls beside a commit, which its rows may not show.
    if (state.is_committing()) expiries = kOutdated;
    options.step += options_.staleness;
    SR_RETURN_IF_ERROR(state.pull(asked, options));
    ++state.counters.pulls;
    state.counters.rows_pulled += plain;
  }
  take(state, tables, parts, step, expiries);
  const std::lock_guard lock(mutex_);
  spare_.push_back(std::move(parts));
  return Status::ok();
}

void SessionCache::take(SessionState& state, std::span<const rpc::TablePull> tables, std::span<Part> parts,
                        std::int64_t validated, std::uint64_t expiries) {
  const std::lock_guard lock(mutex_);
  make_pools();
  if (expiries != expiries_) validated = RowCache::kNever;
  for (std::size_t p = 0; p < tables.size(); ++p) {
    const rpc::TablePull& table = tables[p];
    const Part& part = parts[p];
    if (part.dim == 0) continue;
    const std::size_t n = table.keys.size();
    const std::size_t missed = n - part.hits - part.stale;
    const std::uint64_t refreshed =
        part.stale == 0 ? 0
                        : static_cast<std::uint64_t>(std::count(part.changed.begin(), part.changed.end(), 1)) - missed;
    auto& counters = state.counters;
    counters.cache_hits += part.hits;
    counters.cache_misses += missed;
    counters.cache_revalidated += part.stale;
    counters.cache_refreshed += refreshed;
    counters.cache_bytes_saved += (part.hits + part.stale - refreshed) * table.dim * sizeof(float);
    counters.rows_pulled += missed + refreshed;
    if (part.hits == n) continue;
    RowCache& pool = *pool_of(table.dim);
    if (part.hits == 0) {
      pool.put(table.table_id, table.keys, part.versions.data(), table.rows, validated);
      continue;
    }
    for (std::size_t i = 0; i < part.positions.size(); ++i) {
      std::memcpy(table.rows + std::size_t{part.positions[i]} * table.dim, part.rows.data() + i * table.dim,
                  table.dim * sizeof(float));
    }
    pool.put(table.table_id, part.keys, part.versions.data(), part.rows.data(), validated);
  }
}

void SessionCache::committed(std::span<const rpc::TablePush> tables) {
  if (options_.own_commits == OwnCommits::kBounded) return;
  for (const rpc::TablePush& table : tables) changed(table.table_id, table.keys);
}

void SessionCache::changed(std::uint32_t table_id, std::span<const std::uint64_t> keys) {
  const std::lock_guard lock(mutex_);
  const Table* table = table_of(table_id);
  if (table == nullptr) return;
  ++expiries_;
  if (RowCache* pool = pool_of(table->dim)) pool->expire(table_id, keys);
}

}  // namespace sparserow
