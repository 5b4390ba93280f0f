#include "store/table/arena_reserve.h"

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "store/store.h"

namespace sparserow {
namespace {

constexpr std::size_t kRunBytes = ArenaPool::kMaxRunBytes;  // two to an arena
constexpr std::uint64_t kArena = ArenaPool::kArenaBytes;
constexpr std::chrono::minutes kNever{10};

bool comes_true(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

double resident_share(std::byte* at, std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages(bytes / page);
  REQUIRE(::mincore(at, bytes, pages.data()) == 0);
  const auto resident = std::count_if(pages.begin(), pages.end(), [](unsigned char each) { return (each & 1) != 0; });
  return static_cast<double>(resident) / static_cast<double>(pages.size());
}

// Whether the system touches pages ahead; elsewhere there is no reserve but of rows that went. The page is looked at,
// because qemu takes the advice and does nothing.
bool can_populate() {
  const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  void* page = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const bool can = ::madvise(page, bytes, 23) == 0 && resident_share(static_cast<std::byte*>(page), bytes) == 1.0;
  ::munmap(page, bytes);
  return can;
}

std::ptrdiff_t thread_count() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

struct Growing {
  explicit Growing(std::uint64_t limit, const ReserveOptions& options = {.linger = kNever})
      : budget(limit, pools), reserve(pools, budget, options) {}
  ~Growing() {
    for (std::byte* run : runs) pools.rows.free(run, kRunBytes);
  }
  Growing(const Growing&) = delete;
  Growing& operator=(const Growing&) = delete;

  std::byte* take() {
    runs.push_back(pools.rows.allocate(kRunBytes));
    REQUIRE(runs.back() != nullptr);
    return runs.back();
  }
  void grow_by(std::uint64_t arenas) {
    for (std::uint64_t run = 0; run < 2 * arenas; ++run) take();
  }
  void shrink_to(std::size_t count) {
    for (; runs.size() > count; runs.pop_back()) pools.rows.free(runs.back(), kRunBytes);
  }
  bool is_filled() {
    return comes_true([this] { return reserve.stats().bytes > 0 && !reserve.stats().is_filling; });
  }
  std::uint64_t all_bytes() const { return budget.taken() + budget.reserved(); }

  StorePools pools;
  MemoryBudget budget;
  NamespaceMemory memory{"t"};
  ArenaReserve reserve;
  std::vector<std::byte*> runs;
};

TEST_CASE("pages of a growing pool's next arenas are there before a row is") {
  StorePools alone;
  CHECK(resident_share(alone.rows.allocate(kRunBytes), kRunBytes) == 0.0);
  if (!can_populate()) return;
  Growing growing(0);
  growing.grow_by(40);
  REQUIRE(growing.is_filled());
  const std::uint64_t warm = growing.pools.rows.warm_arenas();
  REQUIRE(warm > 0);
  CHECK(resident_share(growing.take(), kRunBytes) == 1.0);
  const ReserveStats stats = growing.reserve.stats();
  CHECK(stats.rest_bytes >= kArena - kRunBytes);  // the other half of that arena
  CHECK(growing.pools.rows.used_bytes() == 81 * kRunBytes);
}

TEST_CASE("a small pool has no reserve, and a larger one at most its share") {
  Growing growing(0);
  growing.grow_by(3);
  CHECK(comes_true([&] { return !growing.reserve.stats().is_filling; }));
  CHECK(growing.reserve.stats().bytes == 0);
  for (int turn = 0; turn < 60; ++turn) {
    growing.grow_by(1);
    REQUIRE(growing.reserve.stats().bytes <= growing.pools.rows.opened_arenas() / 4 * kArena + kArena);
  }
}

TEST_CASE("the reserve is bounded, whatever the pool has") {
  constexpr std::uint64_t kMost = 4 * kArena;
  Growing growing(0, {.most_bytes = kMost, .linger = kNever});
  for (int turn = 0; turn < 200; ++turn) {
    growing.grow_by(1);
    REQUIRE(growing.reserve.stats().bytes <= kMost);
  }
  growing.shrink_to(0);
  CHECK(growing.reserve.stats().bytes <= kMost);
}

TEST_CASE("what a large pool leaves is no more than a small one may have") {
  constexpr std::uint64_t kMost = 2 * kArena;
  Growing growing(0, {.most_bytes = kMost, .linger = kNever});
  growing.pools.rows.expect(400 * kArena);  // huge from the start
  growing.grow_by(400);
  CHECK(growing.reserve.stats().bytes <= 400 / 64 * kArena);
  growing.shrink_to(0);
  CHECK(comes_true([&] { return !growing.reserve.stats().is_filling && growing.reserve.stats().bytes <= kMost; }));
}

TEST_CASE("a budget is never exceeded by the reserve, and promises take from it first") {
  constexpr std::uint64_t kLimit = 64 * kArena;
  Growing growing(kLimit);
  growing.grow_by(24);
  if (can_populate()) REQUIRE(growing.is_filled());
  CHECK(growing.all_bytes() <= kLimit - kLimit / 8);
  for (int turn = 0; growing.budget.promise("t", growing.memory, kRunBytes, true).is_ok(); ++turn) {
    growing.reserve.shrink_to_budget();
    REQUIRE(growing.all_bytes() <= kLimit);
    growing.take();
    growing.budget.give_back(kRunBytes, growing.memory);
    REQUIRE(growing.pools.rows.resident_bytes() <= kLimit);
  }
  CHECK(growing.budget.taken() == kLimit);  // every byte of it came to rows
  CHECK(growing.reserve.stats().bytes == 0);
}

TEST_CASE("one promise of all that is left takes the whole reserve") {
  constexpr std::uint64_t kLimit = 100 * kArena;
  Growing growing(kLimit);
  growing.grow_by(40);
  if (can_populate()) REQUIRE(growing.is_filled());
  REQUIRE(growing.budget.promise("t", growing.memory, kLimit - growing.budget.taken(), true).is_ok());
  growing.reserve.shrink_to_budget();
  CHECK(growing.budget.reserved() == 0);
  CHECK(growing.pools.rows.warm_arenas() == 0);
  growing.grow_by(4);  // asks for a reserve anew, for which nothing is left
  CHECK(comes_true([&] { return !growing.reserve.stats().is_filling; }));
  CHECK(growing.budget.reserved() == 0);
  growing.budget.give_back(kLimit - 40 * kArena, growing.memory);
}

TEST_CASE("arenas whose rows went stay in the reserve for a while") {
  Growing growing(0, {.most_bytes = 6 * kArena, .linger = kNever});
  growing.pools.rows.expect(40 * kArena);  // huge from the start
  growing.grow_by(40);
  growing.shrink_to(0);
  CHECK(growing.pools.rows.used_bytes() == 0);
  CHECK(comes_true([&] { return growing.reserve.stats().bytes == 6 * kArena; }));  // one may be on its way
  CHECK(growing.pools.rows.resident_bytes() == 6 * kArena);
  growing.take();  // one of them
  CHECK(growing.budget.reserved() == 5 * kArena);
}

// The lines of /proc that count how often a thread went to sleep, of all threads.
std::uint64_t sleeps() {
  std::uint64_t sum = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    if (task.path().filename() == std::to_string(::getpid())) continue;
    std::ifstream status(task.path() / "status");
    for (std::string line; std::getline(status, line);) {
      if (line.rfind("voluntary_ctxt_switches:", 0) == 0) sum += std::stoull(line.substr(24));
    }
  }
  return sum;
}

TEST_CASE("without use all memory goes back, and the thread sleeps") {
  Growing growing(0, {.linger = std::chrono::milliseconds(20)});
  growing.grow_by(40);
  growing.shrink_to(0);
  CHECK(comes_true([&] { return growing.pools.rows.resident_bytes() == 0; }));
  CHECK(growing.budget.reserved() == 0);
  std::uint64_t before = 0;
  CHECK(comes_true([&] { return std::exchange(before, sleeps()) == sleeps(); }));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // five times as long as it waits while it has memory
  CHECK(sleeps() <= before + 1);
}

TEST_CASE("stores that grow, shrink and end while pages are touched") {
  const std::ptrdiff_t threads = thread_count();
  for (int turn = 0; turn < 8; ++turn) {
    Growing growing(turn % 2 == 0 ? 0 : 48 * kArena, {.linger = std::chrono::milliseconds(1)});
    std::thread other([&] {
      for (int step = 0; step < 200; ++step) {
        std::byte* run = growing.pools.indexes.allocate(kRunBytes / 2);
        growing.pools.indexes.free(run, kRunBytes / 2);
        growing.reserve.shrink_to_budget();
      }
    });
    for (int step = 0; step < 20; ++step) {
      growing.grow_by(1);
      if (step % 4 == 3) growing.shrink_to(growing.runs.size() / 2);
    }
    other.join();
  }
  CHECK(comes_true([&] { return thread_count() == threads; }));
}

TEST_CASE("a store's thread ends with it, and rows fill its budget as without a reserve") {
  const std::ptrdiff_t threads = thread_count();
  {
    StoreOptions options;
    options.memory_budget_bytes = 48 << 20;
    auto store = std::move(Store::create(options)).value();
    TableSchema schema;
    schema.id = 1;
    schema.name = "rows";
    schema.dim = 64;
    REQUIRE(store->create_table(schema).is_ok());
    std::vector<std::uint64_t> keys(2000);
    const std::vector<float> grads(keys.size() * schema.dim, 1.0f);
    std::uint64_t next = 0;
    Status status = Status::ok();
    while (status.is_ok()) {
      for (std::uint64_t& key : keys) key = next++;
      status = store->apply(1, keys, grads.data(), {.lr = 0.1f});
      REQUIRE(store->used_bytes() + store->reserve_stats().bytes <= options.memory_budget_bytes);
    }
    CHECK(status.code() == Code::kResourceExhausted);
    CHECK(store->used_bytes() > options.memory_budget_bytes / 8 * 7);
  }
  CHECK(comes_true([&] { return thread_count() == threads; }));
}

}  // namespace
}  // namespace sparserow
