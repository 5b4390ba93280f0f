// What sweeps remove, in memory and on the SSD, and what they leave alone.
#include <doctest/doctest.h>

#include <atomic>
#include <numeric>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "ssd_engines.h"
#include "store/store.h"
#include "temporary_folder.h"

namespace sparserow {
namespace {

constexpr std::uint32_t kDim = 8;
constexpr std::uint32_t kTable = 3;
constexpr auto kSteps = static_cast<std::size_t>(SweepRule::kSteps);
constexpr auto kSeconds = static_cast<std::size_t>(SweepRule::kSeconds);
constexpr auto kNorm = static_cast<std::size_t>(SweepRule::kNorm);
constexpr auto kBound = static_cast<std::size_t>(SweepRule::kBound);

// A store of one table, in memory or with most of its rows on the SSD.
class Swept {
 public:
  Swept(const RowPolicy& policy, bool tiered, Dtype dtype = Dtype::kFloat32, std::uint64_t most_rows = 20'000) {
    StoreOptions options{.slot_count = 16, .unix_seconds = [this] { return seconds.load(); }};
    if (tiered) {
      options.memory_budget_bytes = with_index(512u << 10, most_rows);
      options.ssd = {
          .path = folder_.emplace().path().string(), .cluster_id = 1, .engine = ssd_engine, .direct_io = ssd_direct_io};
    }
    auto made = Store::create(options);
    INFO(made.status().message());
    REQUIRE(made.is_ok());
    store = std::move(made).value();
    const Status created = store->create_table({.id = kTable,
                                                .name = "n/t",
                                                .dim = kDim,
                                                .dtype = dtype,
                                                .init = {},
                                                .optimizer = {.kind = OptimizerKind::kAdagrad},
                                                .policy = policy});
    INFO(created.message());
    REQUIRE(created.is_ok());
  }
  Swept(const Swept&) = delete;
  Swept& operator=(const Swept&) = delete;
  ~Swept() { store = nullptr; }

  void push(std::uint64_t begin, std::uint64_t end, std::int64_t step = -1, std::uint64_t job = 1) {
    for (; begin < end; begin += 500) {
      std::vector<std::uint64_t> keys(std::min<std::uint64_t>(500, end - begin));
      std::iota(keys.begin(), keys.end(), begin);
      const std::vector<float> grads(keys.size() * kDim, 1.0f);
      const Status pushed = store->apply(kTable, keys, grads.data(), {.lr = 1.0f, .job = job, .step = step});
      INFO(pushed.message());
      REQUIRE(pushed.is_ok());
    }
  }

  SweepReport sweep(bool dry_run = false, double share = 1) {
    const auto report = store->sweep(kTable, {.dry_run = dry_run, .share = share});
    INFO(report.status().message());
    REQUIRE(report.is_ok());
    return report.value();
  }

  std::set<std::uint64_t> keys() const {
    std::set<std::uint64_t> all;
    std::uint64_t cursor = 0;
    do {
      const auto page = store->scan(kTable, cursor, 1000, false);
      REQUIRE(page.is_ok());
      all.insert(page.value().keys.begin(), page.value().keys.end());
      cursor = page.value().next_cursor;
    } while (cursor != 0);
    return all;
  }

  std::unique_ptr<Store> store;
  std::atomic<std::uint64_t> seconds{1'000'000};

 private:
  std::optional<Folder> folder_;
};

std::set<std::uint64_t> between(std::uint64_t begin, std::uint64_t end) {
  std::set<std::uint64_t> keys;
  for (; begin < end; ++begin) keys.insert(keys.end(), begin);
  return keys;
}

std::vector<bool> tiers() { return {false, true}; }

TEST_CASE("rows go when no step of a job has changed them for long enough") {
  for (const bool tiered : tiers()) {
    CAPTURE(tiered);
    Swept swept({.evict_after_steps = 3}, tiered);
    swept.push(0, 9000, 0);
    swept.push(0, 1000, 1);
    swept.push(1000, 2000, 2);
    CHECK(swept.sweep().freed[kSteps].rows == 0);
    swept.push(1000, 2000, 2);  // a step counts once
    CHECK(swept.sweep().freed[kSteps].rows == 0);
    swept.push(20'000, 20'001, 3);
    const SweepReport dry = swept.sweep(/*dry_run=*/true);
    CHECK(dry.rows_seen == 9001);
    CHECK(dry.freed[kSteps].rows == 7000);
    CHECK(swept.keys().size() == 9001);
    const SweepReport done = swept.sweep();
    CHECK(done.freed[kSteps].rows == 7000);
    CHECK(done.freed[kSteps].bytes == 7000 * (2 * kDim * 4 + 4));
    std::set<std::uint64_t> expected = between(0, 2000);
    expected.insert(20'000);
    CHECK(swept.keys() == expected);
    CHECK(swept.store->stats()[0].rows == 2001);
    CHECK(swept.store->stats()[0].swept_rows[kSteps] == 7000);
    CHECK(swept.store->stats()[0].sweeps == 3);
    CHECK(swept.store->stats()[0].rows_added == 9001);
    CHECK((swept.store->stats()[0].rows_evicted > 0) == tiered);
    // What the SSD's segments have that is surely too new is not looked at.
    const AgeCounts ages = swept.store->stats()[0].ages.steps;
    CHECK(ages[0] == 1);
    CHECK(ages == done.ages.steps);
    CHECK((tiered ? ages[1] <= 1000 : ages[1] == 1000));
    CHECK((tiered ? ages[2] <= 1000 : ages[2] == 1000));
    CHECK(std::accumulate(ages.begin(), ages.end(), std::uint64_t{0}) == ages[0] + ages[1] + ages[2]);
    swept.push(30'000, 30'001, 0, /*job=*/2);  // another job's first step counts as one
    CHECK(swept.sweep().freed[kSteps].rows == 1000);
    swept.store->note_step(1, 4);   // a step that brought the table nothing
    swept.store->note_step(9, 99);  // of a job that has nothing to do with it
    CHECK(swept.sweep().freed[kSteps].rows == 1000);
  }
}

TEST_CASE("jobs that come and go leave no clocks behind, and the steps that they made count") {
  constexpr std::uint64_t kJobs = 5000;
  Swept swept({.evict_after_steps = 2 * kJobs}, false);
  swept.push(0, 1, 0, /*job=*/kJobs + 1);
  for (std::uint64_t job = 1; job <= kJobs; ++job) {
    swept.push(1, 2, 0, job);
    swept.store->note_step(job, 1);
    CHECK(swept.store->job_clocks() <= 3);
    swept.store->forget_job(static_cast<std::uint32_t>(job));
  }
  CHECK(swept.store->job_clocks() == 1);
  CHECK(swept.sweep().freed[kSteps].rows == 1);  // two steps of each job
  for (std::uint64_t generation = 1; generation <= kJobs; ++generation) {
    const std::uint64_t clock = generation << 32 | 7;
    swept.push(1, 2, 0, clock);
    swept.store->note_step(clock, 1);
  }
  CHECK(swept.store->job_clocks() == 3);
}

TEST_CASE("rows go by the clock of the wall") {
  for (const bool tiered : tiers()) {
    CAPTURE(tiered);
    Swept swept({.evict_after_steps = 1000, .evict_after_seconds = 60}, tiered);
    swept.push(0, 6000);
    swept.seconds += 59;
    swept.push(5000, 6000);
    CHECK(swept.sweep().freed[kSeconds].rows == 0);
    const RowAges ages = swept.store->stats()[0].ages;
    CHECK((tiered ? ages.seconds[6] <= 5000 : ages.seconds[6] == 5000));  // 59 has 6 bits
    CHECK((tiered ? ages.seconds[0] <= 1000 : ages.seconds[0] == 1000));
    CHECK(std::accumulate(ages.steps.begin(), ages.steps.end(), std::uint64_t{0}) == ages.seconds[0] + ages.seconds[6]);
    swept.seconds += 1;
    const auto resting = swept.store->sweep(kTable, {.by_seconds = false});
    REQUIRE(resting.is_ok());
    CHECK(resting.value().freed[kSeconds].rows == 0);
    CHECK(swept.sweep().freed[kSeconds].rows == 5000);
    CHECK(swept.keys() == between(5000, 6000));
    swept.seconds -= 1000;  // the clock was set back: nothing is old
    CHECK(swept.sweep().freed[kSeconds].rows == 0);
  }
}

TEST_CASE("rows go whose weights are small, by what they were stored as") {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
    for (const bool tiered : tiers()) {
      CAPTURE(tiered);
      Swept swept({.evict_below_norm = 2.0f}, tiered, dtype);
      std::vector<std::uint64_t> keys(4000);
      std::iota(keys.begin(), keys.end(), 0);
      std::vector<float> rows(keys.size() * kDim, 0.0f);
      for (const std::uint64_t key : keys) rows[key * kDim] = key % 4 == 0 ? 1.5f : -2.0f;
      for (std::size_t begin = 0; begin < keys.size(); begin += 500) {
        REQUIRE(swept.store->assign(kTable, std::span(keys).subspan(begin, 500), rows.data() + begin * kDim).is_ok());
      }
      CHECK(swept.sweep().freed[kNorm].rows == 1000);
      for (const std::uint64_t key : swept.keys()) CHECK(key % 4 != 0);
    }
  }
}

TEST_CASE("beyond a bound, those go that were used longest ago, or least often") {
  for (const bool tiered : tiers()) {
    CAPTURE(tiered);
    {
      Swept lru({.max_rows = 3000}, tiered);
      for (std::int64_t step = 0; step < 10; ++step) {
        lru.push(static_cast<std::uint64_t>(step) * 600, static_cast<std::uint64_t>(step + 1) * 600, step);
      }
      CHECK(lru.sweep(/*dry_run=*/true).freed[kBound].rows == 3000);
      CHECK(lru.sweep().freed[kBound].rows == 3000);
      CHECK(lru.keys() == between(3000, 6000));
      CHECK(lru.sweep().freed[kBound].rows == 0);
      CHECK(lru.sweep(false, 0.5).freed[kBound].rows == 1500);  // this store has half of the table
      const std::set<std::uint64_t> left = lru.keys();
      CHECK(left.size() == 1500);
      for (std::uint64_t key = 4800; key < 6000; ++key) CHECK(left.contains(key));
      for (const std::uint64_t key : left) CHECK(key >= 4200);  // of 600 equal ones some
    }
    Swept lfu({.max_bytes = 2500 * 2 * kDim * 4, .evict_by = EvictBy::kLfu}, tiered);
    lfu.push(0, 6000);
    lfu.push(0, 2000);
    CHECK(lfu.sweep().freed[kBound].rows == 3500);
    const std::set<std::uint64_t> left = lfu.keys();
    CHECK(left.size() == 2500);
    for (std::uint64_t key = 0; key < 2000; ++key) CHECK(left.contains(key));
  }
}

TEST_CASE("a deletion that names a version leaves alone what has changed or is prepared") {
  for (const bool tiered : tiers()) {
    CAPTURE(tiered);
    Swept swept({}, tiered);
    swept.push(0, 8000);
    std::vector<std::uint64_t> keys(300), versions(300);
    std::iota(keys.begin(), keys.end(), 100);
    std::vector<float> rows(keys.size() * kDim);
    const auto pull = [&] {
      REQUIRE(
          swept.store
              ->pull(kTable, keys, Dtype::kFloat32, reinterpret_cast<std::byte*>(rows.data()), {.versions = versions})
              .is_ok());
    };
    pull();
    if (tiered) REQUIRE(swept.store->write_back().is_ok());
    swept.push(100, 200);
    if (tiered) REQUIRE(swept.store->write_back().is_ok());
    std::optional<Store::Reservation> prepared;
    if (tiered) {
      auto reserved = swept.store->reserve(kTable, std::span(keys).subspan(250));
      REQUIRE(reserved.is_ok());
      prepared = std::move(reserved).value();
    }
    const auto erased = swept.store->erase(kTable, keys, versions);
    REQUIRE(erased.is_ok());
    CHECK(erased.value() == (tiered ? 150u : 200u));
    const std::uint64_t spared = tiered ? 8000 - 150 : 8000 - 200;
    CHECK(swept.keys().size() == spared);
    prepared.reset();
    swept.push(10'000, 16'000);  // pushes the others out of memory, and none is lost
    CHECK(swept.keys().size() == spared + 6000);
    pull();
    CHECK(rows[0] < -1.5f);  // changed twice
  }
}

TEST_CASE("a sweep beside pulls and pushes removes only what stays old") {
  for (const bool tiered : tiers()) {
    CAPTURE(tiered);
    Swept swept({.evict_after_steps = 2}, tiered);
    swept.push(0, 6000, 0);
    std::atomic<bool> is_done{false};
    std::thread pusher([&] {
      for (std::int64_t step = 1; !is_done; ++step) swept.push(0, 500, step);
    });
    std::uint64_t removed = 0;
    for (int i = 0; i < 30; ++i) removed += swept.sweep().freed[kSteps].rows;
    while (removed < 5500) removed += swept.sweep().freed[kSteps].rows;
    is_done = true;
    pusher.join();
    swept.push(0, 500, 1 << 20);
    CHECK(swept.keys().size() == 500);
    CHECK(removed >= 5500);
  }
}

TEST_CASE("a sweep of rows on the SSD reads those segments that have an old one") {
  if (ssd_engine != SsdEngine::kPages) return;
  constexpr std::uint64_t kRows = 60'000;
  Swept swept({.evict_after_steps = 100, .evict_after_seconds = 1000}, true, Dtype::kFloat32, kRows);
  for (std::uint64_t begin = 0; begin < kRows; begin += kRows / 6) {
    swept.push(begin, begin + kRows / 6, static_cast<std::int64_t>(begin * 6 / kRows));
    swept.seconds += 100;
  }
  const auto visited = [&] { return swept.store->tier_stats()->ssd.rows_visited; };
  REQUIRE(swept.store->tier_stats()->ssd.rows_written > kRows / 2);
  CHECK(swept.sweep().rows_seen == kRows);
  CHECK(visited() == 0);
  swept.seconds = 1'000'000 + 1000 + 150;  // of the first two
  CHECK(swept.sweep(/*dry_run=*/true).freed[kSeconds].rows == kRows / 3);
  const std::uint64_t once = visited();
  CHECK(once < kRows / 2);
  const SweepReport done = swept.sweep();
  CHECK(done.freed[kSeconds].rows == kRows / 3);
  CHECK(done.rows_seen == kRows);
  CHECK(swept.keys() == between(kRows / 3, kRows));
  const std::uint64_t before = visited();
  CHECK(swept.sweep().freed[kSeconds].rows == 0);
  CHECK(visited() - before < kRows / 6);  // what shares segments with those that went
  const std::uint64_t now = visited();
  CHECK(swept.sweep().freed[kSeconds].rows == 0);
  CHECK(visited() == now);
}

TEST_CASE("a sweep that is stopped says so, and a table without a policy is left alone") {
  Swept swept({.evict_below_norm = 100}, false);
  swept.push(0, 5000);
  swept.store->stop_sweeps();
  const SweepReport report = swept.sweep();
  CHECK_FALSE(report.is_complete);
  CHECK(swept.keys().size() == 5000);
  Swept plain({}, false);
  plain.push(0, 10);
  CHECK(plain.sweep().rows_seen == 0);
  CHECK(plain.store->sweep(9, {}).status().code() == Code::kNotFound);
  CHECK(plain.store->sweep(kTable, {.share = 2}).status().code() == Code::kInvalidArgument);
}

TEST_CASE("a large stripe is held for a few rows at a time") {
  Swept swept({.evict_below_norm = 0.1f}, false);
  swept.push(0, 200'000);
  const SweepReport report = swept.sweep();
  CHECK(report.rows_seen == 200'000);
  CHECK(report.slices >= 16);
  MESSAGE("longest hold " << report.longest_lock.cpu_nanoseconds / 1000 << " us of CPU in " << report.slices
                          << " slices");
}

TEST_CASE("a table's part of memory is kept for it, and not exceeded") {
  const Folder folder;
  {
    constexpr std::uint64_t kBudget = 4u << 20;
    auto store =
        Store::create({.memory_budget_bytes = kBudget,
                       .slot_count = 16,
                       .ssd = {.path = folder.path().string(), .engine = ssd_engine, .direct_io = ssd_direct_io}});
    REQUIRE(store.is_ok());
    const auto table = [](std::uint32_t id, float share) {
      return TableSchema{.id = id,
                         .name = "n/t" + std::to_string(id),
                         .dim = kDim,
                         .init = {},
                         .optimizer = {.kind = OptimizerKind::kAdagrad},
                         .policy = {.ram_share = share}};
    };
    REQUIRE(store.value()->create_table(table(1, 0.5f)).is_ok());
    REQUIRE(store.value()->create_table(table(2, 0)).is_ok());
    CHECK(store.value()->create_table(table(4, 0.5f)).code() == Code::kInvalidArgument);
    const auto push = [&](std::uint32_t id, std::uint64_t begin, std::uint64_t end) {
      for (; begin < end; begin += 500) {
        std::vector<std::uint64_t> keys(500);
        std::iota(keys.begin(), keys.end(), begin);
        const std::vector<float> grads(keys.size() * kDim, 1.0f);
        const Status pushed = store.value()->apply(id, keys, grads.data(), {.lr = 1.0f});
        INFO(pushed.message());
        REQUIRE(pushed.is_ok());
      }
    };
    const auto in_memory = [&](std::uint32_t id) {
      for (const TableStats& stats : store.value()->stats()) {
        if (stats.table_id == id) return stats.total_bytes;
      }
      return std::uint64_t{0};
    };
    push(1, 0, 60'000);
    CHECK(in_memory(1) <= kBudget / 2);
    CHECK(in_memory(1) > kBudget / 4);
    const std::uint64_t before = in_memory(1);
    for (int i = 0; i < 3; ++i) push(2, 0, 60'000);  // hotter, and has no part of its own
    CHECK(in_memory(1) == before);
    CHECK(store.value()->used_bytes() <= kBudget);
  }
  auto plain = Store::create({.slot_count = 16});
  CHECK(plain.value()
            ->create_table(
                {.id = 1, .name = "n/t", .dim = kDim, .init = {}, .optimizer = {}, .policy = {.ram_share = 0.1f}})
            .code() == Code::kFailedPrecondition);
}

}  // namespace
}  // namespace sparserow

int main(int argc, char** argv) { return sparserow::run_with_each_engine(argc, argv, sparserow::DirectRun::kLongForm); }
