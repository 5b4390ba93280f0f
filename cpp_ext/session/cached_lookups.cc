#include "session/cached_lookups.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "util/not_allowed.h"

namespace sparserow {

Result<std::shared_ptr<CachedLookups>> CachedLookups::create(std::shared_ptr<RowReader> shards,
                                                             std::span<const CachedTable> tables,
                                                             const CachedLookupsOptions& options) {
  if (options.ttl.count() < 1) {
    return not_allowed("cache.ttl_ms", options.ttl.count(), ">= 1");
  }
  std::uint64_t row_of_each = 0;
  for (const CachedTable& table : tables) row_of_each += RowCache::bytes_per_row(table.dim);
  if (const std::uint64_t least = row_of_each * RowCache::kWays; options.capacity_bytes < least) {
    return not_allowed("cache.capacity_bytes", options.capacity_bytes,
                       ">= " + std::to_string(least) + " for these tables");
  }
  std::shared_ptr<CachedLookups> made(new CachedLookups(std::move(shards), options));
  for (const CachedTable& table : tables) {
    const std::uint64_t rows = options.capacity_bytes / row_of_each;
    made->tables_.try_emplace(table.id, table.dim, RowCache(rows * RowCache::bytes_per_row(table.dim), table.dim));
  }
  return made;
}

std::int64_t CachedLookups::now_ms() const {
  if (options_.clock_ms) return options_.clock_ms();
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

// Requests that ask for more than rows go by.
bool CachedLookups::is_cached(const TablePull& table) const {
  const auto found = tables_.find(table.table_id);
  return found != tables_.end() && found->second.first == table.dim && table.versions.empty() && table.found.empty() &&
         table.known.empty();
}

void CachedLookups::probe(const TablePull& table, std::int64_t asked_at, Rest& rest) {
  std::vector<Cached> found(table.keys.size());
  std::vector<std::int64_t> kept_since(table.keys.size());
  rest.versions.resize(table.keys.size());
  {
    const MutexLock lock(mutex_);
    RowCache& cache = tables_.at(table.table_id).second;
    cache.probe(table.table_id, table.keys, asked_at - options_.ttl.count(), found.data(), rest.versions.data(),
                table.rows.data(), kept_since.data());
  }
  rest.shard_begin.assign(1, 0);
  std::size_t at = 0;
  std::int64_t age_ms = 0;
  for (std::size_t shard = 0; shard + 1 < table.shard_begin.size(); ++shard) {
    for (; at < table.shard_begin[shard + 1]; ++at) {
      if (found[at] == Cached::kHit) {
        age_ms += std::max<std::int64_t>(0, asked_at - kept_since[at]);
        continue;
      }
      rest.keys.push_back(table.keys[at]);
      rest.places.push_back(at);
    }
    rest.shard_begin.push_back(static_cast<std::uint32_t>(rest.keys.size()));
  }
  rest.rows.resize(rest.keys.size() * table.dim);
  rest.versions.resize(rest.keys.size());
  hits_ += table.keys.size() - rest.keys.size();
  misses_ += rest.keys.size();
  hit_age_ms_ += static_cast<std::uint64_t>(age_ms);
}

void CachedLookups::take(const TablePull& table, const Rest& rest, std::int64_t asked_at) {
  for (std::size_t i = 0; i < rest.places.size(); ++i) {
    std::memcpy(table.rows.data() + rest.places[i] * table.dim, rest.rows.data() + i * table.dim,
                table.dim * sizeof(float));
  }
  const MutexLock lock(mutex_);
  RowCache& cache = tables_.at(table.table_id).second;
  cache.put(table.table_id, rest.keys, rest.versions.data(), rest.rows.data(), asked_at);
}

Status CachedLookups::pull(std::span<const TablePull> tables, const CallOptions& options) {
  const std::int64_t asked_at = now_ms();
  std::vector<Rest> rests(tables.size());
  std::vector<TablePull> asked;
  for (std::size_t t = 0; t < tables.size(); ++t) {
    TablePull request = tables[t];
    if (is_cached(request)) {
      probe(request, asked_at, rests[t]);
      if (rests[t].keys.empty()) continue;
      request.keys = rests[t].keys;
      request.shard_begin = rests[t].shard_begin;
      request.rows = rests[t].rows;
      request.versions = rests[t].versions;
    }
    asked.push_back(request);
  }
  if (!asked.empty()) SR_RETURN_IF_ERROR(shards_->pull(asked, options));
  for (std::size_t t = 0; t < tables.size(); ++t) {
    if (!rests[t].keys.empty()) take(tables[t], rests[t], asked_at);
  }
  return Status::ok();
}

}  // namespace sparserow
