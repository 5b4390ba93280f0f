#include "session/session_cache.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "session/session_state.h"
#include "util/not_allowed.h"

namespace sparserow {
namespace {

constexpr std::uint64_t kOutdated = UINT64_MAX;

}  // namespace

Status SessionCache::add_table(const std::string& name, std::uint32_t table_id, std::uint32_t dim) {
  const MutexLock lock(mutex_);
  std::uint64_t row_of_each = bytes_per_row(dim);
  for (const Table& table : tables_) row_of_each += bytes_per_row(table.dim);
  if (const std::uint64_t least = row_of_each * RowCache::kWays; options_.bytes < least) {
    return not_allowed("cache.bytes", options_.bytes,
                       ">= " + std::to_string(least) + " with table '" + name + "' of dim " + std::to_string(dim));
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
  for (const Table& table : tables_) row_of_each += bytes_per_row(table.dim);
  for (const Table& table : tables_) {
    if (pool_of(table.dim) != nullptr) continue;
    const auto alike =
        std::count_if(tables_.begin(), tables_.end(), [&](const Table& t) { return t.dim == table.dim; });
    const auto rows = options_.bytes / row_of_each * static_cast<std::uint64_t>(alike);
    pools_.push_back(
        std::make_unique<Pool>(Pool{table.dim, RowCache(rows * bytes_per_row(table.dim), table.dim, options_.dtype)}));
  }
}

RowCache* SessionCache::pool_of(std::uint32_t dim) noexcept {
  for (const auto& pool : pools_) {
    if (pool->dim == dim) return &pool->rows;
  }
  return nullptr;
}

void SessionCache::probe(std::span<const TablePull> tables, std::int64_t step, std::vector<Part>& parts,
                         std::uint64_t& drops) {
  const std::int64_t oldest = options_.staleness == 0 ? INT64_MAX : step - options_.staleness;
  const MutexLock lock(mutex_);
  make_pools();
  if (!spare_.empty()) {
    parts = std::move(spare_.back());
    spare_.pop_back();
  }
  parts.resize(tables.size());
  for (std::size_t p = 0; p < tables.size(); ++p) {
    const TablePull& table = tables[p];
    Part& part = parts[p];
    part.hits = part.stale = 0;
    part.dim = table_of(table.table_id) == nullptr ? 0 : table.dim;
    if (part.dim == 0) continue;
    part.found.resize(table.keys.size());
    part.versions.resize(table.keys.size());
    pool_of(table.dim)->probe(table.table_id, table.keys, oldest, part.found.data(), part.versions.data(),
                              table.rows.data());
    for (const Cached found : part.found) {
      part.hits += found == Cached::kHit ? 1 : 0;
      part.stale += found == Cached::kStale ? 1 : 0;
    }
  }
  drops = drops_;
}

// Keys keep their order, so they stay grouped by shard.
void SessionCache::gather(const TablePull& table, const Part& part, Cached what, RowRequest& wanted) {
  wanted.keys.clear();
  wanted.positions.clear();
  wanted.versions.clear();
  wanted.shard_begin.assign(1, 0);
  std::size_t at = 0;
  for (std::size_t shard = 0; shard + 1 < table.shard_begin.size(); ++shard) {
    for (; at < table.shard_begin[shard + 1]; ++at) {
      if (part.found[at] != what) continue;
      wanted.keys.push_back(table.keys[at]);
      wanted.versions.push_back(part.versions[at]);
      wanted.positions.push_back(static_cast<std::uint32_t>(at));
    }
    wanted.shard_begin.push_back(static_cast<std::uint32_t>(wanted.keys.size()));
  }
  wanted.rows.resize(wanted.keys.size() * table.dim);
  if (what == Cached::kMiss) return;
  wanted.changed.resize(wanted.keys.size());
  for (std::size_t i = 0; i < wanted.positions.size(); ++i) {
    std::memcpy(wanted.rows.data() + i * table.dim, table.rows.data() + std::size_t{wanted.positions[i]} * table.dim,
                table.dim * sizeof(float));
  }
}

void SessionCache::ask_for_rest(TablePull table, Part& part, std::vector<TablePull>& asked) {
  const std::size_t misses = table.keys.size() - part.hits - part.stale;
  const auto add = [&asked](TablePull request, std::vector<std::uint64_t>& versions, std::span<std::uint8_t> changed) {
    request.versions = versions;
    if (!changed.empty()) request.known = versions;
    request.changed = changed;
    asked.push_back(request);
  };
  const auto part_of = [&table](RowRequest& wanted) {
    TablePull request = table;
    request.keys = wanted.keys;
    request.shard_begin = wanted.shard_begin;
    request.rows = wanted.rows;
    return request;
  };
  if (misses == table.keys.size()) {
    add(table, part.versions, {});
  } else if (part.stale == table.keys.size()) {
    part.changed.resize(table.keys.size());
    add(table, part.versions, part.changed);
  } else {
    if (misses > 0) {
      gather(table, part, Cached::kMiss, part.misses);
      add(part_of(part.misses), part.misses.versions, {});
    }
    if (part.stale > 0) {
      gather(table, part, Cached::kStale, part.outdated);
      add(part_of(part.outdated), part.outdated.versions, part.outdated.changed);
    }
  }
}

Status SessionCache::pull(SessionState& state, std::span<const TablePull> tables, CallOptions options,
                          bool before_asking) {
  std::vector<Part> parts;
  std::uint64_t drops = 0;
  probe(tables, options.step, parts, drops);
  std::vector<TablePull> asked;
  std::uint64_t plain = 0;
  for (std::size_t p = 0; p < tables.size(); ++p) {
    if (parts[p].dim != 0) {
      ask_for_rest(tables[p], parts[p], asked);
    } else {
      plain += tables[p].keys.size();
      asked.push_back(tables[p]);
    }
  }
  const std::int64_t step = options.step;
  if (!asked.empty()) {
    if (before_asking) SR_RETURN_IF_ERROR(state.wait_for_commit());
    // A prefetch pulls beside a commit, which its rows may not show.
    if (state.is_committing()) drops = kOutdated;
    options.step += options_.staleness;
    SR_RETURN_IF_ERROR(state.pull(asked, options));
    ++state.counters.pulls;
    state.counters.rows_pulled += plain;
  }
  take(state, tables, parts, step, drops);
  const MutexLock lock(mutex_);
  spare_.push_back(std::move(parts));
  return Status::ok();
}

void SessionCache::put(RowCache& pool, const TablePull& table, const RowRequest& wanted, std::int64_t validated) {
  for (std::size_t i = 0; i < wanted.positions.size(); ++i) {
    std::memcpy(table.rows.data() + std::size_t{wanted.positions[i]} * table.dim, wanted.rows.data() + i * table.dim,
                table.dim * sizeof(float));
  }
  pool.put(table.table_id, wanted.keys, wanted.versions.data(), wanted.rows.data(), validated);
}

void SessionCache::take(SessionState& state, std::span<const TablePull> tables, std::span<Part> parts,
                        std::int64_t validated, std::uint64_t drops) {
  const MutexLock lock(mutex_);
  make_pools();
  if (drops != drops_) validated = RowCache::kNever;
  auto& counters = state.counters;
  for (std::size_t p = 0; p < tables.size(); ++p) {
    const TablePull& table = tables[p];
    const Part& part = parts[p];
    if (part.dim == 0) continue;
    RowCache& pool = *pool_of(table.dim);
    const std::size_t n = table.keys.size();
    const std::size_t misses = n - part.hits - part.stale;
    const bool is_whole = misses == n || part.stale == n;
    if (is_whole) pool.put(table.table_id, table.keys, part.versions.data(), table.rows.data(), validated);
    if (!is_whole && misses > 0) put(pool, table, part.misses, validated);
    if (!is_whole && part.stale > 0) put(pool, table, part.outdated, validated);
    const auto& changed = is_whole ? part.changed : part.outdated.changed;
    const auto refreshed =
        part.stale == 0 ? 0 : static_cast<std::uint64_t>(std::count(changed.begin(), changed.end(), 1));
    counters.cache_hits += part.hits;
    counters.cache_misses += misses;
    counters.cache_revalidated += part.stale;
    counters.cache_refreshed += refreshed;
    counters.cache_bytes_saved += (part.hits + part.stale - refreshed) * table.dim * sizeof(float);
    counters.rows_pulled += misses + refreshed;
  }
}

void SessionCache::committed(std::span<const TablePush> tables) {
  if (options_.own_commits == OwnCommits::kBounded) return;
  for (const TablePush& table : tables) changed(table.table_id, table.keys);
}

void SessionCache::changed(std::uint32_t table_id, std::span<const std::uint64_t> keys) {
  const MutexLock lock(mutex_);
  const Table* table = table_of(table_id);
  if (table == nullptr) return;
  ++drops_;
  if (RowCache* pool = pool_of(table->dim)) pool->drop(table_id, keys);
}

}  // namespace sparserow
