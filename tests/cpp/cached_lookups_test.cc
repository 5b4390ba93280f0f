// The cache of an inference: how old its rows may be, what it asks for, and what it refuses.
#include "session/cached_lookups.h"

#include <doctest/doctest.h>

#include <numeric>

#include "shards/local_shards.h"
#include "util/partition.h"

namespace sparserow {
namespace {

constexpr std::uint32_t kDim = 4;

struct Served {
  std::shared_ptr<Store> store;
  std::shared_ptr<Shards> shards;
  std::int64_t now_ms = 1000;
  std::shared_ptr<CachedLookups> cache;

  explicit Served(std::uint64_t capacity_bytes) {
    auto made = Store::create({});
    REQUIRE(made.is_ok());
    store = std::move(made).value();
    for (const std::uint32_t id : {1u, 2u}) {
      REQUIRE(
          store->create_table({.id = id, .name = "n/t" + std::to_string(id), .dim = kDim, .init = {}, .optimizer = {}})
              .is_ok());
    }
    auto local = LocalShards::create({store});
    REQUIRE(local.is_ok());
    shards = std::move(local).value();
    const std::vector<CachedTable> tables = {{1, kDim}};
    CachedLookupsOptions options;
    options.capacity_bytes = capacity_bytes;
    options.ttl = std::chrono::milliseconds(100);
    options.clock_ms = [this] { return now_ms; };
    auto cached = CachedLookups::create(shards, tables, options);
    REQUIRE(cached.is_ok());
    cache = std::move(cached).value();
  }

  void assign(std::uint32_t table, std::uint64_t begin, std::uint64_t end, float value) const {
    std::vector<std::uint64_t> keys(end - begin);
    std::iota(keys.begin(), keys.end(), begin);
    const std::vector<float> rows(keys.size() * kDim, value);
    REQUIRE(store->assign(table, keys, rows.data()).is_ok());
  }

  // First weight of each row.
  std::vector<float> pull(std::uint32_t table, std::uint64_t begin, std::uint64_t end) const {
    std::vector<std::uint64_t> keys(end - begin);
    std::iota(keys.begin(), keys.end(), begin);
    Partition partition;
    Partitioner partitioner(shards->slot_owner(), shards->shard_count());
    partitioner.partition(table, keys, partition);
    std::vector<float> rows(keys.size() * kDim);
    const TablePull pull{
        .table_id = table, .dim = kDim, .keys = partition.keys, .shard_begin = partition.shard_begin, .rows = rows};
    REQUIRE(cache->pull({&pull, 1}, {}).is_ok());
    std::vector<float> out(keys.size());
    for (std::size_t i = 0; i < keys.size(); ++i) out[i] = rows[std::size_t{partition.inverse[i]} * kDim];
    return out;
  }
};

TEST_CASE("a row is never older than its time to live") {
  Served served(1 << 20);
  served.assign(1, 0, 100, 1.0f);
  CHECK(served.pull(1, 0, 100) == std::vector<float>(100, 1.0f));
  served.assign(1, 0, 100, 2.0f);
  served.now_ms += 100;
  CHECK(served.pull(1, 0, 100) == std::vector<float>(100, 1.0f));
  CHECK(served.cache->stats().hits == 100);
  CHECK(served.cache->stats().hit_age_ms == 100 * 100);
  served.now_ms += 1;
  CHECK(served.pull(1, 0, 100) == std::vector<float>(100, 2.0f));
  CHECK(served.cache->stats().hits == 100);
  CHECK(served.cache->stats().misses == 200);
}

TEST_CASE("only what is missing or too old is asked for, and all of it arrives in its place") {
  Served served(1 << 20);
  for (std::uint64_t key = 0; key < 200; ++key) served.assign(1, key, key + 1, static_cast<float>(key));
  served.pull(1, 50, 100);
  served.now_ms += 80;
  served.pull(1, 120, 150);
  served.now_ms += 30;  // the first ones are too old now
  const auto got = served.pull(1, 0, 200);
  for (std::size_t key = 0; key < 200; ++key) CHECK(got[key] == static_cast<float>(key));
  CHECK(served.cache->stats().hits == 30);
  CHECK(served.cache->stats().misses == 50 + 30 + 170);
  CHECK(served.cache->stats().hit_age_ms == 30 * 30);
}

TEST_CASE("absent rows are kept as well, and seen when they are created") {
  Served served(1 << 20);
  CHECK(served.pull(1, 7, 8) == std::vector<float>{0.0f});
  served.assign(1, 7, 8, 3.0f);
  CHECK(served.pull(1, 7, 8) == std::vector<float>{0.0f});
  served.now_ms += 101;
  CHECK(served.pull(1, 7, 8) == std::vector<float>{3.0f});
}

TEST_CASE("a table that was not named, and more than fits, are right too") {
  Served served(RowCache::bytes_per_row(kDim) * RowCache::kWays);
  served.assign(1, 0, 500, 5.0f);
  served.assign(2, 0, 500, 6.0f);
  for (int i = 0; i < 3; ++i) {
    CHECK(served.pull(1, 0, 500) == std::vector<float>(500, 5.0f));
    CHECK(served.pull(2, 0, 500) == std::vector<float>(500, 6.0f));
  }
  CHECK(served.cache->stats().hits <= 3 * RowCache::kWays);
  CHECK(served.cache->stats().hits + served.cache->stats().misses == 1500);
}

TEST_CASE("too little room and no time to live are refused") {
  Served served(1 << 20);
  const std::vector<CachedTable> tables = {{1, kDim}};
  const auto refusal = [&](std::uint64_t bytes, int ttl_ms) {
    CachedLookupsOptions options;
    options.capacity_bytes = bytes;
    options.ttl = std::chrono::milliseconds(ttl_ms);
    return CachedLookups::create(served.shards, tables, options).status();
  };
  CHECK(refusal(100, 10).code() == Code::kInvalidArgument);
  CHECK(refusal(100, 10).message().find("capacity_bytes: 100 is not allowed") != std::string::npos);
  CHECK(refusal(1 << 20, 0).message().find("ttl_ms: 0 is not allowed") != std::string::npos);
}

}  // namespace
}  // namespace sparserow
