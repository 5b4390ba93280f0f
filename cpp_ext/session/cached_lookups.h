// Rows of a served model kept in the process that asks for them, behind the seam that sessions and ops use.
//
// A row is used for `ttl` after the moment before it was asked for, so a cached row is at most that much older than the
// served one; two lookups of a key may differ by as much in either order. Absent rows are kept as well. Tables share
// the bytes so that each has room for as many rows; which row of a full set makes room is RowCache's rule.
//
// Thread-safe; its mutex is a leaf, and no thread has it while the shards are asked.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "session/row_cache.h"
#include "shards/shards.h"
#include "util/mutex.h"
#include "util/status.h"

namespace sparserow {

struct CachedLookupsOptions {
  std::uint64_t capacity_bytes = 0;
  std::chrono::milliseconds ttl{1000};
  std::function<std::int64_t()> clock_ms{};  // monotonic; null: the system's
};

struct CachedTable {
  std::uint32_t id = 0;
  std::uint32_t dim = 0;
};

class CachedLookups final : public RowReader {
 public:
  // InvalidArgument names the least that capacity_bytes must be, or the ttl. Tables that
  // are not named are not cached.
  static Result<std::shared_ptr<CachedLookups>> create(std::shared_ptr<RowReader> shards,
                                                       std::span<const CachedTable> tables,
                                                       const CachedLookupsOptions& options);

  Status pull(std::span<const TablePull> tables, const CallOptions& options) override;

  struct Stats {
    std::uint64_t hits = 0;        // rows
    std::uint64_t misses = 0;      // rows, those too old among them
    std::uint64_t hit_age_ms = 0;  // of all hits: the time since each row was asked for
  };
  [[nodiscard]] Stats stats() const noexcept { return {hits_.load(), misses_.load(), hit_age_ms_.load()}; }

  // As the shards behind it.
  [[nodiscard]] std::uint32_t shard_count() const noexcept override { return shards_->shard_count(); }
  [[nodiscard]] std::span<const std::uint16_t> slot_owner() const noexcept override { return shards_->slot_owner(); }

 private:
  CachedLookups(std::shared_ptr<RowReader> shards, const CachedLookupsOptions& options)
      : shards_(std::move(shards)), options_(options) {}

  // What of one request is not here: some of its keys, with their places in it.
  struct Rest {
    std::vector<std::uint64_t> keys;
    std::vector<std::uint32_t> shard_begin;
    std::vector<std::size_t> places;
    std::vector<std::uint64_t> versions;
    std::vector<float> rows;
  };
  [[nodiscard]] std::int64_t now_ms() const;
  [[nodiscard]] bool is_cached(const TablePull& table) const;
  void probe(const TablePull& table, std::int64_t asked_at, Rest& rest);
  void take(const TablePull& table, const Rest& rest, std::int64_t asked_at);

  const std::shared_ptr<RowReader> shards_;
  const CachedLookupsOptions options_;
  Mutex mutex_;
  std::map<std::uint32_t, std::pair<std::uint32_t, RowCache>> tables_;  // by id, with their dim; the caches are guarded
  std::atomic<std::uint64_t> hits_{0};
  std::atomic<std::uint64_t> misses_{0};
  std::atomic<std::uint64_t> hit_age_ms_{0};
};

}  // namespace sparserow
