// A store with an SSD gives what one without gives, whatever was evicted in between; threads, full disks, damage.
// A million random operations are in tests/property/test_tiers_model.py.
#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "ssd_engines.h"
#include "store/changes/change_log.h"
#include "store/changes/change_page.h"
#include "store/open_ssd_tier.h"
#include "store/snapshot.h"
#include "store/store.h"
#include "temporary_folder.h"

namespace sparserow {
namespace {

namespace fs = std::filesystem;

constexpr std::uint32_t kDim = 8;
constexpr std::uint64_t kBudget = 256u << 10;

TableSchema schema_of(std::uint32_t id, OptimizerKind kind = OptimizerKind::kAdagrad) {
  return {.id = id,
          .name = "n/t" + std::to_string(id),
          .dim = kDim,
          .seed = 3,
          .init = {.kind = InitKind::kUniform, .a = -1, .b = 1},
          .optimizer = {.kind = kind}};
}

// The index of so many rows has room beside the budget.
StoreOptions tiered(const Folder& folder, std::uint64_t rows = 20'000, std::uint64_t max_bytes = 0) {
  return {.memory_budget_bytes = with_index(kBudget, rows),
          .slot_count = 4,
          .ssd = {.path = folder.path().string(),
                  .max_bytes = max_bytes,
                  .cluster_id = 7,
                  .shard = 1,
                  .engine = ssd_engine,
                  .direct_io = ssd_direct_io}};
}

std::unique_ptr<Store> open(const StoreOptions& options) {
  auto store = Store::create(options);
  INFO(store.status().message());
  REQUIRE(store.is_ok());
  return std::move(store).value();
}

// Without versions: of the rows of one push, one that waits for the SSD may get its own after the others.
struct Rows {
  std::vector<float> weights;
  std::vector<std::uint8_t> found;
  bool operator==(const Rows&) const = default;
};

Rows pull(const Store& store, std::uint32_t table, const std::vector<std::uint64_t>& keys) {
  Rows rows{std::vector<float>(keys.size() * kDim), std::vector<std::uint8_t>(keys.size())};
  const Status status = store.pull(table, keys, Dtype::kFloat32, reinterpret_cast<std::byte*>(rows.weights.data()),
                                   {.found = rows.found});
  INFO(status.message());
  REQUIRE(status.is_ok());
  return rows;
}

struct Scanned {
  std::vector<std::uint64_t> keys;
  std::vector<std::uint32_t> counts;
  std::vector<float> rows, state;
  bool operator==(const Scanned&) const = default;
};

Scanned scan(const Store& store, std::uint32_t table, std::uint32_t page_rows) {
  Scanned all;
  std::set<std::pair<std::uint32_t, std::uint64_t>> versions;  // of each slot, where a version stands for one write
  std::uint64_t cursor = 0;
  const auto append = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
  do {
    auto page = store.scan(table, cursor, page_rows, true);
    REQUIRE(page.is_ok());
    append(all.keys, page.value().keys);
    for (std::size_t i = 0; i < page.value().keys.size(); ++i) {
      const std::uint32_t slot = slot_of(row_hash(table, page.value().keys[i]), store.options().slot_count);
      REQUIRE(versions.emplace(slot, page.value().versions[i]).second);
    }
    append(all.counts, page.value().update_counts);
    append(all.rows, page.value().rows);
    append(all.state, page.value().state);
    cursor = page.value().next_cursor;
  } while (cursor != 0);
  return all;
}

std::vector<std::uint64_t> random_keys(std::mt19937_64& random, std::uint64_t bound, std::size_t count) {
  std::vector<std::uint64_t> keys(count);
  for (auto& key : keys) key = random() % bound;
  return keys;
}

std::vector<float> random_grads(std::mt19937_64& random, std::size_t rows) {
  std::vector<float> grads(rows * kDim);
  for (auto& grad : grads) grad = static_cast<float>(static_cast<double>(random() >> 40) * 0x1p-24 - 0.5);
  return grads;
}

void fill(Store& store, std::uint32_t table, std::uint64_t begin, std::uint64_t end) {
  for (std::uint64_t first = begin; first < end; first += 500) {
    std::vector<std::uint64_t> keys;
    for (std::uint64_t key = first; key < std::min(end, first + 500); ++key) keys.push_back(key);
    const std::vector<float> grads(keys.size() * kDim, 1.0f);
    const Status status = store.apply(table, keys, grads.data(), {.lr = 0.1f});
    INFO(status.message());
    REQUIRE(status.is_ok());
  }
}

}  // namespace

TEST_CASE("random operations give the same bits with and without an SSD") {
  const std::uint64_t seed = std::random_device()();
  MESSAGE("seed " << seed);
  std::mt19937_64 random(seed);
  const Folder folder;
  const auto store = open(tiered(folder));
  const auto plain = open({.slot_count = 4});
  for (const std::uint32_t table : {1u, 2u}) {
    REQUIRE(store->create_table(schema_of(table)).is_ok());
    REQUIRE(plain->create_table(schema_of(table)).is_ok());
  }
  constexpr std::uint64_t kKeys = 12000;
  constexpr int kSteps = 1200;
  int drops = 0;
  for (int step = 0; step < kSteps; ++step) {
    const std::uint32_t table = 1 + static_cast<std::uint32_t>(random() % 2);
    const auto keys = random_keys(random, random() % 4 == 0 ? kKeys / 50 : kKeys, 1 + random() % 80);
    const std::uint64_t act = random() % 100;
    if (act < 45) {
      REQUIRE(pull(*store, table, keys) == pull(*plain, table, keys));
    } else if (act < 85) {
      const auto grads = random_grads(random, keys.size());
      auto reserved = store->reserve(table, keys);
      REQUIRE(reserved.is_ok());
      if (random() % 2 == 0) (void)pull(*store, table, random_keys(random, kKeys, 200));  // pushes rows out
      REQUIRE(store->apply(table, keys, grads.data(), {.lr = 0.1f, .reservation = &reserved.value()}).is_ok());
      REQUIRE(plain->apply(table, keys, grads.data(), {.lr = 0.1f}).is_ok());
    } else if (act < 90) {
      const auto rows = random_grads(random, keys.size());
      REQUIRE(store->assign(table, keys, rows.data()).is_ok());
      REQUIRE(plain->assign(table, keys, rows.data()).is_ok());
    } else if (act < 94) {
      const auto some = std::vector(keys.begin(), keys.begin() + 1 + static_cast<std::ptrdiff_t>(keys.size() / 8));
      REQUIRE(store->erase(table, some).value() == plain->erase(table, some).value());
    } else if (act < 99) {
      REQUIRE(store->fetch_to_memory(table, keys).is_ok());
    } else if (drops < 2 && step < kSteps / 2) {  // then the tables grow beyond memory, whatever the seed
      ++drops;
      for (Store* each : {store.get(), plain.get()}) {
        REQUIRE(each->drop_table(table).is_ok());
        REQUIRE(each->create_table(schema_of(table)).is_ok());
      }
    }
    REQUIRE(store->used_bytes() <= store->options().memory_budget_bytes);
    if (step % 300 == 299) REQUIRE(scan(*store, table, 97) == scan(*plain, table, 1000));
  }
  for (const std::uint32_t table : {1u, 2u}) CHECK(scan(*store, table, 500) == scan(*plain, table, 500));
  const auto left = store->stats();
  const auto right = plain->stats();
  for (std::size_t i = 0; i < left.size(); ++i) CHECK(left[i].rows == right[i].rows);
  CHECK(store->tier_stats()->rows_evicted > 1000);
  CHECK(store->tier_stats()->ssd.rows_read > 1000);
}

TEST_CASE("no update is lost between threads that push rows out") {
  const Folder folder;
  const auto store = open(tiered(folder, 5000));
  const TableSchema schema = schema_of(1, OptimizerKind::kSgd);
  REQUIRE(store->create_table(schema).is_ok());
  constexpr std::uint64_t kKeys = 6000;
  constexpr int kThreads = 4;
  constexpr int kSteps = 60;
  std::vector<std::atomic<std::uint32_t>> updates(kKeys);
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937_64 random(static_cast<std::uint64_t>(thread));
      std::vector<float> out(64 * kDim);
      for (int step = 0; step < kSteps; ++step) {
        const auto keys = random_keys(random, kKeys, 64);
        if (!store->pull(1, keys, Dtype::kFloat32, reinterpret_cast<std::byte*>(out.data())).is_ok()) ++failures;
        const std::vector<float> ones(keys.size() * kDim, 1.0f);
        const Status status = store->apply(1, keys, ones.data(), {.lr = 1.0f});
        if (status.is_ok()) {
          for (const std::uint64_t key : keys) ++updates[key];
        } else if (status.code() != Code::kResourceExhausted) {
          ++failures;
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(failures == 0);
  std::map<std::uint64_t, std::uint32_t> counted;
  const Scanned all = scan(*store, 1, 1000);
  for (std::size_t i = 0; i < all.keys.size(); ++i) counted[all.keys[i]] = all.counts[i];
  for (std::uint64_t key = 0; key < kKeys; ++key) {
    REQUIRE(counted[key] == updates[key]);
  }
  CHECK(store->tier_stats()->rows_evicted > 100);
}

TEST_CASE("rows that many miss at once are read once") {
  const Folder folder;
  const auto store = open(tiered(folder));
  REQUIRE(store->create_table(schema_of(1)).is_ok());
  fill(*store, 1, 0, 12000);
  constexpr std::uint64_t kRounds = 20, kKeys = 300;
  constexpr std::size_t kThreads = 8;
  const std::uint64_t before = store->tier_stats()->ssd.rows_read;
  std::barrier begin(kThreads);
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (std::size_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&] {
      for (std::uint64_t round = 0; round < kRounds; ++round) {
        std::vector<std::uint64_t> keys(kKeys);
        std::iota(keys.begin(), keys.end(), round * kKeys);  // long since pushed out by those that came after
        begin.arrive_and_wait();
        if (!store->fetch_to_memory(1, keys).is_ok()) ++failures;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(failures == 0);
  const std::uint64_t read = store->tier_stats()->ssd.rows_read - before;
  CHECK(read >= kRounds * kKeys);
  CHECK(read < kRounds * kKeys * 3 / 2);  // a token that many share has moved: read again
}

TEST_CASE("a full SSD refuses a step whole, and work goes on when there is room") {
  const Folder folder;
  const bool is_pages = ssd_engine == SsdEngine::kPages;  // whose files are 8 MiB at least
  const auto store = open(tiered(folder, 200'000, is_pages ? 8u << 20 : 2u << 20));
  REQUIRE(store->create_table(schema_of(1)).is_ok());
  std::uint64_t next = 0;
  Status status;
  std::vector<std::uint64_t> keys(200);
  const std::vector<float> ones(keys.size() * kDim, 1.0f);
  while (status.is_ok() && next < 200000) {
    for (auto& key : keys) key = next++;
    status = store->apply(1, keys, ones.data(), {.lr = 0.1f});
  }
  REQUIRE(status.code() == Code::kResourceExhausted);
  CHECK(status.message().find("ssd_bytes") != std::string::npos);
  const Rows refused = pull(*store, 1, keys);
  for (const std::uint8_t found : refused.found) CHECK(found == 0);
  for (std::uint64_t key = 0; key < next - keys.size(); key += 97) {
    REQUIRE(pull(*store, 1, {key}).found[0] == 1);
  }
  REQUIRE(store->drop_table(1).is_ok());
  REQUIRE(store->create_table(schema_of(1)).is_ok());
  fill(*store, 1, 0, 4000);
  CHECK(pull(*store, 1, {3999}).found[0] == 1);
}

TEST_CASE("the file has little beside the rows, however many tables there are") {
  if (ssd_engine != SsdEngine::kPages) return;  // RocksDB has rows of all tables in one order
  for (const std::uint32_t tables : {40u, 600u}) {
    CAPTURE(tables);
    const Folder folder;
    StoreOptions options = tiered(folder);
    options.slot_count = 1024;
    options.memory_budget_bytes = tables == 40 ? 8 << 20 : 12 << 20;
    const auto store = open(options);
    for (std::uint32_t table = 1; table <= tables; ++table) REQUIRE(store->create_table(schema_of(table)).is_ok());
    const std::uint64_t rows_of_table = 120'000 / tables;
    constexpr std::uint64_t kAtOnce = 20;
    for (std::uint64_t key = 0; key < rows_of_table; key += kAtOnce) {
      for (std::uint32_t table = 1; table <= tables; ++table) fill(*store, table, key, key + kAtOnce);
    }
    const SsdStats stats = store->tier_stats()->ssd;
    const std::uint64_t image_bytes = stats.bytes_written / stats.rows_written;
    MESSAGE(tables << " tables: " << stats.rows_written << " rows of " << image_bytes << " bytes written, file of "
                   << stats.file_bytes << ", " << stats.disk_bytes_written << " written to the disk");
    REQUIRE(stats.rows_written > 50'000);
    CHECK(stats.file_bytes < 3 * stats.rows_written * image_bytes);
    CHECK(stats.disk_bytes_written < 4 * stats.rows_written * image_bytes);
    for (std::uint32_t table = 1; table <= tables; table += 39) {
      const Rows rows = pull(*store, table, {0, rows_of_table - 1});
      CHECK(rows.found == std::vector<std::uint8_t>{1, 1});
    }
  }
}

// A store of table 1 whose rows are all on the SSD, and some of them in memory too.
std::unique_ptr<Store> with_rows_on_ssd(const Folder& folder, std::uint32_t slots, std::uint64_t rows) {
  StoreOptions options = tiered(folder);
  options.slot_count = slots;
  options.memory_budget_bytes += 3 * kBudget;
  auto store = open(options);
  REQUIRE(store->create_table(schema_of(1)).is_ok());
  fill(*store, 1, 0, rows);
  REQUIRE(store->write_back().is_ok());
  return store;
}

TEST_CASE("a scan reads what it gives, however many rows a slot has") {
  constexpr std::uint64_t kRows = 20'000;
  for (const std::uint32_t slots : {4u, 128u}) {
    CAPTURE(slots);
    const Folder folder;
    const auto store = with_rows_on_ssd(folder, slots, kRows);
    const std::uint64_t before = store->tier_stats()->ssd.rows_visited;
    CHECK(scan(*store, 1, 1000).keys.size() == kRows);
    const std::uint64_t visited = store->tier_stats()->ssd.rows_visited - before;
    MESSAGE(visited << " rows visited for " << kRows);
    if (ssd_engine == SsdEngine::kPages) CHECK(visited > kRows / 2);
    CHECK(visited < 3 * kRows);  // a page of a scan ends within what is read at once
  }
}

TEST_CASE("a follower's pages and a snapshot's read what they give, however many rows a slot has") {
  constexpr std::uint64_t kRows = 20'000;
  constexpr std::uint64_t kPageBytes = 32 << 10;
  for (const std::uint32_t slots : {4u, 128u}) {
    CAPTURE(slots);
    const Folder folder;
    const auto store = with_rows_on_ssd(folder, slots, kRows);
    const auto visited = [&store] { return store->tier_stats()->ssd.rows_visited; };

    std::uint64_t before = visited();
    const std::vector<std::uint64_t> nothing(slots, 0);
    REQUIRE(store->changes().open("follower", nothing, {}, std::chrono::seconds(0)).is_ok());
    StoreOptions in_memory;
    in_memory.slot_count = slots;
    const auto follower = open(in_memory);
    REQUIRE(follower->create_table(schema_of(1)).is_ok());
    std::uint64_t pages = 0;
    for (std::uint32_t begin = 0;; ++pages) {
      const auto page = read_changes(*store, "follower", begin, kPageBytes);
      REQUIRE(page.is_ok());
      CHECK(page.value().bytes.size() <= kPageBytes);
      begin = page.value().next_begin;
      const auto applied = apply_changes(*follower, page.value().bytes);
      REQUIRE(applied.is_ok());
      REQUIRE(store->changes().ack("follower", {}, {}, applied.value().part).is_ok());
      if (page.value().is_last) break;
    }
    CHECK(pages > kRows * 16 / kPageBytes);
    CHECK(scan(*follower, 1, 1000).keys.size() == kRows);
    const std::uint64_t for_pages = visited() - before;
    MESSAGE(for_pages << " rows visited by " << pages << " pages for a follower of " << kRows);
    CHECK(for_pages < 4 * kRows);

    before = visited();
    const auto snapshot = store->snapshot({});
    REQUIRE(snapshot.is_ok());
    std::uint64_t rows = 0;
    for (std::uint32_t done = 0; done < slots;) {
      const auto page = snapshot.value()->next(1, kPageBytes);
      REQUIRE(page.is_ok());
      rows += page.value().keys.size();
      done = page.value().end_slot;
    }
    CHECK(rows == kRows);
    CHECK(visited() - before < 4 * kRows);
  }
}

TEST_CASE("the facts of one row are one read, however many rows its slot has") {
  const Folder folder;
  const auto store = open(tiered(folder));
  REQUIRE(store->create_table(schema_of(1)).is_ok());
  fill(*store, 1, 0, 20'000);
  REQUIRE(store->write_back().is_ok());
  const ChangeLog log(*store);
  const SsdStats before = store->tier_stats()->ssd;
  for (std::uint64_t key = 0; key < 20'100; key += 100) {
    const auto facts = log.facts(1, key);
    REQUIRE(facts.is_ok());
    CHECK(facts.value().exists == (key < 20'000));
  }
  const SsdStats after = store->tier_stats()->ssd;
  CHECK(after.rows_visited == before.rows_visited);
  CHECK(after.rows_read - before.rows_read <= 200);
}

TEST_CASE("a damaged SSD makes its table fail, and no other") {
  const Folder folder;
  constexpr std::uint64_t kRows = 60'000;  // of which most are in pages that have left their buffers
  const auto store = open(tiered(folder, kRows));
  REQUIRE(store->create_table(schema_of(1)).is_ok());
  REQUIRE(store->create_table(schema_of(2)).is_ok());
  fill(*store, 1, 0, kRows);
  REQUIRE(store->write_back().is_ok());
  for (const auto& entry : fs::directory_iterator(folder.path() / "rows")) {
    if (entry.path().extension() != ".blob" && entry.path().filename() != "pages") continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    const auto size = static_cast<std::streamoff>(fs::file_size(entry.path()));
    for (std::streamoff at = 100; at < size - 100; at += 50) {
      file.seekp(at);
      file.put('!');
    }
  }
  std::vector<std::uint64_t> keys;
  for (std::uint64_t key = 0; key < kRows; key += 70) keys.push_back(key);
  std::vector<float> out(keys.size() * kDim);
  const Status status = store->pull(1, keys, Dtype::kFloat32, reinterpret_cast<std::byte*>(out.data()));
  REQUIRE(status.code() == Code::kDataLoss);
  CHECK(status.message().find("n/t1") != std::string::npos);
  CHECK(status.message().find("drop it") != std::string::npos);
  CHECK(store->reserve(1, keys).status().code() == Code::kDataLoss);
  CHECK(store->scan(1, 0, 10, false).status().code() == Code::kDataLoss);
  CHECK(pull(*store, 2, {1}).found[0] == 0);
  const std::vector<float> ones(kDim, 1.0f);
  CHECK(store->apply(2, std::vector<std::uint64_t>{1}, ones.data(), {.lr = 0.1f}).is_ok());
  REQUIRE(store->drop_table(1).is_ok());
  REQUIRE(store->create_table(schema_of(1)).is_ok());
  CHECK(store->apply(1, std::vector<std::uint64_t>{1}, ones.data(), {.lr = 0.1f}).is_ok());
}

TEST_CASE("a folder belongs to one shard of one cluster") {
  const Folder folder;
  const StoreOptions options = tiered(folder);
  {
    const auto store = open(options);
    REQUIRE(store->create_table(schema_of(1)).is_ok());
    fill(*store, 1, 0, 3000);
    CHECK(Store::create(options).status().code() == Code::kFailedPrecondition);
  }
  const auto message_of = [](const StoreOptions& with) { return Store::create(with).status().message(); };
  StoreOptions other = options;
  other.ssd.cluster_id = 8;
  CHECK(message_of(other).find("'cluster 7'") != std::string::npos);
  other = options;
  other.ssd.shard = 2;
  CHECK(message_of(other).find("'shard 1'") != std::string::npos);
  other = options;
  other.memory_budget_bytes = 0;
  CHECK(message_of(other).find("memory_budget_bytes") != std::string::npos);
  other = options;
  other.ssd.path = (folder.path() / "missing").string();
  CHECK(message_of(other).find("is no folder") != std::string::npos);
  const Folder foreign;
  std::ofstream(foreign.path() / "thesis.txt") << "mine";
  other = options;
  other.ssd.path = foreign.path().string();
  CHECK(message_of(other).find("thesis.txt") != std::string::npos);
  CHECK(fs::exists(foreign.path() / "thesis.txt"));
  const auto again = open(options);  // its own: emptied
  REQUIRE(again->create_table(schema_of(1)).is_ok());
  CHECK(pull(*again, 1, {1}).found[0] == 0);
  CHECK(again->stats()[0].rows == 0);
}

TEST_CASE("a shard that is started again may have another engine, and its folder is emptied") {
  if (!SsdTier::has_rocksdb() || ssd_direct_io) return;
  const Folder folder;
  StoreOptions options = tiered(folder);
  for (int start = 0; start < 3; ++start) {
    const auto store = open(options);
    REQUIRE(store->create_table(schema_of(1)).is_ok());
    CHECK(pull(*store, 1, {1}).found[0] == 0);
    fill(*store, 1, 0, 4000);
    REQUIRE(store->write_back().is_ok());
    CHECK(fs::exists(folder.path() / "rows" / "pages") == (options.ssd.engine == SsdEngine::kPages));
    options.ssd.engine = options.ssd.engine == SsdEngine::kPages ? SsdEngine::kRocksdb : SsdEngine::kPages;
  }
  std::ofstream(folder.path() / "SPARSEROW") << "format 9\nhash 1\ncluster 7\nshard 1\n";
  CHECK(Store::create(options).status().message().find("'format 9'") != std::string::npos);
}

TEST_CASE("rows leave ahead of those that come, after a request has its answer") {
  const Folder folder;
  StoreOptions options = tiered(folder);
  options.memory_budget_bytes = with_index(8 * kBudget, 100'000);  // of which what an index may need to grow is little
  const auto store = open(options);
  REQUIRE(store->create_table(schema_of(1)).is_ok());
  const auto wait = [&store] {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (store->tier_stats()->is_making_room) {
      REQUIRE(std::chrono::steady_clock::now() < deadline);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  };
  fill(*store, 1, 0, 100'000);
  wait();
  constexpr std::uint64_t kRequests = 100, kKeys = 100;
  const TierStats before = *store->tier_stats();
  for (std::uint64_t request = 0; request < kRequests; ++request) {
    std::vector<std::uint64_t> keys(kKeys);
    std::iota(keys.begin(), keys.end(), request * kKeys);  // of rows that left memory long ago
    static_cast<void>(pull(*store, 1, keys));
    wait();
  }
  const TierStats after = *store->tier_stats();
  CHECK(after.rows_evicted - before.rows_evicted > kRequests * kKeys / 2);
  // With pages a tenth more leave for the index of those that were never on the SSD: requests make room for that.
  const std::uint64_t tenths = ssd_engine == SsdEngine::kPages ? 8 : 9;
  const std::uint64_t evicted = after.rows_evicted - before.rows_evicted;
  CHECK(after.background_evicted - before.background_evicted > evicted * tenths / 10);
  CHECK(store->used_bytes() <= options.memory_budget_bytes);
}

TEST_CASE("room is made where rows may leave, also when most places have only rows that a step holds") {
  constexpr std::uint32_t kHeld = 8, kHot = kHeld + 1;
  const Folder folder;
  const auto store = open(tiered(folder));
  for (std::uint32_t table = 1; table <= kHot; ++table) REQUIRE(store->create_table(schema_of(table)).is_ok());
  std::vector<std::uint64_t> keys(8);
  std::iota(keys.begin(), keys.end(), 0u);
  std::vector<Store::Reservation> reservations;
  for (std::uint32_t table = 1; table <= kHeld; ++table) {
    fill(*store, table, 0, keys.size());
    auto reserved = store->reserve(table, keys);
    REQUIRE(reserved.is_ok());
    reservations.push_back(std::move(reserved).value());
  }
  fill(*store, kHot, 0, 5000);
  std::vector<std::uint64_t> hot(1000);
  std::iota(hot.begin(), hot.end(), 0u);
  for (int turn = 0; turn < 10; ++turn) static_cast<void>(pull(*store, kHot, hot));  // the others look colder
  for (std::uint32_t table = 1; table <= kHeld; ++table) fill(*store, table, 100, 1000);
  CHECK(store->used_bytes() <= store->options().memory_budget_bytes);
}

TEST_CASE("a row of more prepared commits than are counted beside it stays in memory until the last of them") {
  constexpr std::size_t kCommits = 2'000;
  const Folder folder;
  const auto store = open(tiered(folder, 60'000));
  REQUIRE(store->create_table(schema_of(1)).is_ok());
  fill(*store, 1, 0, 1000);
  const std::vector<std::uint64_t> hot{42};
  std::vector<Store::Reservation> reservations;
  for (std::size_t i = 0; i < kCommits; ++i) {
    auto reserved = store->reserve(1, hot);
    INFO(i, ": ", reserved.status().message());
    REQUIRE(reserved.is_ok());
    reservations.push_back(std::move(reserved).value());
  }
  std::uint64_t next = 1000;
  const auto is_missed_after_others = [&] {
    fill(*store, 1, next, next + 4000);
    next += 4000;
    const std::uint64_t before = store->tier_stats()->misses;
    static_cast<void>(pull(*store, 1, hot));
    return store->tier_stats()->misses != before;
  };
  for (const std::size_t left : {kCommits, std::size_t{600}, std::size_t{100}, std::size_t{1}}) {
    reservations.resize(left);
    CHECK_FALSE(is_missed_after_others());
  }
  reservations.clear();
  for (; next < 56'000; next += 1000) {  // others that are used as often push it out then
    fill(*store, 1, next, next + 1000);
    std::vector<std::uint64_t> others(1000);
    std::iota(others.begin(), others.end(), next);
    for (int use = 0; use < 4; ++use) static_cast<void>(pull(*store, 1, others));
  }
  CHECK(is_missed_after_others());
}

TEST_CASE("room is made also where rows came in the order of their hash suffixes, as a checkpoint brings them") {
  constexpr std::uint32_t kTables = 8;  // of which one has rows
  constexpr std::size_t kPageRows = 200;
  const Folder folder;
  auto options = tiered(folder, 200'000);
  options.slot_count = 2;
  const auto store = open(options);
  for (std::uint32_t table = 1; table <= kTables; ++table) REQUIRE(store->create_table(schema_of(table)).is_ok());
  std::vector<std::uint64_t> keys(200'000);
  std::iota(keys.begin(), keys.end(), 0u);
  std::sort(keys.begin(), keys.end(),
            [](std::uint64_t left, std::uint64_t right) { return row_hash(1, left) < row_hash(1, right); });
  const std::vector<float> rows(kPageRows * kDim, 0.5f);
  for (std::size_t first = 0; first < keys.size(); first += kPageRows) {
    const Status status = store->assign(1, std::span(keys).subspan(first, kPageRows), rows.data());
    INFO(first, " rows: ", status.message());
    REQUIRE(status.is_ok());
  }
  CHECK(store->used_bytes() <= store->options().memory_budget_bytes);
}

TEST_CASE("rows that are written back leave the room that the SSD's index takes by them") {
  if (ssd_engine != SsdEngine::kPages) return;
  constexpr std::uint64_t kLeastIndexBytes = 10;  // of a row
  const Folder folder;
  const auto store = open(tiered(folder));
  const std::uint64_t budget = store->options().memory_budget_bytes;
  REQUIRE(store->create_table(schema_of(1)).is_ok());
  const std::vector<float> grads(kDim, 1);
  std::uint64_t rows = 0;
  const auto written_first = [&] { return rows - store->tier_stats()->rows_evicted; };  // by a write-back, of rows
  while (store->used_bytes() + kLeastIndexBytes * written_first() <= budget) {
    const std::vector<std::uint64_t> key{rows++};
    REQUIRE(store->apply(1, key, grads.data(), {.lr = 0.1f}).is_ok());
  }
  REQUIRE(store->write_back().is_ok());
  CHECK(store->used_bytes() <= budget);
  CHECK(scan(*store, 1, 500).keys.size() == rows);
}

TEST_CASE("memory that rows have left goes back to the system, also where others are beside them") {
  if (ssd_engine != SsdEngine::kPages || ssd_direct_io) return;
  constexpr std::uint64_t kRows = 400'000;  // of each of two tables
  const Folder folder;
  auto options = tiered(folder, 0);
  options.memory_budget_bytes = 128u << 20;
  const auto store = open(options);
  for (const std::uint32_t table : {1, 2}) REQUIRE(store->create_table(schema_of(table)).is_ok());
  const std::vector<float> ones(2000 * kDim, 1);
  std::vector<std::uint64_t> keys(2000);
  for (std::uint64_t row = 0; row < kRows; row += keys.size()) {
    std::iota(keys.begin(), keys.end(), row);
    for (const std::uint32_t table : {1, 2}) REQUIRE(store->apply(table, keys, ones.data(), {.lr = 0.1f}).is_ok());
  }
  const auto most = [&] { return store->used_bytes() / 6 * 7 + (12u << 20); };
  const auto pull_all = [&] {
    std::vector<Rows> out;
    for (std::uint64_t row = 0; row < kRows; row += keys.size()) {
      std::iota(keys.begin(), keys.end(), row);
      out.push_back(pull(*store, 1, keys));
    }
    return out;
  };
  const std::vector<Rows> before = pull_all();
  REQUIRE(store->drop_table(2).is_ok());
  REQUIRE(store->tier_stats()->resident_bytes > most());
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (std::uint64_t row = kRows; store->tier_stats()->resident_bytes > most(); row += 500) {  // where rows come
    std::vector<std::uint64_t> fresh(500);
    std::iota(fresh.begin(), fresh.end(), row);
    REQUIRE(store->apply(1, fresh, ones.data(), {.lr = 0.1f}).is_ok());
    REQUIRE(std::chrono::steady_clock::now() < deadline);
  }
  CHECK(store->tier_stats()->rows_evicted == 0);
  CHECK(pull_all() == before);
}

TEST_CASE("what can never fit is refused and makes nobody leave") {
  const Folder folder;
  const auto store = open(tiered(folder));
  REQUIRE(store->create_table(schema_of(1)).is_ok());
  fill(*store, 1, 0, 500);
  const std::uint64_t before = store->stats()[0].rows - store->stats()[0].ssd_rows;
  std::vector<std::uint64_t> many(20'000);
  std::iota(many.begin(), many.end(), 1000u);
  const std::vector<float> rows(many.size() * kDim, 1.0f);
  CHECK(store->assign(1, many, rows.data()).code() == Code::kResourceExhausted);
  CHECK(store->stats()[0].rows - store->stats()[0].ssd_rows == before);
}

// A number that the system counts of this process, by name.
std::uint64_t counted(const std::string& name) {
  std::ifstream file("/proc/self/io");
  std::string word;
  std::uint64_t value = 0;
  while (file >> word >> value) {
    if (word == name + ":") return value;
  }
  FAIL("no such count: ", name);
  return 0;
}

void write_images(SsdTier& ssd, const std::vector<std::uint64_t>& keys, const std::vector<std::byte>& image) {
  SsdBatch batch;
  for (const std::uint64_t key : keys) batch.put(ssd_key(0, 1, key), image, SsdBatch::Before::kNothing);
  REQUIRE(ssd.write(batch).is_ok());
}

void wait_for_jobs(const SsdTier& ssd) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (ssd.stats().background_jobs > 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

TEST_CASE("garbage on the SSD is collected, and what is none is written once") {
  constexpr std::uint64_t kImage = 8 << 10, kAtOnce = 256, kFresh = 26, kBatches = 128;
  const Folder folder;
  auto opened = open_ssd_tier({.path = folder.path().string(), .engine = ssd_engine, .direct_io = ssd_direct_io});
  REQUIRE(opened.is_ok());
  SsdTier& ssd = *opened.value();
  const std::vector<std::byte> image(kImage, std::byte{7});
  std::vector<std::uint64_t> keys(kAtOnce);
  const std::uint64_t before = counted("wchar");
  for (std::uint64_t batch = 0; batch < kBatches; ++batch) {  // 268 MB
    for (std::uint64_t i = 0; i < kAtOnce; ++i) keys[i] = batch + i * kBatches;
    write_images(ssd, keys, image);
  }
  REQUIRE(ssd.flush().is_ok());
  wait_for_jobs(ssd);
  CHECK(ssd.stats().garbage_bytes == 0);
  const double most = ssd_engine == SsdEngine::kPages ? 1.2 : 1.1;  // an eighth of a page may be empty
  CHECK(static_cast<double>(counted("wchar") - before) < most * kImage * kAtOnce * kBatches);
  // 1.9 GB of a fifth of the rows, again and again, and among them fresh ones, so that no file is garbage as a whole.
  for (std::uint64_t batch = kBatches; batch < 8 * kBatches; ++batch) {
    for (std::uint64_t i = 0; i < kFresh; ++i) keys[i] = batch + (i + kAtOnce) * 8 * kBatches;
    for (std::uint64_t i = kFresh; i < kAtOnce; ++i) keys[i] = batch % (kBatches / 5) + i * kBatches;
    write_images(ssd, keys, image);
  }
  REQUIRE(ssd.flush().is_ok());
  wait_for_jobs(ssd);
  CHECK(ssd.stats().file_bytes < std::uint64_t{1300} << 20);
}

TEST_CASE("rows that are used stay in memory while others pass through") {
  const Folder folder;
  const auto store = open(tiered(folder));
  REQUIRE(store->create_table(schema_of(1)).is_ok());
  fill(*store, 1, 0, 20000);
  std::vector<std::uint64_t> hot;
  for (std::uint64_t key = 0; key < 100; ++key) hot.push_back(key * 199);
  std::mt19937_64 random(5);
  for (int turn = 0; turn < 20; ++turn) {
    (void)pull(*store, 1, hot);
    (void)pull(*store, 1, random_keys(random, 20000, 100));
  }
  const std::uint64_t misses = store->tier_stats()->misses;
  (void)pull(*store, 1, hot);
  CHECK(store->tier_stats()->misses - misses <= 10);
}

TEST_CASE("rows with many updates outlast those that were updated once, though nobody has used them lately") {
  const Folder folder;
  const auto store = open(tiered(folder));
  REQUIRE(store->create_table(schema_of(1)).is_ok());
  std::vector<std::uint64_t> often(400);
  std::iota(often.begin(), often.end(), 0u);
  const std::vector<float> grads(often.size() * kDim, 1.0f);
  for (int step = 0; step < 30; ++step) REQUIRE(store->apply(1, often, grads.data(), {.lr = 0.1f}).is_ok());
  const std::uint64_t before = store->tier_stats()->rows_evicted;
  std::uint64_t next = 1000;
  while (store->tier_stats()->rows_evicted < before + 10'000) {  // several times what memory holds
    std::vector<std::uint64_t> once(100);
    for (std::uint64_t& key : once) key = next++;
    REQUIRE(store->apply(1, once, grads.data(), {.lr = 0.1f}).is_ok());
  }
  const std::uint64_t missed = store->tier_stats()->misses;
  static_cast<void>(pull(*store, 1, often));
  CHECK(store->tier_stats()->misses - missed < often.size() / 10);
}

TEST_CASE("rows that a hint named stay in memory until their use, and not for good") {
  const Folder folder;
  const auto store = open(tiered(folder));
  REQUIRE(store->create_table(schema_of(1)).is_ok());
  fill(*store, 1, 0, 20000);
  std::vector<std::uint64_t> named(100), others(100);
  std::iota(named.begin(), named.end(), 0u);
  std::iota(others.begin(), others.end(), 1000u);
  const auto gone = [&](const std::vector<std::uint64_t>& keys) {
    return std::count_if(keys.begin(), keys.end(), [&](std::uint64_t key) { return store->would_block(1, {&key, 1}); });
  };
  std::uint64_t next = 0;
  const auto pass_through_until = [&](const auto& is_enough) {  // each once
    for (int turn = 0; turn < 500 && !is_enough(); ++turn) {
      std::vector<std::uint64_t> keys(50);
      for (std::uint64_t& key : keys) key = next++ % 16'000 + 2000;
      static_cast<void>(pull(*store, 1, keys));
    }
    CHECK(is_enough());
  };
  const std::ptrdiff_t half = 50;
  for (int use = 0; use < 3; ++use) {
    REQUIRE(store->fetch_to_memory(1, named, Store::FetchCause::kPrefetch).is_ok());
    REQUIRE(store->fetch_to_memory(1, others, Store::FetchCause::kPull).is_ok());
    pass_through_until([&] { return gone(others) >= half; });
    CHECK(3 * gone(named) < 2 * gone(others));  // alike without the hint; one stripe may be rounds ahead of others
    if (use < 2) static_cast<void>(pull(*store, 1, named));
    pass_through_until([&] { return gone(named) >= half; });  // after its use, and also after a hint that was wrong
  }
}

TEST_CASE("rows that a prefetched pull brought stay in memory until their push") {
  const Folder folder;
  constexpr std::uint64_t kRows = 100'000;
  StoreOptions options = tiered(folder);
  options.memory_budget_bytes = with_index(8 * kBudget, kRows);
  const auto store = open(options);
  REQUIRE(store->create_table(schema_of(1)).is_ok());
  fill(*store, 1, 0, kRows);
  REQUIRE(store->write_back().is_ok());  // from now on the SSD's index takes no more memory
  constexpr std::size_t kDepth = 3, kKeys = 1000;
  std::mt19937_64 random(5);
  std::vector<std::vector<std::uint64_t>> batches;
  std::uint64_t missed = 0, pushed = 0;
  for (int turn = 0; turn < 120; ++turn) {
    std::set<std::uint64_t> keys;  // of which most are on the SSD
    while (keys.size() < kKeys) keys.insert(random() % kRows);
    batches.emplace_back(keys.begin(), keys.end());
    static_cast<void>(pull(*store, 1, batches.back()));
    if (batches.size() <= kDepth) continue;
    const auto& batch = batches[batches.size() - 1 - kDepth];
    const std::uint64_t before = store->tier_stats()->misses;
    const std::vector<float> grads(batch.size() * kDim, 1.0f);
    REQUIRE(store->apply(1, batch, grads.data(), {.lr = 0.1f}).is_ok());
    if (turn < 30) continue;  // the store learns that pushes come
    missed += store->tier_stats()->misses - before;
    pushed += batch.size();
  }
  CHECK(10 * missed < pushed);
}

TEST_CASE("a key that a pull waits for is one hit or one miss, also where rows were brought before it") {
  const Folder folder;
  const auto store = open(tiered(folder));
  REQUIRE(store->create_table(schema_of(1)).is_ok());
  fill(*store, 1, 0, 20000);
  std::vector<std::uint64_t> keys(60);
  std::iota(keys.begin(), keys.end(), 0u);        // of rows that left memory long ago
  for (int i = 0; i < 30; ++i) keys[i] += 50000;  // nowhere
  const TierStats before = *store->tier_stats();
  for (int turn = 0; turn < 2; ++turn) REQUIRE(store->fetch_to_memory(1, keys, Store::FetchCause::kPull).is_ok());
  static_cast<void>(pull(*store, 1, keys));
  const TierStats after = *store->tier_stats();
  CHECK(after.prefetched == before.prefetched);
  CHECK(after.misses - before.misses + after.hits - before.hits == keys.size());
  CHECK(after.misses - before.misses >= 30);
  CHECK(after.misses - before.misses <= keys.size());
  REQUIRE(store->fetch_to_memory(1, keys, Store::FetchCause::kPrefetch).is_ok());
  CHECK(store->tier_stats()->prefetched == before.prefetched);  // absent ones are not brought
}

TEST_CASE("a table that is dropped while rows of it leave memory leaves none on the SSD") {
  const Folder folder;
  const auto store = open(tiered(folder));
  constexpr std::uint64_t kOld = 40'000, kNew = 1'000'000;
  std::mt19937_64 random(5);
  for (int round = 0; round < 20; ++round) {
    REQUIRE(store->create_table(schema_of(1)).is_ok());
    std::atomic<bool> is_over{false};
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&, seed = random()] {
        std::mt19937_64 keys_of(seed);
        const std::vector<float> grads(256 * kDim, 1.0f);
        while (!is_over) {
          std::vector<std::uint64_t> keys(256);
          for (std::uint64_t& key : keys) key = keys_of() % kOld;
          static_cast<void>(store->apply(1, keys, grads.data(), {.lr = 0.1f}).is_ok());  // or NotFound
        }
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20 + round));
    REQUIRE(store->drop_table(1).is_ok());
    is_over = true;
    for (std::thread& thread : threads) thread.join();
  }
  REQUIRE(store->create_table(schema_of(1)).is_ok());
  std::vector<std::uint64_t> keys(20'000);
  std::iota(keys.begin(), keys.end(), kNew);
  const std::vector<float> grads(256 * kDim, 1.0f);
  for (std::size_t begin = 0; begin < keys.size(); begin += 256) {
    const auto batch = std::span(keys).subspan(begin, std::min<std::size_t>(256, keys.size() - begin));
    REQUIRE(store->apply(1, batch, grads.data(), {.lr = 0.1f}).is_ok());
  }
  const Scanned all = scan(*store, 1, 5'000);
  CHECK(all.keys.size() == keys.size());
  CHECK(std::all_of(all.keys.begin(), all.keys.end(), [](std::uint64_t key) { return key >= kNew; }));
  CHECK(store->stats()[0].rows == keys.size());
}

}  // namespace sparserow

int main(int argc, char** argv) { return sparserow::run_with_each_engine(argc, argv, sparserow::DirectRun::kLongForm); }
