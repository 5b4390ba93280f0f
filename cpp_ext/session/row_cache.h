// Rows of tables of one width on the worker, by (table id, key): set-associative, a budget in bytes.
//
// Rows come and go as float32 and are kept in the cache's dtype: with 16 bits a row is given as it was rounded.
//
// A row carries its version and the step that it was validated at: the step whose pull last said that it is what the
// shards have. probe() gives a row to a step when it was validated at `oldest` or later; an older one is given with its
// version, for a conditional pull. Which row of a full set makes room: the one with the fewest uses since it came, of
// those the one longest unused; uses are halved every so many replacements of the set, so that what was hot long ago
// goes in the end. A row comes with no use, so a row that is met once pushes out its like.
//
// Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "schema/schema.h"
#include "util/dtype.h"
#include "util/mapped_vector.h"

namespace sparserow {

enum class Cached : std::uint8_t {
  kMiss,   // not here
  kStale,  // here, to be validated before use
  kHit,
};

class RowCache {
 public:
  static constexpr std::uint32_t kWays = 8;
  static constexpr std::int64_t kNever = INT64_MIN;  // validated at: before any use a conditional pull has to agree
  static constexpr std::uint8_t kMostUses = 255;
  static constexpr std::uint8_t kHalveEvery = 64;  // replacements of a set

  // What a row takes with its bookkeeping. A cache has at least one set of kWays rows.
  [[nodiscard]] static constexpr std::size_t bytes_per_row(std::uint32_t dim, Dtype dtype = Dtype::kFloat32) noexcept {
    return sizeof(std::uint64_t) + sizeof(Meta) + row_bytes(dtype, dim);
  }

  // capacity_bytes >= kWays * bytes_per_row(dim, dtype); memory is touched as rows come.
  RowCache(std::size_t capacity_bytes, std::uint32_t dim, Dtype dtype = Dtype::kFloat32);

  [[nodiscard]] std::uint32_t sets() const noexcept { return sets_; }

  // keys: (n). For each: found, and where it is not a miss its version (kNoVersion of a miss) and its row (n, dim).
  // validated: (n), or null; where it is not a miss, the step that it was validated at.
  void probe(std::uint32_t table_id, std::span<const std::uint64_t> keys, std::int64_t oldest, Cached* found,
             std::uint64_t* versions, float* rows, std::int64_t* validated = nullptr);
  // Puts rows in or in place of what is there, in order. keys: (n) unique; `versions` (n), `rows` (n, dim).
  void put(std::uint32_t table_id, std::span<const std::uint64_t> keys, const std::uint64_t* versions,
           const float* rows, std::int64_t validated);
  // These rows are gone.
  void drop(std::uint32_t table_id, std::span<const std::uint64_t> keys);

 private:
  static constexpr std::size_t kGroup = 128;  // keys that are searched together
  static constexpr std::size_t kLine = 64;

  struct Meta {
    std::uint64_t version = kNoVersion;
    std::int64_t validated = kNever;
    std::uint32_t table_id = 0;  // 0: the place is empty
    std::uint32_t used = 0;      // the call that used it last
    std::uint8_t uses = 0;
  };

  struct Free {
    std::size_t bytes = 0;
    void operator()(std::byte* at) const noexcept { MappedAllocator<std::byte>().deallocate(at, bytes); }
  };

  [[nodiscard]] std::size_t first_of(std::uint32_t table_id, std::uint64_t key) const noexcept;
  [[nodiscard]] std::uint32_t way_of(std::size_t first, std::uint32_t table_id, std::uint64_t key) const noexcept;
  std::uint32_t make_room(std::size_t first);
  // Where the sets of at most kGroup keys begin; their keys are fetched.
  void locate(std::uint32_t table_id, std::span<const std::uint64_t> keys, std::size_t* firsts) const noexcept;
  void fetch_likely(std::span<const std::uint64_t> keys, const std::size_t* firsts) const noexcept;
  [[nodiscard]] std::byte* row(std::size_t place) const noexcept { return rows_.get() + place * row_bytes_; }

  std::uint32_t dim_;
  Dtype dtype_;
  std::size_t row_bytes_;
  std::uint32_t sets_;
  std::uint32_t call_ = 0;
  MappedVector<std::uint64_t> keys_;         // (sets * ways); once it is large, the keys of a set are one line
  MappedVector<Meta> metas_;                 // (sets * ways)
  std::vector<std::uint8_t> replaced_;       // (sets) since the last halving
  std::unique_ptr<std::byte[], Free> rows_;  // (sets * ways, dim) of the dtype
};

}  // namespace sparserow
