// Rows of one instant while other threads write: what is handed out is the copy that was taken at that instant.
// Random operations, in memory and with an SSD, are in tests/property/test_snapshot.py.
#include "store/snapshot.h"

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <map>
#include <numeric>
#include <thread>
#include <vector>

namespace sparserow {
namespace {

constexpr std::uint32_t kDim = 4;
constexpr std::uint64_t kRows = 20'000;

struct Seen {
  std::uint64_t version = 0;
  std::uint32_t update_count = 0;
  std::array<float, kDim> weights{};
  bool operator==(const Seen&) const = default;
};

std::unique_ptr<Store> filled(const TableSchema& schema) {
  auto store = Store::create({.slot_count = 256});
  REQUIRE(store.is_ok());
  REQUIRE(store.value()->create_table(schema).is_ok());
  std::vector<std::uint64_t> keys(kRows);
  std::iota(keys.begin(), keys.end(), 0);
  const std::vector<float> grads(kRows * kDim, 1.0f);
  REQUIRE(store.value()->apply(schema.id, keys, grads.data(), {.lr = 0.5f}).is_ok());
  return std::move(store).value();
}

const TableSchema kSchema{.id = 1, .name = "n/t", .dim = kDim, .init = {}, .optimizer = {.kind = OptimizerKind::kSgd}};

std::map<std::uint64_t, Seen> dump(Store::Snapshot& snapshot, std::uint64_t page_bytes) {
  std::map<std::uint64_t, Seen> rows;
  for (std::uint32_t end = 0; end < 256;) {
    const auto page = snapshot.next(1, page_bytes);
    INFO(page.status().message());
    REQUIRE(page.is_ok());
    CHECK(page.value().first_slot == end);
    end = page.value().end_slot;
    for (std::size_t i = 0; i < page.value().keys.size(); ++i) {
      Seen seen{page.value().versions[i], page.value().update_counts[i], {}};
      std::memcpy(seen.weights.data(), page.value().weights.data() + i * sizeof seen.weights, sizeof seen.weights);
      CHECK(rows.emplace(page.value().keys[i], seen).second);
    }
  }
  return rows;
}

std::map<std::uint64_t, Seen> copy_of(const Store& store) {
  std::map<std::uint64_t, Seen> rows;
  const auto page = store.scan(1, 0, 1u << 30, false);
  REQUIRE(page.is_ok());
  for (std::size_t i = 0; i < page.value().keys.size(); ++i) {
    Seen seen{page.value().versions[i], page.value().update_counts[i], {}};
    std::copy_n(page.value().rows.data() + i * kDim, kDim, seen.weights.begin());
    rows.emplace(page.value().keys[i], seen);
  }
  return rows;
}

}  // namespace

TEST_CASE("a snapshot under writers is the copy of its instant; a small side buffer makes them wait") {
  std::uint64_t page_bytes = 0;
  SUBCASE("slot by slot") { page_bytes = 16u << 10; }
  SUBCASE("a table that fits a page, stripe by stripe") { page_bytes = 4u << 20; }
  const auto store = filled(kSchema);
  const auto before = copy_of(*store);
  auto snapshot = store->snapshot({.side_budget_bytes = 64u << 10});
  REQUIRE(snapshot.is_ok());
  CHECK(store->snapshot({}).status().code() == Code::kFailedPrecondition);
  std::atomic<bool> is_over{false};
  std::atomic<std::uint64_t> writes{0};
  std::vector<std::thread> writers;
  for (std::uint64_t writer = 0; writer < 2; ++writer) {
    writers.emplace_back([&, writer] {
      const std::vector<float> grads(64 * kDim, 1.0f);
      std::vector<std::uint64_t> keys(64);
      for (std::uint64_t round = 0; !is_over; ++round) {
        for (std::uint64_t i = 0; i < keys.size(); ++i) keys[i] = (round * 97 + i * 311 + writer) % (kRows * 2);
        if (round % 7 == 0) {
          CHECK(store->erase(1, keys).is_ok());
        } else {
          CHECK(store->apply(1, keys, grads.data(), {.lr = 1.0f}).is_ok());
        }
        ++writes;
      }
    });
  }
  while (snapshot.value()->stats().writes_stalled == 0) std::this_thread::yield();
  const auto rows = dump(*snapshot.value(), page_bytes);
  is_over = true;
  snapshot.value()->end();
  for (std::thread& thread : writers) thread.join();
  CHECK(rows == before);
  const SnapshotStats stats = snapshot.value()->stats();
  CHECK(stats.rows_saved > 0);
  CHECK(stats.side_bytes_most <= (64u << 10) + 2 * 64 * (kDim * sizeof(float) + 64));
  CHECK(store->snapshot({}).is_ok());
}

TEST_CASE("a dump that does not move is given up, and the writers go on") {
  const auto store = filled(kSchema);
  auto snapshot = store->snapshot({.side_budget_bytes = 1024, .longest_stall = std::chrono::milliseconds(20)});
  REQUIRE(snapshot.is_ok());
  std::vector<std::uint64_t> keys(kRows);
  std::iota(keys.begin(), keys.end(), 0);
  const std::vector<float> grads(kRows * kDim, 1.0f);
  for (int round = 0; round < 3; ++round) REQUIRE(store->apply(1, keys, grads.data(), {.lr = 0.5f}).is_ok());
  const auto page = snapshot.value()->next(1, 1u << 20);
  CHECK(page.status().code() == Code::kResourceExhausted);
  CHECK(page.status().message().find("training goes on") != std::string::npos);
}

TEST_CASE("only what changed since a snapshot, and rows put back as they were") {
  const auto store = filled(kSchema);
  std::vector<std::uint64_t> base;
  {
    auto first = store->snapshot({});
    REQUIRE(first.is_ok());
    base = first.value()->slot_versions();
  }
  const std::vector<std::uint64_t> touched{3, 5, kRows + 1};
  const std::vector<float> grads(touched.size() * kDim, 1.0f);
  REQUIRE(store->apply(1, touched, grads.data(), {.lr = 1.0f}).is_ok());
  auto second = store->snapshot({.since = base});
  REQUIRE(second.is_ok());
  const auto delta = dump(*second.value(), 1u << 20);
  REQUIRE(delta.size() == touched.size());
  for (const std::uint64_t key : touched) CHECK(delta.contains(key));
  CHECK(store->snapshot({.since = {1, 2}}).status().code() == Code::kInvalidArgument);

  auto fresh = Store::create({.slot_count = 256, .lineage = 9});
  REQUIRE(fresh.is_ok());
  REQUIRE(fresh.value()->create_table(kSchema).is_ok());
  std::vector<std::uint64_t> keys, versions;
  std::vector<std::uint32_t> counts;
  std::vector<float> weights;
  for (const auto& [key, row] : delta) {
    keys.push_back(key);
    versions.push_back(row.version);
    counts.push_back(row.update_count);
    weights.insert(weights.end(), row.weights.begin(), row.weights.end());
  }
  const StoredRows rows{keys, versions, counts, std::as_bytes(std::span(weights)), {}};
  REQUIRE(fresh.value()->install(1, rows).is_ok());
  CHECK(copy_of(*fresh.value()) == delta);
  CHECK(fresh.value()->install(1, {keys, versions, counts, {}, {}}).code() == Code::kInvalidArgument);
}

TEST_CASE("rows put back without their optimizer's state begin anew: the first step of Adam is as long as its rate") {
  TableSchema schema = kSchema;
  schema.id = 2;
  schema.name = "n/adam";
  schema.optimizer = {.kind = OptimizerKind::kAdam};
  const auto store = Store::create({.slot_count = 256});
  REQUIRE(store.is_ok());
  REQUIRE(store.value()->create_table(schema).is_ok());
  const std::vector<std::uint64_t> keys{7}, versions{1};
  const std::vector<std::uint32_t> counts{1'000};
  const std::vector<float> weights(kDim, 1.0f), grads(kDim, 3.0f);
  REQUIRE(store.value()->install(2, {keys, versions, counts, std::as_bytes(std::span(weights)), {}}).is_ok());
  REQUIRE(store.value()->apply(2, keys, grads.data(), {.lr = 0.25f}).is_ok());
  const auto page = store.value()->scan(2, 0, 10, false);
  REQUIRE(page.is_ok());
  CHECK(page.value().update_counts == std::vector<std::uint32_t>{1});
  for (const float value : page.value().rows) CHECK(value == doctest::Approx(0.75f).epsilon(1e-5));
}

}  // namespace sparserow
