// A build without RocksDB: stores in memory work, and an SSD is refused in one line that says what to install.
#include <doctest/doctest.h>

#include <numeric>
#include <vector>

#include "store/store.h"

namespace sparserow {
namespace {

TEST_CASE("a store in memory needs no SSD tier") {
  REQUIRE_FALSE(SsdTier::is_built());
  auto made = Store::create({.slot_count = 16});
  REQUIRE(made.is_ok());
  Store& store = *made.value();
  REQUIRE(store.create_table({.id = 1, .name = "n/t", .dim = 4, .init = {}, .optimizer = {}}).is_ok());
  std::vector<std::uint64_t> keys(1000);
  std::iota(keys.begin(), keys.end(), 0);
  const std::vector<float> grads(keys.size() * 4, 1.0f);
  REQUIRE(store.apply(1, keys, grads.data(), {.lr = 0.5f}).is_ok());
  std::vector<float> rows(grads.size());
  REQUIRE(store.pull(1, keys, Dtype::kFloat32, reinterpret_cast<std::byte*>(rows.data())).is_ok());
  for (const float weight : rows) REQUIRE(weight == -0.5f);
  CHECK_FALSE(store.tier_stats().has_value());
  CHECK(store.fetch_to_memory(1, keys).is_ok());
  CHECK_FALSE(store.would_block(1, keys));
  CHECK(store.write_back().code() == Code::kFailedPrecondition);
}

TEST_CASE("an SSD is refused by name") {
  const auto made = Store::create({.memory_budget_bytes = 16 << 20, .ssd = {.path = "/tmp"}});
  CHECK(made.status().code() == Code::kFailedPrecondition);
  CHECK(made.status().message() ==
        "ssd_path: this build has no SSD tier; install librocksdb-dev and build again, or leave ssd_path out");
}

}  // namespace
}  // namespace sparserow
