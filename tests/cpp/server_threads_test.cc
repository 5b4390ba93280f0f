// A request ends alone when the system refuses memory on a thread of the server.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <new>
#include <numeric>
#include <thread>
#include <vector>

#include "rpc/server/hints.h"
#include "rpc_fixture.h"
#include "temporary_folder.h"

namespace {

constexpr std::size_t kNoLimit = SIZE_MAX;
std::atomic<std::size_t> refused_from{kNoLimit};  // NOLINT: allocations of so many bytes fail
std::atomic<std::uint64_t> refused_count{0};      // NOLINT
thread_local bool is_of_test = false;             // NOLINT: the threads of a test always get memory

void* allocate(std::size_t bytes, std::size_t alignment) {
  if (!is_of_test && bytes >= refused_from.load(std::memory_order_relaxed)) {
    ++refused_count;
    throw std::bad_alloc();
  }
  const std::size_t whole = (std::max<std::size_t>(bytes, 1) + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, whole);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new[](std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t to) { return allocate(bytes, static_cast<std::size_t>(to)); }
void* operator new[](std::size_t bytes, std::align_val_t to) { return allocate(bytes, static_cast<std::size_t>(to)); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace sparserow {
namespace {

using namespace testing;
using namespace rpc;
using namespace std::chrono_literals;

constexpr std::uint32_t kDim = 64;
constexpr std::uint32_t kWideDim = 2048;
constexpr std::uint64_t kRows = 60'000;
constexpr std::size_t kFetchBytes = 4096;  // less than a read of a thousand rows from the SSD takes
constexpr std::size_t kPulled = 8192;      // rows of 256 bytes: a reply of several chunks

class MemoryRefused {
 public:
  explicit MemoryRefused(std::size_t from) : before_(refused_count) { refused_from = from; }
  MemoryRefused(const MemoryRefused&) = delete;
  MemoryRefused& operator=(const MemoryRefused&) = delete;
  ~MemoryRefused() { refused_from = kNoLimit; }
  [[nodiscard]] std::uint64_t count() const { return refused_count - before_; }

 private:
  const std::uint64_t before_;
};

template <class Holds>
bool wait_until(Holds holds, std::chrono::milliseconds limit = 20s) {
  const auto until = std::chrono::steady_clock::now() + limit;
  while (!holds()) {
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

std::vector<std::uint64_t> iota_keys(std::uint64_t first, std::size_t count) {
  std::vector<std::uint64_t> keys(count);
  std::iota(keys.begin(), keys.end(), first);
  return keys;
}

// A shard with most rows of two tables on the SSD.
class TieredShard {
 public:
  explicit TieredShard(std::uint32_t workers, std::uint32_t disk_threads = 4) {
    cluster.stores[0] = take(Store::create({.memory_budget_bytes = 12u << 20,
                                            .slot_count = kSlots,
                                            .lineage = 1,
                                            .ssd = {.path = folder_.path().string()}}));
    Store& store = *cluster.stores[0];
    const std::vector<float> grads(500 * kDim, 1.0f);
    for (const TableSchema& table : tables) {
      REQUIRE(store.create_table(table).is_ok());
      for (std::uint64_t first = 0; first < kRows; first += 500) {
        REQUIRE(store.apply(table.id, iota_keys(first, 500), grads.data(), {.lr = 0.1f}).is_ok());
      }
    }
    REQUIRE(store.write_back().is_ok());
    ServerOptions options;
    options.disk_threads = disk_threads;
    options.cluster_id = cluster.cluster_id;
    cluster.servers[0] = take(Server::start(options, cluster.stores[0]));
    REQUIRE(cluster.servers[0]->set_route(1, cluster.slot_owner).is_ok());
    cluster.set_job(0u, workers);
  }
  [[nodiscard]] ServerStats stats() const { return cluster.servers[0]->stats(); }

  const std::vector<TableSchema> tables{sgd_table("n/a", kDim), sgd_table("n/b", kDim)};

 private:
  const Folder folder_;  // goes after the store

 public:
  Cluster cluster{1, {}};  // whose shard is replaced
};

// One pull of both tables, which knows the versions that it had the last time.
class KnownRows {
 public:
  KnownRows(const Client& client, const std::vector<TableSchema>& tables, std::uint64_t first,
            std::size_t count = kPulled) {
    for (const TableSchema& table : tables) {
      keys_.emplace_back(client, table.id, iota_keys(first, count));
      rows_.emplace_back(count * kDim);
      versions_.emplace_back(count, kNoVersion);
      TablePull pull = keys_.back().pull(table, rows_.back().data());
      pull.versions = versions_.back();
      pull.known = versions_.back();
      pulls_.push_back(pull);
    }
  }
  Status pull(Client& client, std::int64_t step) { return client.pull(pulls_, {.deadline = 60s, .step = step}); }

 private:
  std::vector<Grouped> keys_;
  std::vector<std::vector<float>> rows_;
  std::vector<std::vector<std::uint64_t>> versions_;
  std::vector<TablePull> pulls_;
};

TEST_CASE("a pull whose reply gets no memory is refused, and its connection goes on") {
  const TableSchema table = sgd_table("n/a", kDim);
  Cluster cluster(1, {table});
  cluster.set_job(0u, 2);
  const auto a = take(Client::connect(cluster.client_options(0)));
  const auto b = take(Client::connect(cluster.client_options(1)));
  const Grouped keys(*a, table.id, iota_keys(0, kPulled));
  std::vector<float> rows(kPulled * kDim);
  const auto pull = keys.pull(table, rows.data());
  const auto stats = [&cluster] { return cluster.servers[0]->stats(); };
  SUBCASE("at once") {
    const MemoryRefused refused(512u << 10);
    const Status status = a->pull(std::span(&pull, 1), {.deadline = 5s});
    INFO(status.message());
    CHECK(status.code() == Code::kResourceExhausted);
    CHECK(refused.count() > 0);
  }
  SUBCASE("when the clock allows it") {
    const CommitOptions options{.sequence = 1, .step = 0};
    REQUIRE(a->commit({}, options).is_ok());
    Status status;
    std::thread waits([&] {
      is_of_test = true;
      status = a->pull(std::span(&pull, 1), {.deadline = 5s, .step = 1});
    });
    CHECK(wait_until([&] { return stats().commits.pulls_waiting == 1; }));
    const MemoryRefused refused(512u << 10);
    CHECK(b->commit({}, options).is_ok());
    waits.join();
    INFO(status.message());
    CHECK(status.code() == Code::kResourceExhausted);
    CHECK(refused.count() > 0);
  }
  CHECK(a->pull(std::span(&pull, 1), {.deadline = 5s}).is_ok());
  CHECK(std::count(rows.begin(), rows.end(), 1.0f) == static_cast<std::ptrdiff_t>(rows.size()));
  CHECK(wait_until([&] { return stats().requests_active == 0; }));
}

TEST_CASE("a reply that gets no memory for one of its chunks ends with its connection, and the next one is whole") {
  const TableSchema table = sgd_table("n/wide", kWideDim);
  Cluster cluster(1, {table});
  const auto client = take(Client::connect(cluster.client_options()));
  const Grouped keys(*client, table.id, iota_keys(0, 1024));
  std::vector<float> rows(1024 * kWideDim);
  const auto pull = keys.pull(table, rows.data());
  REQUIRE(client->pull(std::span(&pull, 1), {.deadline = 20s}).is_ok());  // the shard keeps the chunks' buffers
  {
    const MemoryRefused refused(kWideDim * sizeof(float));  // what a chunk takes to convert a row
    CHECK(!client->pull(std::span(&pull, 1), {.deadline = 1s}).is_ok());
    CHECK(refused.count() > 0);
  }
  std::fill(rows.begin(), rows.end(), 0.0f);
  const Status status = client->pull(std::span(&pull, 1), {.deadline = 20s});
  INFO(status.message());
  CHECK(status.is_ok());
  CHECK(std::count(rows.begin(), rows.end(), 1.0f) == static_cast<std::ptrdiff_t>(rows.size()));
  CHECK(wait_until([&] { return cluster.servers[0]->stats().requests_active == 0; }));
}

TEST_CASE("hints that get no memory are forgotten") {
  TieredShard shard(1);
  asio::thread_pool disk(1);
  HintQueue hints(*shard.cluster.stores[0], disk);
  const auto keys = iota_keys(0, HintQueue::kSlice);
  {
    const MemoryRefused refused(kFetchBytes);
    CHECK(hints.take(shard.tables[0].id, keys) == keys.size());
    CHECK(wait_until([&] { return refused.count() > 0; }));
  }
  for (std::uint64_t taken = 0; taken < HintQueue::kMostKeys; taken += keys.size()) {
    // Where the rows come from the system's cache by now, hints are declined.
    const auto is_taken = [&] {
      return hints.take(shard.tables[0].id, keys) == keys.size() || !shard.cluster.stores[0]->waits_for_disk();
    };
    CHECK(wait_until(is_taken));
  }
  hints.stop();
  disk.join();
}

TEST_CASE("a parked pull whose rows cannot come to memory ahead is answered all the same") {
  TieredShard shard(2);
  const auto a = take(Client::connect(shard.cluster.client_options(0)));
  const auto b = take(Client::connect(shard.cluster.client_options(1)));
  KnownRows rows(*a, shard.tables, 0);
  REQUIRE(KnownRows(*a, shard.tables, 2 * kPulled).pull(*a, 0).is_ok());  // the shard keeps the buffer of its body
  REQUIRE(a->commit({}, {.sequence = 1, .step = 0}).is_ok());
  Status pulled;
  std::thread waits;
  {
    const MemoryRefused refused(kFetchBytes);
    waits = std::thread([&] {
      is_of_test = true;
      pulled = rows.pull(*a, 1);
    });
    CHECK(wait_until([&] { return shard.stats().commits.pulls_waiting == 1; }));
    CHECK(wait_until([&] { return refused.count() > 0; }));
  }
  CHECK(b->commit({}, {.sequence = 1, .step = 0}).is_ok());
  waits.join();
  INFO(pulled.message());
  CHECK(pulled.is_ok());
  CHECK(wait_until([&] { return shard.stats().requests_active == 0; }));
}

}  // namespace
}  // namespace sparserow

// The engine pages alone: the threads of RocksDB would be refused memory too, and it does not catch that.
int main(int argc, char** argv) {
  is_of_test = true;
  return doctest::Context(argc, argv).run();
}
