// Filters against exact counts, and what a table's policy refuses.
#include "store/table/admission.h"

#include <doctest/doctest.h>

#include <cmath>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "store/store.h"

namespace sparserow {
namespace {

constexpr std::uint32_t kDim = 4;

TableSchema schema_of(const RowPolicy& policy) {
  return {.id = 5,
          .name = "n/t",
          .dim = kDim,
          .seed = 11,
          .init = {.kind = InitKind::kUniform, .a = -1, .b = 1},
          .optimizer = {.kind = OptimizerKind::kAdagrad},
          .policy = policy};
}

std::unique_ptr<Store> store_of(const RowPolicy& policy, StoreOptions options = {.slot_count = 64}) {
  auto store = Store::create(options);
  REQUIRE(store.is_ok());
  const Status made = store.value()->create_table(schema_of(policy));
  INFO(made.message());
  REQUIRE(made.is_ok());
  return std::move(store).value();
}

std::vector<bool> found(const Store& store, const std::vector<std::uint64_t>& keys,
                        std::vector<float>* rows = nullptr) {
  std::vector<float> weights(keys.size() * kDim);
  std::vector<std::uint8_t> mask(keys.size());
  REQUIRE(store.pull(5, keys, Dtype::kFloat32, reinterpret_cast<std::byte*>(weights.data()), {.found = mask}).is_ok());
  if (rows != nullptr) *rows = weights;
  return {mask.begin(), mask.end()};
}

void push(Store& store, const std::vector<std::uint64_t>& keys) {
  const std::vector<float> grads(keys.size() * kDim, 1.0f);
  const Status pushed = store.apply(5, keys, grads.data(), {.lr = 0.5f});
  INFO(pushed.message());
  REQUIRE(pushed.is_ok());
}

std::uint64_t refused(const Store& store) { return store.stats()[0].admission.refused; }

TEST_CASE("a filter counts as a map does while ids differ") {
  std::mt19937_64 random(7);
  CountingFilter<24> filter;
  std::map<std::uint32_t, std::uint32_t> exact;
  for (int i = 0; i < 200'000; ++i) {
    const auto id = static_cast<std::uint32_t>(random() % 5000) * 3001;  // clusters as hashes do not
    if (random() % 8 == 0) {
      filter.erase(id);
      exact.erase(id);
    } else {
      REQUIRE(filter.raise(id, 1u << 20) == std::min<std::uint32_t>(++exact[id], 255));
    }
    REQUIRE(filter.count((id + 1) & 0xffffff) ==
            (exact.contains((id + 1) & 0xffffff) ? exact[(id + 1) & 0xffffff] : 0));
    REQUIRE(filter.entries() == exact.size());
  }
  CHECK(filter.bytes() <= 4 * exact.size() * 2);
  CountingFilter<24> copy;
  REQUIRE(copy.load(filter.entries_sorted()).is_ok());
  CHECK(copy.entries_sorted() == filter.entries_sorted());
  for (const auto& [id, count] : exact) CHECK(copy.count(id) == std::min<std::uint32_t>(count, 255));
}

TEST_CASE("a filter errs as often as its entries say") {
  std::mt19937_64 random(3);
  CountingFilter<12> filter;
  constexpr int kEntries = 200;
  while (filter.entries() < kEntries) filter.raise(static_cast<std::uint32_t>(random() >> 52), kEntries);
  int taken_for_another = 0;
  constexpr int kProbes = 100'000;
  for (int i = 0; i < kProbes; ++i) taken_for_another += filter.count(static_cast<std::uint32_t>(random() >> 52)) > 0;
  const double estimate = static_cast<double>(kEntries) / 4096;
  CHECK(std::abs(static_cast<double>(taken_for_another) / kProbes - estimate) < 0.005);  // six deviations
}

TEST_CASE("a full filter forgets what it saw least") {
  CountingFilter<24> filter;
  for (std::uint32_t id = 0; id < 64; ++id) {
    for (std::uint32_t i = 0; i < (id < 32 ? 1 : 5); ++i) filter.raise(id << 10, 64);
  }
  CHECK(filter.entries() == 64);
  CHECK(filter.raise(1u << 20, 64) == 1);
  CHECK(filter.entries() == 33);
  for (std::uint32_t id = 0; id < 64; ++id) CHECK(filter.count(id << 10) == (id < 32 ? 0u : 2u));
}

TEST_CASE("a damaged image is refused") {
  CountingFilter<24> filter;
  CHECK(filter.load(std::vector<std::uint32_t>{5u << 8}).code() == Code::kDataLoss);                   // no count
  CHECK(filter.load(std::vector<std::uint32_t>{5u << 8 | 1, 5u << 8 | 2}).code() == Code::kDataLoss);  // twice
  CountingFilter<12> small;
  CHECK(small.load(std::vector<std::uint32_t>{1u << 20 | 1}).code() == Code::kDataLoss);  // more bits than it has
}

TEST_CASE("a key gets its row at its n-th push; before that it reads as its initial row") {
  const auto store = store_of({.admit_after = 3});
  const std::vector<std::uint64_t> keys{1, 2, 3, 4};
  std::vector<float> before, after;
  CHECK(found(*store, keys, &before) == std::vector<bool>(4, false));
  for (int i = 0; i < 2; ++i) push(*store, keys);
  CHECK(found(*store, keys, &after) == std::vector<bool>(4, false));
  CHECK(before == after);
  CHECK(refused(*store) == 8);
  CHECK(store->stats()[0].admission.entries == 4);
  push(*store, {1, 2});
  CHECK(found(*store, keys, &after) == std::vector<bool>{true, true, false, false});
  CHECK(after[0] == doctest::Approx(before[0] - 0.5));  // the third gradient alone
  CHECK(refused(*store) == 8);
  CHECK(store->stats()[0].admission.entries == 2);  // who has a row is forgotten
  push(*store, {3, 3});                             // each is a push of its own
  CHECK(found(*store, {3}) == std::vector<bool>{true});
  REQUIRE(store->erase(5, std::vector<std::uint64_t>{1}).is_ok());
  push(*store, {1});
  CHECK(found(*store, {1}) == std::vector<bool>{false});  // it begins anew
}

TEST_CASE("assign always gives a row") {
  const auto store = store_of({.admit_after = 200});
  const std::vector<float> rows(kDim, 2.0f);
  REQUIRE(store->assign(5, std::vector<std::uint64_t>{9}, rows.data()).is_ok());
  CHECK(found(*store, {9}) == std::vector<bool>{true});
  push(*store, {9});
  CHECK(refused(*store) == 0);
}

TEST_CASE("a coin decides as often as it says, and the same for the same pushes") {
  const auto run = [](std::uint64_t first) {
    const auto store = store_of({.admit_probability = 0.25f});
    std::vector<std::uint64_t> keys(20'000);
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = first + i;
    push(*store, keys);
    return found(*store, keys);
  };
  const auto once = run(0);
  CHECK(once == run(0));
  const auto admitted = static_cast<double>(std::count(once.begin(), once.end(), true));
  CHECK(std::abs(admitted - 5000) < 6 * std::sqrt(20'000 * 0.25 * 0.75));
  const auto store = store_of({.admit_probability = 0.25f});
  std::vector<std::uint64_t> keys{1, 2, 3, 4, 5, 6, 7, 8};
  for (int i = 0; i < 60; ++i) push(*store, keys);
  CHECK(found(*store, keys) == std::vector<bool>(8, true));  // each observation has a coin of its own
}

TEST_CASE("filters are within the budget, and go with their table") {
  constexpr std::uint64_t kBudget = 1u << 20;
  const auto store = store_of({.admit_after = 9}, {.memory_budget_bytes = kBudget, .slot_count = 64});
  std::mt19937_64 random(1);
  bool is_full = false;
  for (int i = 0; i < 4000 && !is_full; ++i) {
    std::vector<std::uint64_t> keys(100);
    for (auto& key : keys) key = random();
    const std::vector<float> grads(keys.size() * kDim, 1.0f);
    is_full = store->apply(5, keys, grads.data(), {.lr = 0.5f}).code() == Code::kResourceExhausted;
    REQUIRE(store->used_bytes() <= kBudget);
  }
  CHECK(is_full);
  const AdmissionStats stats = store->stats()[0].admission;
  CHECK(stats.bytes > kBudget / 2);
  CHECK(stats.error_rate == doctest::Approx(static_cast<double>(stats.entries) / 64 / (1 << 24)));
  REQUIRE(store->drop_table(5).is_ok());
  CHECK(store->used_bytes() == 0);
}

TEST_CASE("admit_capacity bounds what is remembered") {
  const auto store = store_of({.admit_after = 3, .admit_capacity = 64 * 50});
  std::mt19937_64 random(2);
  for (int i = 0; i < 100; ++i) {
    std::vector<std::uint64_t> keys(500);
    for (auto& key : keys) key = random();
    push(*store, keys);
  }
  CHECK(store->stats()[0].admission.entries <= 64 * 50);
  CHECK(store->stats()[0].rows == 0);
}

TEST_CASE("what a slot remembers can be taken to another store") {
  std::mt19937_64 random(4);
  std::vector<std::uint64_t> keys(5000);
  for (auto& key : keys) key = random();
  const auto from = store_of({.admit_after = 2});
  const auto to = store_of({.admit_after = 2});
  push(*from, keys);
  for (std::uint32_t slot = 0; slot < 64; ++slot) {
    const auto image = from->filter_image(5, slot);
    REQUIRE(image.is_ok());
    CHECK(image.value().size() > 1);
    REQUIRE(to->load_filter(5, slot, image.value()).is_ok());
    CHECK(to->filter_image(5, slot).value() == image.value());
  }
  CHECK(to->stats()[0].admission.entries == from->stats()[0].admission.entries);
  push(*to, keys);
  CHECK(found(*to, keys) == std::vector<bool>(keys.size(), true));
  REQUIRE(to->load_filter(5, 0, {}).is_ok());
  CHECK(to->filter_image(5, 0).value().empty());
  CHECK(to->load_filter(5, 0, std::vector<std::uint64_t>{9, 9, 9}).code() == Code::kDataLoss);
  CHECK(to->load_filter(5, 64, std::vector<std::uint64_t>{1}).code() == Code::kInvalidArgument);
  const auto plain = store_of({});
  CHECK(plain->filter_image(5, 0).status().code() == Code::kFailedPrecondition);
}

}  // namespace
}  // namespace sparserow
