#include "session/row_cache.h"

#include <algorithm>
#include <tuple>

namespace sparserow {
namespace {

constexpr std::size_t kTouchedAhead = 12;  // keys between the first touch of a set and its use

// Its upper half picks the set.
std::uint64_t mix(std::uint32_t table_id, std::uint64_t key) noexcept {
  constexpr std::uint64_t kOdd = 0xd6e8feb86659fd93u;
  std::uint64_t hash = key + table_id * 0x9e3779b97f4a7c15u;
  hash = (hash ^ (hash >> 32)) * kOdd;
  hash = (hash ^ (hash >> 32)) * kOdd;
  return hash ^ (hash >> 32);
}

}  // namespace

RowCache::RowCache(std::size_t capacity_bytes, std::uint32_t dim, Dtype dtype)
    : dim_(dim),
      dtype_(dtype),
      row_bytes_(row_bytes(dtype, dim)),
      sets_(static_cast<std::uint32_t>(
          std::min<std::size_t>(capacity_bytes / (kWays * bytes_per_row(dim, dtype)), std::size_t{1} << 31))),
      keys_(std::size_t{sets_} * kWays),
      metas_(keys_.size()),
      replaced_(sets_),
      rows_(std::make_unique_for_overwrite<std::byte[]>(keys_.size() * row_bytes_)) {}

std::size_t RowCache::first_of(std::uint32_t table_id, std::uint64_t key) const noexcept {
  return static_cast<std::size_t>(((mix(table_id, key) >> 32) * sets_) >> 32) * kWays;
}

std::uint32_t RowCache::way_of(std::size_t first, std::uint32_t table_id, std::uint64_t key) const noexcept {
  for (std::uint32_t way = 0; way < kWays; ++way) {
    if (keys_[first + way] == key && metas_[first + way].table_id == table_id) return way;
  }
  return kWays;
}

void RowCache::locate(std::uint32_t table_id, std::span<const std::uint64_t> keys) {
  firsts_.resize(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) firsts_[i] = first_of(table_id, keys[i]);
}

void RowCache::probe(std::uint32_t table_id, std::span<const std::uint64_t> keys, std::int64_t oldest, Cached* found,
                     std::uint64_t* versions, float* rows, std::int64_t* validated) {
  ++call_;
  locate(table_id, keys);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i + kTouchedAhead < keys.size()) {
      const std::size_t later = firsts_[i + kTouchedAhead];
      __builtin_prefetch(&keys_[later]);
      for (std::uint32_t way = 0; way < kWays; way += 2) __builtin_prefetch(&metas_[later + way]);
    }
    const std::uint32_t way = way_of(firsts_[i], table_id, keys[i]);
    if (way == kWays) {
      found[i] = Cached::kMiss;
      versions[i] = kNoVersion;
      continue;
    }
    Meta& meta = metas_[firsts_[i] + way];
    meta.used = call_;
    if (meta.uses < kMostUses) ++meta.uses;
    found[i] = meta.validated >= oldest ? Cached::kHit : Cached::kStale;
    versions[i] = meta.version;
    if (validated != nullptr) validated[i] = meta.validated;
    convert_to_float(dtype_, row(firsts_[i] + way), rows + i * dim_, dim_);
  }
}

std::uint32_t RowCache::make_room(std::size_t first) {
  const auto worth = [this, first](std::uint32_t way) {
    const Meta& meta = metas_[first + way];
    return std::tuple(meta.table_id != 0, meta.uses, meta.used);
  };
  std::uint32_t least = 0;
  for (std::uint32_t way = 1; way < kWays; ++way) least = worth(way) < worth(least) ? way : least;
  if (metas_[first + least].table_id != 0 && ++replaced_[first / kWays] == kHalveEvery) {
    replaced_[first / kWays] = 0;
    for (std::uint32_t way = 0; way < kWays; ++way) metas_[first + way].uses /= 2;
  }
  return least;
}

void RowCache::put(std::uint32_t table_id, std::span<const std::uint64_t> keys, const std::uint64_t* versions,
                   const float* rows, std::int64_t validated) {
  ++call_;
  locate(table_id, keys);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    std::uint32_t way = way_of(firsts_[i], table_id, keys[i]);
    const bool is_new = way == kWays;
    if (is_new) way = make_room(firsts_[i]);
    const std::size_t place = firsts_[i] + way;
    Meta& meta = metas_[place];
    keys_[place] = keys[i];
    meta.table_id = table_id;
    meta.version = versions[i];
    meta.validated = validated;
    meta.used = call_;
    if (is_new) meta.uses = 0;
    convert_from_float(dtype_, rows + i * dim_, row(place), dim_);
  }
}

void RowCache::drop(std::uint32_t table_id, std::span<const std::uint64_t> keys) {
  for (const std::uint64_t key : keys) {
    const std::size_t first = first_of(table_id, key);
    const std::uint32_t way = way_of(first, table_id, key);
    if (way != kWays) metas_[first + way].table_id = 0;
  }
}

}  // namespace sparserow
