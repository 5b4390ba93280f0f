#include "session/row_cache.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <tuple>

namespace sparserow {
namespace {

constexpr std::size_t kMostFetched = 1024;  // bytes of a row; beyond them the hardware's own prefetcher follows

// Its upper half picks the set.
std::uint64_t mix(std::uint32_t table_id, std::uint64_t key) noexcept {
  constexpr std::uint64_t kOdd = 0xd6e8feb86659fd93u;
  std::uint64_t hash = key + table_id * 0x9e3779b97f4a7c15u;
  hash = (hash ^ (hash >> 32)) * kOdd;
  hash = (hash ^ (hash >> 32)) * kOdd;
  return hash ^ (hash >> 32);
}

// Whether a row of 16 bits has an infinity: one that has values beyond them is not kept.
bool has_infinity(Dtype dtype, const std::byte* row, std::size_t dim) {
  const std::uint16_t infinity = dtype == Dtype::kFloat16 ? 0x7c00u : 0x7f80u;
  bool has = false;
  for (std::size_t i = 0; i < dim; ++i) {
    std::uint16_t bits;
    std::memcpy(&bits, row + 2 * i, sizeof bits);
    has |= (bits & 0x7fffu) == infinity;
  }
  return has;
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
      rows_(MappedAllocator<std::byte>().allocate(keys_.size() * row_bytes_), Free{keys_.size() * row_bytes_}) {}

std::size_t RowCache::first_of(std::uint32_t table_id, std::uint64_t key) const noexcept {
  return static_cast<std::size_t>(((mix(table_id, key) >> 32) * sets_) >> 32) * kWays;
}

std::uint32_t RowCache::way_of(std::size_t first, std::uint32_t table_id, std::uint64_t key) const noexcept {
  for (std::uint32_t way = 0; way < kWays; ++way) {
    if (keys_[first + way] == key && metas_[first + way].table_id == table_id) return way;
  }
  return kWays;
}

void RowCache::locate(std::uint32_t table_id, std::span<const std::uint64_t> keys, std::size_t* firsts) const noexcept {
  for (std::size_t i = 0; i < keys.size(); ++i) {
    firsts[i] = first_of(table_id, keys[i]);
    __builtin_prefetch(&keys_[firsts[i]]);
  }
}

// The place of a key's row, as far as keys say: none, when its set has a row of another table under this key. No branch
// depends on where in its set a key is.
void RowCache::fetch_likely(std::span<const std::uint64_t> keys, const std::size_t* firsts) const noexcept {
  const std::size_t fetched = std::min(row_bytes_, kMostFetched);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    std::uint32_t matches = 0;
    for (std::uint32_t way = 0; way < kWays; ++way) {
      matches |= static_cast<std::uint32_t>(keys_[firsts[i] + way] == keys[i]) << way;
    }
    if (matches == 0) continue;
    const std::size_t place = firsts[i] + static_cast<std::size_t>(std::countr_zero(matches));
    __builtin_prefetch(&metas_[place]);
    for (std::size_t at = 0; at < fetched; at += kLine) __builtin_prefetch(row(place) + at);
  }
}

void RowCache::probe(std::uint32_t table_id, std::span<const std::uint64_t> keys, std::int64_t oldest, Cached* found,
                     std::uint64_t* versions, float* rows, std::int64_t* validated) {
  ++call_;
  // Passes over a group beat a pipeline of single keys, as in the store (store/table/table.h).
  std::array<std::size_t, kGroup> firsts;
  for (std::size_t begin = 0; begin < keys.size(); begin += kGroup) {
    const auto group = keys.subspan(begin, std::min(kGroup, keys.size() - begin));
    locate(table_id, group, firsts.data());
    fetch_likely(group, firsts.data());
    for (std::size_t j = 0; j < group.size(); ++j) {
      const std::size_t i = begin + j;
      const std::uint32_t way = way_of(firsts[j], table_id, keys[i]);
      if (way == kWays) {
        found[i] = Cached::kMiss;
        versions[i] = kNoVersion;
        continue;
      }
      Meta& meta = metas_[firsts[j] + way];
      meta.used = call_;
      if (meta.uses < kMostUses) ++meta.uses;
      found[i] = meta.validated >= oldest ? Cached::kHit : Cached::kStale;
      versions[i] = meta.version;
      if (validated != nullptr) validated[i] = meta.validated;
      convert_to_float(dtype_, row(firsts[j] + way), rows + i * dim_, dim_);
    }
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
  std::array<std::size_t, kGroup> firsts;
  for (std::size_t begin = 0; begin < keys.size(); begin += kGroup) {
    const auto group = keys.subspan(begin, std::min(kGroup, keys.size() - begin));
    locate(table_id, group, firsts.data());
    // A row that is not here replaces one of its set, whose metas all count.
    for (std::size_t j = 0; j < group.size(); ++j) {
      for (std::uint32_t way = 0; way < kWays; way += kLine / sizeof(Meta))
        __builtin_prefetch(&metas_[firsts[j] + way]);
    }
    for (std::size_t j = 0; j < group.size(); ++j) {
      const std::size_t i = begin + j;
      std::uint32_t way = way_of(firsts[j], table_id, keys[i]);
      const bool is_new = way == kWays;
      if (is_new) way = make_room(firsts[j]);
      const std::size_t place = firsts[j] + way;
      Meta& meta = metas_[place];
      keys_[place] = keys[i];
      meta.table_id = table_id;
      meta.version = versions[i];
      meta.validated = validated;
      meta.used = call_;
      if (is_new) meta.uses = 0;
      convert_from_float(dtype_, rows + i * dim_, row(place), dim_);
      if (dtype_ != Dtype::kFloat32 && has_infinity(dtype_, row(place), dim_)) meta.table_id = 0;  // beyond 16 bits
    }
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
