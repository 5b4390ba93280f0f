// Which rows a model's device keeps, so that they need not cross to it again.
//
// The directory is on the host and the rows are on the device, in one store for each width, by place. A row is known by
// its table, its key and a 128-bit hash of its bytes: a row that has changed in any way is another row. So what the
// device keeps is right whatever the clock, the session's cache or the shards did. Rows cross and are kept in the
// directory's dtype, and the hash is of those bytes.
//
//   plan(pack): found with the same bytes -> the device takes the row from its place
//               else                      -> the row is sent, and kept at a place of its set, if one is free
//
// A place is not given away in the plan that uses it. The device must carry plans out in the order in which they were
// made: rows are taken from their places before others are put there.
//
// A set has kWays places. Which row makes room: the one with the fewest uses since it came, of those the one longest
// unused; uses are halved now and then, as in row_cache.h. Thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "util/dtype.h"
#include "util/mutex.h"

namespace sparserow {

class DeviceDirectory {
 public:
  static constexpr std::uint32_t kWays = 8;

  // bytes: of the rows on the device, of all tables.
  explicit DeviceDirectory(std::uint64_t bytes, Dtype dtype = Dtype::kFloat32) : bytes_(bytes), dtype_(dtype) {}

  // Tables share the bytes so that each has room for as many rows. What was kept before is forgotten.
  void add_table(std::uint32_t table_id, std::uint32_t dim);

  struct Store {
    std::uint32_t dim = 0;
    std::uint64_t places = 0;
  };
  // The stores of rows, by width; what is kept is forgotten whenever their generation changes.
  [[nodiscard]] std::vector<Store> stores() const;
  [[nodiscard]] std::uint64_t generation() const;

  // What a plan says of one table's rows.
  struct Plan {
    std::vector<std::int32_t> sent;     // rows that cross
    std::vector<std::int32_t> kept;     // rows that the device has ...
    std::vector<std::int32_t> kept_at;  // ... and their places
    std::vector<std::int32_t> put;      // rows of `sent` that it keeps from now on ...
    std::vector<std::int32_t> put_at;   // ... and their places
    Dtype dtype = Dtype::kFloat32;      // of the rows that are sent and kept
    std::uint64_t generation = 0;
  };
  // Begins the plan of one pack; its tables follow, under one lock.
  class Planning {
   public:
    explicit Planning(DeviceDirectory& directory);
    // keys: (n) unique. rows: the row of the i-th key is rows + indexes[i] * dim. skips: (n), or empty; a row that is
    // skipped is neither sent nor kept.
    Plan table(std::uint32_t table_id, std::span<const std::uint64_t> keys, std::span<const std::uint32_t> indexes,
               const float* rows, std::span<const std::uint8_t> skips);

   private:
    struct Unknown;  // a row that is at no place yet

    DeviceDirectory& directory_;
    std::unique_lock<Mutex> lock_;
  };

 private:
  // What decides which of a set's places a row is at, and which makes room: one cache line.
  struct alignas(64) Set {
    std::array<std::uint32_t, kWays> tags{};  // of table and key; 0: the place is empty
    std::array<std::uint16_t, kWays> used{};  // the plan that used it last, its lower bits
    std::array<std::uint8_t, kWays> uses{};
    std::uint8_t replaced = 0;  // since the last halving
  };
  struct Row {
    std::uint64_t key = 0;
    std::uint64_t hash_low = 0;
    std::uint64_t hash_high = 0;
    std::uint32_t table_id = 0;
  };
  struct Pool {
    std::uint32_t dim = 0;
    std::vector<Set> sets;
    std::vector<Row> rows;  // (sets * kWays)
  };
  struct Table {
    std::uint32_t id = 0;
    std::uint32_t dim = 0;
  };

  void make_pools() SR_REQUIRES(mutex_);
  [[nodiscard]] Pool* pool_of(std::uint32_t table_id) noexcept SR_REQUIRES(mutex_);
  // Where a key's row would be: its set, and its tag there, which is never 0.
  struct Spot {
    std::size_t set = 0;
    std::uint32_t tag = 0;
  };
  static Spot spot_of(const Pool& pool, std::uint32_t table_id, std::uint64_t key) noexcept;
  // The way of the set that holds the row; kWays where none does.
  static std::uint32_t way_of(const Pool& pool, Spot spot, std::uint32_t table_id, std::uint64_t key) noexcept;
  // A way of the set that this plan has not used; kWays when it has used all.
  std::uint32_t make_room(Set& set) const noexcept SR_REQUIRES(mutex_);
  [[nodiscard]] std::uint16_t plan_bits() const noexcept SR_REQUIRES(mutex_) {
    return static_cast<std::uint16_t>(plan_);
  }

  const std::uint64_t bytes_;
  const Dtype dtype_;
  mutable Mutex mutex_;
  std::vector<Table> tables_ SR_GUARDED_BY(mutex_);
  std::vector<Pool> pools_ SR_GUARDED_BY(mutex_);
  std::uint64_t generation_ SR_GUARDED_BY(mutex_) = 0;
  std::uint32_t plan_ SR_GUARDED_BY(mutex_) = 0;
};

}  // namespace sparserow
