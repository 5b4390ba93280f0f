// Namespaces share the memory of a store: one that fills it up is refused before others are, and with an SSD its own
// rows leave first.
#include "store/table/memory_shares.h"

#include <doctest/doctest.h>

#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "ssd_engines.h"
#include "store/store.h"
#include "temporary_folder.h"

namespace sparserow {
namespace {

constexpr std::uint32_t kDim = 16;
constexpr std::uint64_t kLimit = 64u << 20;
constexpr std::uint64_t kSlack = 2u << 20;  // by which a batch may need less than it is promised
constexpr std::uint64_t kBatch = 500;

TableSchema schema_of(std::uint32_t id, const std::string& name) {
  return {.id = id, .name = name, .dim = kDim, .init = {}, .optimizer = {.kind = OptimizerKind::kAdagrad}};
}

std::unique_ptr<Store> store_of(const std::vector<std::string>& names, std::uint64_t limit = kLimit) {
  auto store = Store::create({.memory_budget_bytes = limit});
  REQUIRE(store.is_ok());
  std::uint32_t id = 0;
  for (const std::string& name : names) REQUIRE(store.value()->create_table(schema_of(++id, name)).is_ok());
  return std::move(store).value();
}

Status push(Store& store, std::uint32_t table, std::uint64_t first, std::uint64_t count = kBatch) {
  std::vector<std::uint64_t> keys(count);
  std::iota(keys.begin(), keys.end(), first);
  const std::vector<float> grads(count * kDim, 1.0f);
  return store.apply(table, keys, grads.data(), {.lr = 1.0f});
}

// Pushes new rows until they are refused; returns the refusal.
std::string fill(Store& store, std::uint32_t table, std::uint64_t first = 0) {
  for (;; first += kBatch) {
    const Status pushed = push(store, table, first);
    if (pushed.is_ok()) continue;
    REQUIRE(pushed.code() == Code::kResourceExhausted);
    return pushed.message();
  }
}

std::uint64_t bytes_of(const Store& store, std::uint32_t table) {
  const std::vector<std::uint32_t> ids{table};
  return store.stats(ids).at(0).total_bytes;
}

TEST_CASE("a namespace that fills the memory up is refused before another one is") {
  const auto store = store_of({"ads/t", "news/t"});
  REQUIRE(push(*store, 2, 0).is_ok());
  const std::string refused = fill(*store, 1);
  CHECK(refused.find("table ads/t: namespace ads has ") == 0);
  CHECK(refused.find("kept for other namespaces; nothing was applied; raise memory_budget_bytes or memory_share") !=
        std::string::npos);
  CHECK(bytes_of(*store, 1) > kLimit * 7 / 8 - kSlack);  // all but the other's part
  CHECK(push(*store, 1, 0).is_ok());                     // existing rows need no memory
  CHECK(fill(*store, 2, kBatch).find("memory budget of 64.0 MiB reached") != std::string::npos);
  CHECK(bytes_of(*store, 2) > kLimit / 16 - kSlack);
  CHECK(store->used_bytes() <= kLimit);
}

TEST_CASE("a namespace that is alone takes all, with several tables; one that comes later has the next free bytes") {
  const auto store = store_of({"ads/t", "ads/u"});
  REQUIRE(push(*store, 2, 0, 10'000).is_ok());
  CHECK(fill(*store, 1).find("memory budget of 64.0 MiB reached") != std::string::npos);
  CHECK(bytes_of(*store, 1) + bytes_of(*store, 2) > kLimit - kSlack);
  REQUIRE(store->create_table(schema_of(3, "news/t")).is_ok());
  CHECK_FALSE(push(*store, 3, 0, 20'000).is_ok());
  REQUIRE(store->drop_table(2).is_ok());
  CHECK_FALSE(push(*store, 1, 1'000'000, 5'000).is_ok());
  CHECK(push(*store, 3, 0, 5'000).is_ok());
}

TEST_CASE("a share stays free also for a namespace without tables, until it is taken away") {
  const auto store = store_of({"ads/t"});
  REQUIRE(store->set_memory_shares({{"news", 0.5}}).is_ok());
  fill(*store, 1);
  const std::uint64_t half = bytes_of(*store, 1);
  CHECK(half > kLimit / 2 - kSlack);
  CHECK(half <= kLimit / 2);
  REQUIRE(store->create_table(schema_of(2, "news/t")).is_ok());
  fill(*store, 2);
  CHECK(bytes_of(*store, 2) > kLimit / 2 - kSlack);
  REQUIRE(store->drop_table(2).is_ok());
  REQUIRE(store->set_memory_shares({}).is_ok());
  fill(*store, 1, 10'000'000);
  CHECK(bytes_of(*store, 1) > kLimit - kSlack);
}

TEST_CASE("shares are above 0, and together at most seven eighths") {
  const auto store = store_of({});
  CHECK(store->set_memory_shares({{"a", 0.5}, {"b", 0.375}}).is_ok());
  for (const std::map<std::string, double>& wrong :
       {std::map<std::string, double>{{"a", 0.5}, {"b", 0.38}}, {{"a", 0.0}}, {{"a", -1.0}}}) {
    const Status refused = store->set_memory_shares(wrong);
    CHECK(refused.code() == Code::kInvalidArgument);
    CHECK(refused.message().find("allowed: above 0, and together at most 0.875") != std::string::npos);
  }
}

TEST_CASE("statistics of some tables are those of these alone") {
  const auto store = store_of({"ads/t", "ads/u", "news/t"});
  REQUIRE(push(*store, 3, 0).is_ok());
  const std::vector<std::uint32_t> ids{3, 77, 1};
  const auto some = store->stats(ids);
  REQUIRE(some.size() == 2);
  CHECK(some[0].name == "news/t");
  CHECK(some[0].rows == kBatch);
  CHECK(some[1].name == "ads/t");
  CHECK(store->stats().size() == 3);
}

// What is refused is beyond its namespace's part, whatever was pushed, erased, and dropped before.
TEST_CASE("whatever namespaces do, none is refused within its part") {
  constexpr std::uint64_t kSmall = 16u << 20;
  for (const std::uint64_t seed : {1, 2, 3}) {
    std::mt19937_64 random(seed);
    const auto store = store_of({"a/t", "b/t", "c/t", "d/t"}, kSmall);
    REQUIRE(store->set_memory_shares({{"a", 0.25}, {"b", 0.4}}).is_ok());
    const std::map<std::uint32_t, double> parts{{1, 0.25}, {2, 0.4}, {3, 0.0625}, {4, 0.0625}};
    std::vector<std::uint64_t> next(5, 0);
    std::uint64_t refusals = 0;
    for (int turn = 0; turn < 1200; ++turn) {
      const auto table = static_cast<std::uint32_t>(random() % 8 < 4 ? 3 : 1 + random() % 4);  // one is greedy
      if (random() % 12 == 0) {
        std::vector<std::uint64_t> keys(next[table] / 2);
        std::iota(keys.begin(), keys.end(), 0);
        REQUIRE(store->erase(table, keys).is_ok());
        continue;
      }
      const Status pushed = push(*store, table, next[table], 200);
      REQUIRE(store->used_bytes() <= kSmall);
      if (pushed.is_ok()) {
        next[table] += 200;
        continue;
      }
      ++refusals;
      const auto part = static_cast<std::uint64_t>(parts.at(table) * static_cast<double>(kSmall));
      CAPTURE(table);
      CAPTURE(pushed.message());
      CHECK(bytes_of(*store, table) + kSlack / 2 > part);
    }
    CHECK(refusals > 50);
  }
}

TEST_CASE("with an SSD, rows of a namespace within its part do not leave for another one's") {
  const Folder folder;
  auto made =
      Store::create({.memory_budget_bytes = with_index(1u << 20, 40'000),
                     .slot_count = 4,
                     .ssd = {.path = folder.path().string(), .engine = ssd_engine, .direct_io = ssd_direct_io}});
  REQUIRE(made.is_ok());
  Store& store = *made.value();
  REQUIRE(store.create_table(schema_of(1, "ads/t")).is_ok());
  REQUIRE(store.create_table(schema_of(2, "news/t")).is_ok());
  REQUIRE(store.set_memory_shares({{"news", 0.3}}).is_ok());
  REQUIRE(push(store, 2, 0).is_ok());
  for (std::uint64_t first = 0; first < 40'000; first += kBatch) REQUIRE(push(store, 1, first).is_ok());
  const auto stats = store.stats();
  CHECK(stats[0].ssd_rows > 10'000);
  CHECK(stats[1].rows == kBatch);
  CHECK(stats[1].ssd_rows == 0);
  // Beyond its part its rows leave too, and nothing is refused.
  for (std::uint64_t first = 0; first < 40'000; first += kBatch) REQUIRE(push(store, 2, first).is_ok());
  CHECK(store.stats()[1].ssd_rows > 10'000);
}

}  // namespace
}  // namespace sparserow
