// Hints: a shard takes them while its reads wait for the disk, and a client that is told no asks seldom.
#include "rpc/server/hints.h"

#include <doctest/doctest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "rpc/client/client.h"
#include "rpc/client/hint_pace.h"
#include "rpc_fixture.h"
#include "ssd_engines.h"
#include "temporary_folder.h"

namespace sparserow {
namespace {

namespace fs = std::filesystem;

using namespace testing;

constexpr std::uint64_t kRows = 60'000;
constexpr std::uint32_t kTable = 1;
constexpr std::uint32_t kWideDim = 64;  // a unit of the disk has few rows

// A store with most of its rows on the SSD.
class TieredStore {
 public:
  TieredStore() {
    auto made =
        Store::create({.memory_budget_bytes = with_index(4u << 20, kRows),
                       .slot_count = 16,
                       .ssd = {.path = folder_.path().string(), .engine = ssd_engine, .direct_io = ssd_direct_io}});
    INFO(made.status().message());
    REQUIRE(made.is_ok());
    store_ = std::move(made).value();
    TableSchema schema = sgd_table("n/t", kWideDim);
    schema.id = kTable;
    REQUIRE(store_->create_table(schema).is_ok());
    const std::vector<float> grads(500 * kWideDim, 1.0f);
    for (std::uint64_t first = 0; first < kRows; first += 500) {
      std::vector<std::uint64_t> keys(500);
      std::iota(keys.begin(), keys.end(), first);
      REQUIRE(store_->apply(kTable, keys, grads.data(), {.lr = 0.1f}).is_ok());
    }
    REQUIRE(store_->write_back().is_ok());
  }
  TieredStore(const TieredStore&) = delete;
  TieredStore& operator=(const TieredStore&) = delete;
  [[nodiscard]] Store& store() { return *store_; }
  void pull(std::size_t count, bool is_cold) {
    std::vector<std::uint64_t> keys(count);
    for (std::uint64_t& key : keys) key = random_() % kRows;
    if (is_cold) forget();
    std::vector<std::byte> rows(count * kWideDim * sizeof(float));
    REQUIRE(store_->pull(kTable, keys, Dtype::kFloat32, rows.data(), {}).is_ok());
  }
  // Once more, so that the cache has every unit of the files.
  void read_files() const {
    std::vector<char> bytes(1 << 20);
    for (const auto& entry : fs::recursive_directory_iterator(folder_.path())) {
      if (!entry.is_regular_file()) continue;
      std::ifstream file(entry.path(), std::ios::binary);
      while (file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()))) {
      }
    }
  }

 private:
  void forget() const {
    for (const auto& entry : fs::recursive_directory_iterator(folder_.path())) {
      if (entry.is_regular_file()) REQUIRE(forget_cached(entry.path()));
    }
  }

  const Folder folder_;  // goes after the store
  std::unique_ptr<Store> store_;
  std::mt19937_64 random_{7};
};

TEST_CASE("hints are taken while reads wait for the disk, and only then") {
  TieredStore tiered;
  asio::thread_pool disk(1);
  rpc::HintQueue hints(tiered.store(), disk);
  std::vector<std::uint64_t> keys(100);
  std::iota(keys.begin(), keys.end(), 0u);
  CHECK(hints.take(kTable, keys) == keys.size());  // nothing is known yet
  for (int turn = 0; turn < 100; ++turn) tiered.pull(300, true);
  CHECK(hints.take(kTable, keys) == keys.size());
  CHECK(hints.declined() == 0);
  if (!ssd_direct_io) {
    tiered.read_files();
    for (int turn = 0; turn < 300; ++turn) tiered.pull(300, false);
    CHECK(hints.take(kTable, keys) == 0);
    CHECK(hints.declined() == keys.size());
    for (int turn = 0; turn < 100; ++turn) tiered.pull(300, true);
    CHECK(hints.take(kTable, keys) == keys.size());  // the cache is gone again
  }
  hints.stop();
  disk.join();
}

TEST_CASE("a client whose hints are not taken sends one of sixteen") {
  if (ssd_engine != SsdEngine::kPages || ssd_direct_io) return;  // no SSD is in this test
  const TableSchema table = sgd_table("n/t", 4);
  Cluster cluster(2, {table});
  const auto client = take(rpc::Client::connect(cluster.client_options()));
  const Grouped keys(*client, table.id, {1, 2, 3, 4, 5, 6, 7, 8, 9});
  const auto pull = keys.pull(table, nullptr);
  const auto frames = [&cluster] {
    return cluster.servers[0]->stats().frames_received + cluster.servers[1]->stats().frames_received;
  };
  const std::uint64_t before = frames();
  const std::uint32_t one_in = rpc::HintPace::kOneIn;
  for (std::uint32_t i = 0; i < 3 * one_in; ++i) {
    CHECK(client->hint(std::span(&pull, 1), std::chrono::milliseconds(5000)) == 0);
  }
  CHECK(frames() - before == 2 * 3);
}

TEST_CASE("a shard that takes hints gets all of them") {
  rpc::HintPace pace;
  for (int i = 0; i < 40; ++i) {
    CHECK(pace.take_turn());
    pace.note_answer(1);
  }
  CHECK(pace.take_turn());
  pace.note_answer(0);
  std::uint32_t skipped = 0;
  while (!pace.take_turn()) ++skipped;
  CHECK(skipped == rpc::HintPace::kOneIn - 1);
  pace.note_answer(3);
  CHECK(pace.take_turn());
}

}  // namespace
}  // namespace sparserow

int main(int argc, char** argv) { return sparserow::run_with_each_engine(argc, argv, sparserow::DirectRun::kAlways); }
