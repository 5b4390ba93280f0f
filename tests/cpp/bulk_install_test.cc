#include <doctest/doctest.h>

#include <random>
#include <unordered_map>
#include <vector>

#include "store/changes/change_log.h"
#include "store/store.h"

namespace sparserow {
namespace {

constexpr std::uint32_t kDim = 3;
constexpr std::size_t kRows = 50'000;  // enough to be sorted by slot

struct Batch {
  std::vector<std::uint64_t> keys, versions;
  std::vector<float> rows;
};

// Keys in random order, a fifth of them more than once.
Batch random_batch(std::mt19937_64& random, std::uint64_t distinct) {
  Batch batch;
  for (std::size_t i = 0; i < kRows; ++i) {
    batch.keys.push_back(random() % distinct);
    batch.versions.push_back(1 + random() % 1000);
    for (std::uint32_t column = 0; column < kDim; ++column) batch.rows.push_back(static_cast<float>(random() % 10'000));
  }
  return batch;
}

std::unique_ptr<Store> make_store() {
  auto store = std::move(Store::create({})).value();
  TableSchema schema;
  schema.id = 1;
  schema.name = "rows";
  schema.dim = kDim;
  REQUIRE(store->create_table(schema).is_ok());
  return store;
}

void check_rows(const Store& store, const Batch& batch, const std::unordered_map<std::uint64_t, std::size_t>& latest) {
  std::vector<std::uint64_t> keys, versions(latest.size());
  for (const auto& [key, at] : latest) keys.push_back(key);
  std::vector<float> pulled(keys.size() * kDim);
  REQUIRE(store.pull(1, keys, Dtype::kFloat32, reinterpret_cast<std::byte*>(pulled.data()), {.versions = versions})
              .is_ok());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::size_t at = latest.at(keys[i]);
    REQUIRE(versions[i] == batch.versions[at]);
    for (std::uint32_t column = 0; column < kDim; ++column) {
      REQUIRE(pulled[i * kDim + column] == batch.rows[at * kDim + column]);
    }
  }
  CHECK(store.stats().front().rows == latest.size());
}

TEST_CASE("a large batch of rows in any order is installed whole, and the last of equal keys stays") {
  const unsigned seed = std::random_device{}();
  MESSAGE("seed " << seed);
  std::mt19937_64 random(seed);
  const auto store = make_store();
  for (int turn = 0; turn < 2; ++turn) {  // once into an empty table, once over its rows
    const Batch batch = random_batch(random, 200'000);
    std::unordered_map<std::uint64_t, std::size_t> latest;
    for (std::size_t i = 0; i < kRows; ++i) latest[batch.keys[i]] = i;
    const std::vector<std::uint32_t> counts(kRows, 1);
    const StoredRows rows{.keys = batch.keys,
                          .versions = batch.versions,
                          .update_counts = counts,
                          .weights = std::as_bytes(std::span(batch.rows)),
                          .state = {}};
    REQUIRE(store->install(1, rows).is_ok());
    if (turn == 0) check_rows(*store, batch, latest);
    for (const auto& [key, at] : latest) {
      std::vector<float> row(kDim);
      REQUIRE(store->pull(1, std::span(&key, 1), Dtype::kFloat32, reinterpret_cast<std::byte*>(row.data())).is_ok());
      REQUIRE(row.front() == batch.rows[at * kDim]);
    }
  }
}

TEST_CASE("of a large batch in any order the newest version of each row stays") {
  const unsigned seed = std::random_device{}();
  MESSAGE("seed " << seed);
  std::mt19937_64 random(seed);
  const auto store = make_store();
  const Batch batch = random_batch(random, 60'000);
  std::unordered_map<std::uint64_t, std::size_t> newest;
  std::uint64_t taken = 0;
  for (std::size_t i = 0; i < kRows; ++i) {
    const auto [at, is_new] = newest.try_emplace(batch.keys[i], i);
    if (!is_new && batch.versions[i] <= batch.versions[at->second]) continue;
    at->second = i;
    ++taken;
  }
  const auto changed =
      store->changes().assign_newest(1, batch.keys, batch.rows.data(), batch.versions.data(), /*replaces=*/false);
  REQUIRE(changed.is_ok());
  CHECK(changed.value() == taken);
  check_rows(*store, batch, newest);
}

}  // namespace
}  // namespace sparserow
