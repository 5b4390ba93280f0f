// A session's row cache on the pull route: what a step asks for comes from here where it may, and goes in here.
//
// pull() takes the requests of a step's lookups. Rows that are fresh enough are copied into place; the others are asked
// for in one call: those that are here but old by their version (a conditional pull brings only what differs), the rest
// as ever. A step that finds all its rows asks no shard.
//
// Staleness. A row validated at step v serves the steps v to v + staleness, so the pull at v is made by the clock of
// step v + staleness: what it brings is good enough for the last of them. That keeps every use within the job's own
// bound, as long as `staleness` is at most that bound. At 0 every use is validated: rows are what they are without a
// cache, to the bit.
//
// Own commits. kExact: rows that this session commits, pushes, assigns or erases are dropped (they have changed, so
// their versions are of no use), and it always sees its own work. kBounded: a step's commit leaves them, and is seen
// when they are validated next; calls by key drop them as above. What a pull brings that was under way while rows were
// dropped is validated before its next use.
//
// Thread-safe; no thread has its mutex while the shards are asked.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "session/row_cache.h"
#include "shards/shards.h"
#include "util/mutex.h"
#include "util/status.h"

namespace sparserow {

class SessionState;

enum class OwnCommits : std::uint8_t { kExact, kBounded };

struct CacheOptions {
  std::uint64_t bytes = 0;  // of all tables; 0: no cache
  std::int64_t staleness = 0;
  OwnCommits own_commits = OwnCommits::kExact;
  Dtype dtype = Dtype::kFloat32;  // of what is kept; 16 bits only where staleness >= 1
};

class SessionCache {
 public:
  explicit SessionCache(const CacheOptions& options) : options_(options) {}

  [[nodiscard]] const CacheOptions& options() const noexcept { return options_; }

  // Tables share the bytes so that each has room for as many rows; those of one width share one RowCache. What was
  // cached before is dropped. InvalidArgument names the least that `bytes` must be.
  Status add_table(const std::string& name, std::uint32_t table_id, std::uint32_t dim);

  // For lookups of step options.step, which must not be kNoStep. Rows of tables that were not added are pulled as they
  // are asked for. before_asking: waits for the commit in flight. Counts pulls and rows in the state's counters.
  Status pull(SessionState& state, std::span<const TablePull> tables, CallOptions options, bool before_asking);

  // Keys of a step that this session commits, or changed by key.
  void committed(std::span<const TablePush> tables);
  void changed(std::uint32_t table_id, std::span<const std::uint64_t> keys);

 private:
  struct Table {
    std::uint32_t id = 0;
    std::uint32_t dim = 0;
  };
  struct Pool {
    std::uint32_t dim = 0;
    RowCache rows;
  };
  // Some keys of a request, with their places in it.
  struct RowRequest {
    std::vector<std::uint64_t> keys;
    std::vector<std::uint32_t> shard_begin;
    std::vector<std::uint32_t> positions;
    std::vector<std::uint64_t> versions;
    std::vector<float> rows;
    std::vector<std::uint8_t> changed;  // of a conditional pull
  };
  // One table of one call: what was found, and what is asked for. A request that is all misses or all stale is sent as
  // it is; else misses and stale rows go each by themselves, since a miss needs no version.
  struct Part {
    std::uint32_t dim = 0;  // 0: not cached
    std::size_t hits = 0;
    std::size_t stale = 0;
    std::vector<Cached> found;            // (n)
    std::vector<std::uint64_t> versions;  // (n)
    std::vector<std::uint8_t> changed;    // (n) when all are stale
    RowRequest misses;
    RowRequest outdated;
  };

  [[nodiscard]] std::size_t bytes_per_row(std::uint32_t dim) const noexcept {
    return RowCache::bytes_per_row(dim, options_.dtype);
  }
  static void gather(const TablePull& table, const Part& part, Cached what, RowRequest& wanted);
  static void ask_for_rest(TablePull table, Part& part, std::vector<TablePull>& asked);
  static void put(RowCache& pool, const TablePull& table, const RowRequest& wanted, std::int64_t validated);
  [[nodiscard]] const Table* table_of(std::uint32_t table_id) const noexcept SR_REQUIRES(mutex_);
  void make_pools() SR_REQUIRES(mutex_);
  RowCache* pool_of(std::uint32_t dim) noexcept SR_REQUIRES(mutex_);
  void probe(std::span<const TablePull> tables, std::int64_t step, std::vector<Part>& parts, std::uint64_t& drops);
  void take(SessionState& state, std::span<const TablePull> tables, std::span<Part> parts, std::int64_t validated,
            std::uint64_t drops);

  const CacheOptions options_;
  Mutex mutex_;
  std::vector<Table> tables_ SR_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Pool>> pools_ SR_GUARDED_BY(mutex_);  // made by the first pull
  std::vector<std::vector<Part>> spare_ SR_GUARDED_BY(mutex_);
  std::uint64_t drops_ SR_GUARDED_BY(mutex_) = 0;  // calls of committed() and changed()
};

}  // namespace sparserow
