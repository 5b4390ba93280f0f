// A page log whose reads fail: what is refused has changed nothing, and what failed once is tried again.
//
// It is a program of its own, since the reads of the whole process go through here.
#include <doctest/doctest.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "store/open_ssd_tier.h"
#include "store/ssd/pages/page_format.h"
#include "store/ssd/ssd_tier.h"
#include "store/store.h"
#include "temporary_folder.h"
#include "util/random.h"

namespace {

std::atomic<int> calls_left{-1};  // until one fails; negative: none does
std::atomic<bool> fails_on{false};

bool fails_now() noexcept { return fails_on || (calls_left >= 0 && calls_left-- == 0); }

}  // namespace

// NOLINTNEXTLINE: the name and the arguments are the system's
extern "C" ssize_t pread(int file, void* to, std::size_t bytes, off_t offset) {
  if (fails_now()) {
    errno = EIO;
    return -1;
  }
  return ::syscall(SYS_pread64, file, to, bytes, offset);
}

// NOLINTNEXTLINE: the name and the arguments are the system's
extern "C" ssize_t preadv2(int file, const iovec* parts, int count, off_t offset, int flags) {
  if (fails_now()) {
    errno = EIO;
    return -1;
  }
  const ssize_t got = ::syscall(SYS_preadv2, file, parts, count, offset, 0L, flags);
  if (got >= 0 || errno != ENOSYS) return got;
  // As the C library's, where the system has no such call: qemu has none.
  if (flags == 0) return ::syscall(SYS_preadv, file, parts, count, offset, 0L);
  errno = EOPNOTSUPP;
  return -1;
}

namespace sparserow {
namespace {

using Image = std::vector<std::byte>;
constexpr std::uint32_t kTable = 5, kSlots = 2, kDim = 8;

std::unique_ptr<SsdTier> open(const Folder& folder, std::uint64_t max_bytes = 0) {
  auto opened =
      open_ssd_tier({.path = folder.path(), .max_bytes = max_bytes, .slot_count = kSlots, .with_uring = false});
  INFO(opened.status().message());
  REQUIRE(opened.is_ok());
  return std::move(opened).value();
}

SsdKey key_of(std::uint64_t key) { return ssd_key(slot_of(row_hash(kTable, key), kSlots), kTable, key); }

Image image_of(std::uint64_t key, std::uint64_t turn) {
  Image image(300, static_cast<std::byte>(key * 31 + turn));
  std::memcpy(image.data(), &turn, sizeof turn);
  return image;
}

std::map<std::uint64_t, Image> contents(SsdTier& ssd, const std::vector<std::uint64_t>& keys) {
  std::vector<SsdKey> asked;
  for (const std::uint64_t key : keys) asked.push_back(key_of(key));
  SsdImages images;
  const Status status = ssd.read(asked, images);
  INFO(status.message());
  REQUIRE(status.is_ok());
  std::map<std::uint64_t, Image> rows;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (!images.at(i).empty()) rows[keys[i]] = Image(images.at(i).begin(), images.at(i).end());
  }
  return rows;
}

// Keys of which forty share each hash of the index, so that a write has to read which one it finds.
std::vector<std::uint64_t> crowded_keys() {
  std::vector<std::uint64_t> keys;
  for (std::uint64_t hash = 0; hash < 10; ++hash) {
    for (std::uint64_t high = 0; high < 40; ++high) {
      keys.push_back(key_of_hash(kTable, hash << 40 | high << 20 | 0x12345));
    }
  }
  return keys;
}

void fill_other_table(SsdTier& ssd, std::uint64_t turn) {
  SsdBatch batch;
  for (std::uint64_t key = 0; key < 20'000; ++key) {
    if (turn > 0 && mix_bits(key ^ turn << 32) % 4 != 0) continue;  // so that no segment is garbage alone
    const auto before = turn == 0 ? SsdBatch::Before::kNothing : SsdBatch::Before::kImage;
    batch.put(ssd_key(slot_of(row_hash(1, key), kSlots), 1, key), image_of(key, turn), before);
    if (batch.writes().size() < 1000) continue;
    const Status status = ssd.write(batch);
    INFO(status.message());
    REQUIRE(status.is_ok());
    batch.clear();
  }
}

void wait_until_written(const SsdTier& ssd) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (ssd.stats().background_jobs > 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

TEST_CASE("a batch whose reads fail changes nothing, whichever of them it is") {
  const std::uint64_t seed = std::random_device()();
  MESSAGE("seed " << seed);
  std::mt19937_64 random(seed);
  const Folder folder;
  const auto ssd = open(folder);
  const std::vector<std::uint64_t> keys = crowded_keys();
  std::map<std::uint64_t, Image> rows;
  SsdBatch batch;
  for (const std::uint64_t key : keys) {
    rows[key] = image_of(key, 0);
    batch.put(key_of(key), rows[key], SsdBatch::Before::kNothing);
  }
  REQUIRE(ssd->write(batch).is_ok());
  fill_other_table(*ssd, 0);  // so that the first rows leave their buffer
  wait_until_written(*ssd);
  int refused = 0;
  for (int nth = 0; nth < 60; ++nth) {
    std::vector<std::uint64_t> chosen = keys;
    std::shuffle(chosen.begin(), chosen.end(), random);
    chosen.resize(4);
    batch.clear();
    std::map<std::uint64_t, Image> after = rows;
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      const bool is_there = rows.contains(chosen[i]);
      if (i % 2 == 0 && is_there) {
        batch.erase(key_of(chosen[i]));
        after.erase(chosen[i]);
      } else {
        after[chosen[i]] = image_of(chosen[i], static_cast<std::uint64_t>(nth));
        batch.put(key_of(chosen[i]), after[chosen[i]],
                  is_there ? SsdBatch::Before::kImage : SsdBatch::Before::kNothing);
      }
    }
    calls_left = nth * 3;
    const Status status = ssd->write(batch);
    calls_left = -1;
    if (status.is_ok()) rows = after;
    if (!status.is_ok()) ++refused;
    REQUIRE(contents(*ssd, keys) == rows);
  }
  MESSAGE(refused << " of 60 batches were refused");
  CHECK(refused > 20);
}

TEST_CASE("a segment that could not be read once is collected later") {
  const Folder folder;
  const auto ssd = open(folder, 64 << 20);
  fill_other_table(*ssd, 0);
  fails_on = true;  // only the collector reads from now on, and each of its reads fails
  for (std::uint64_t turn = 1; turn < 24; ++turn) fill_other_table(*ssd, turn);
  fails_on = false;
  const std::uint64_t written = ssd->stats().file_bytes;
  CHECK(written > 28 << 20);
  // As it goes on, what could not be read is tried again after ten seconds.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  double garbage = 1;
  for (std::uint64_t turn = 24; garbage > 0.5 && std::chrono::steady_clock::now() < deadline; ++turn) {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    fill_other_table(*ssd, turn);
    wait_until_written(*ssd);
    const SsdStats stats = ssd->stats();
    garbage = static_cast<double>(stats.garbage_bytes) / static_cast<double>(stats.file_bytes);
  }
  CHECK(garbage <= 0.5);
}

// Weights of some rows as a pull gives them, and which are there; nullopt where it fails. Without versions: of the rows
// of one push, one that waits for the SSD may get its own after the others.
std::optional<std::pair<std::vector<float>, std::vector<std::uint8_t>>> pulled(const Store& store, std::uint32_t table,
                                                                               const std::vector<std::uint64_t>& keys) {
  std::vector<float> rows(keys.size() * kDim);
  std::vector<std::uint8_t> there(keys.size());
  auto* const to = reinterpret_cast<std::byte*>(rows.data());
  if (!store.pull(table, keys, Dtype::kFloat32, to, {.found = there}).is_ok()) return std::nullopt;
  return std::pair(std::move(rows), std::move(there));
}

TEST_CASE("a store with an SSD whose reads fail at any place is one without, as far as it answers") {
  const char* given = std::getenv("SPARSEROW_TEST_SEED");
  const std::uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
  MESSAGE("seed " << seed);
  std::mt19937_64 random(seed);
  constexpr std::uint64_t kKeys = 6000;
  constexpr std::uint32_t kTables = 2;
  const Folder folder;
  StoreOptions options{.memory_budget_bytes = 512 << 10, .slot_count = 4};
  StoreOptions in_memory{.slot_count = 4};
  options.ssd = {.path = folder.path().string(), .cluster_id = 7, .shard = 1, .with_uring = false};
  const auto store = std::move(Store::create(options)).value();
  const auto model = std::move(Store::create(in_memory)).value();
  for (std::uint32_t table = 1; table <= kTables; ++table) {
    const TableSchema schema{.id = table,
                             .name = "n/t" + std::to_string(table),
                             .dim = kDim,
                             .init = {.kind = InitKind::kUniform, .a = -1, .b = 1},
                             .optimizer = {.kind = OptimizerKind::kAdagrad}};
    REQUIRE(store->create_table(schema).is_ok());
    REQUIRE(model->create_table(schema).is_ok());
  }
  std::map<std::string, int> refused;
  const auto some_keys = [&](std::size_t count) {
    std::set<std::uint64_t> keys;
    while (keys.size() < count) keys.insert(random() % kKeys);
    return std::vector<std::uint64_t>(keys.begin(), keys.end());
  };
  // Runs it with a fault; where it is refused, the model does not do it.
  const auto both = [&](const std::string& verb, auto&& act) {
    calls_left = static_cast<int>(random() % 40);
    const Status status = act(*store);
    calls_left = -1;
    if (status.is_ok()) REQUIRE(act(*model).is_ok());
    if (!status.is_ok()) ++refused[verb];
  };
  for (int round = 0; round < 1500; ++round) {
    const std::uint32_t table = 1 + static_cast<std::uint32_t>(random() % kTables);
    const std::vector<std::uint64_t> keys = some_keys(1 + random() % 100);
    const std::vector<float> values(keys.size() * kDim, static_cast<float>(random() % 7));
    switch (random() % 8) {
      case 0:
        both("erase", [&](Store& one) { return one.erase(table, keys).status(); });
        break;
      case 1:
        both("assign", [&](Store& one) { return one.assign(table, keys, values.data()); });
        break;
      case 2:
        if (round % 10 == 0)
          both("write back", [&](Store& one) { return &one == model.get() ? Status::ok() : one.write_back(); });
        break;
      case 3: {
        calls_left = static_cast<int>(random() % 40);
        const auto found = pulled(*store, table, keys);
        calls_left = -1;
        if (found) REQUIRE(found == pulled(*model, table, keys));
        if (!found) ++refused["pull"];
        break;
      }
      default:
        both("apply", [&](Store& one) { return one.apply(table, keys, values.data(), {.lr = 0.1f}); });
    }
    CAPTURE(round);
    const std::vector<std::uint64_t> looked_at = some_keys(50);
    const auto found = pulled(*store, table, looked_at);
    REQUIRE(found);  // a table whose disk answers again is not refused
    REQUIRE(found == pulled(*model, table, looked_at));
  }
  for (std::uint32_t table = 1; table <= kTables; ++table) {
    std::vector<std::uint64_t> all(kKeys);
    std::iota(all.begin(), all.end(), 0);
    REQUIRE(pulled(*store, table, all) == pulled(*model, table, all));
    const auto rows = store->scan(table, 0, 2 * kKeys, true);
    const auto expected = model->scan(table, 0, 2 * kKeys, true);
    REQUIRE(rows.is_ok());
    CHECK(rows.value().keys == expected.value().keys);
    CHECK(rows.value().rows == expected.value().rows);
    CHECK(rows.value().state == expected.value().state);
  }
  for (const auto& [verb, times] : refused) MESSAGE(verb << " was refused " << times << " times");
  for (const char* verb : {"apply", "assign", "erase", "pull"}) CHECK(refused[verb] > 0);
  CHECK(store->tier_stats()->rows_evicted > kKeys);
}

}  // namespace
}  // namespace sparserow

int main(int argc, char** argv) { return doctest::Context(argc, argv).run(); }
