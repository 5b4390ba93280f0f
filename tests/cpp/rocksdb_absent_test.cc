// A build without RocksDB: its engine is refused in one line that says what to install, and pages work.
#include <doctest/doctest.h>

#include <numeric>
#include <vector>

#include "store/store.h"
#include "temporary_folder.h"

namespace sparserow {
namespace {

TEST_CASE("a build without RocksDB keeps rows in pages, and refuses the other engine by name") {
  REQUIRE_FALSE(SsdTier::has_rocksdb());
  const Folder folder;
  StoreOptions options{.memory_budget_bytes = 1 << 20, .slot_count = 16, .ssd = {.path = folder.path().string()}};
  options.ssd.engine = SsdEngine::kRocksdb;
  const auto refused = Store::create(options);
  CHECK(refused.status().code() == Code::kFailedPrecondition);
  CHECK(refused.status().message() ==
        "ssd_engine: this build has no RocksDB; install librocksdb-dev and build again, or take pages");
  options.ssd.engine = SsdEngine::kPages;
  {
    auto made = Store::create(options);
    REQUIRE(made.is_ok());
    Store& store = *made.value();
    REQUIRE(store.create_table({.id = 1, .name = "n/t", .dim = 4, .init = {}, .optimizer = {}}).is_ok());
    std::vector<std::uint64_t> keys(1000);
    const std::vector<float> grads(keys.size() * 4, 1.0f);
    for (std::uint64_t first = 0; first < 30'000; first += keys.size()) {
      std::iota(keys.begin(), keys.end(), first);
      REQUIRE(store.apply(1, keys, grads.data(), {.lr = 0.5f}).is_ok());
    }
    REQUIRE(store.stats()[0].ssd_rows > 0);
    std::iota(keys.begin(), keys.end(), 0);
    std::vector<float> rows(grads.size());
    REQUIRE(store.pull(1, keys, Dtype::kFloat32, reinterpret_cast<std::byte*>(rows.data())).is_ok());
    for (const float weight : rows) REQUIRE(weight == -0.5f);
  }
}

TEST_CASE("a store in memory has no SSD tier") {
  auto made = Store::create({.slot_count = 16});
  REQUIRE(made.is_ok());
  CHECK_FALSE(made.value()->tier_stats().has_value());
  CHECK(made.value()->write_back().code() == Code::kFailedPrecondition);
}

}  // namespace
}  // namespace sparserow
