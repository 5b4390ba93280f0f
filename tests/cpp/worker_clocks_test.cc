// What a commit costs does not grow with the number of workers: clocks are kept in order as they change, and the sums
// are those of a scan.
#include "commit/worker_clocks.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <future>
#include <optional>
#include <random>
#include <vector>

#include "commit/commit_log.h"
#include "rpc_fixture.h"

using namespace sparserow;
using namespace sparserow::rpc;
using namespace sparserow::testing;
using Clock = std::chrono::steady_clock;

namespace {

// A job of many workers, whose commits have one row each.
struct Crowd {
  TableSchema table = sgd_table("t/a", 2, 0.0f);
  std::shared_ptr<Store> store = make_store(0);
  CommitLog log{*store};
  std::uint32_t workers;
  std::uint64_t key = 7;
  std::vector<float> grads{-1.0f, -1.0f};

  Crowd(std::uint32_t count, std::optional<std::uint32_t> staleness, std::uint32_t quorum = 0) : workers(count) {
    REQUIRE(store->create_table(table).is_ok());
    JobSpec spec{.job_id = 1, .name = "job", .staleness = staleness, .members = {}, .quorum = quorum};
    for (std::uint32_t worker = 0; worker < workers; ++worker) spec.members.push_back({worker, 1, worker});
    REQUIRE(log.set_job(spec).is_ok());
  }

  Status commit(std::uint32_t worker, std::int64_t step) {
    Commit commit{.job_id = 1,
                  .worker_id = worker,
                  .worker_epoch = 1,
                  .sequence = static_cast<std::uint64_t>(step) + 1,
                  .step = step,
                  .grad_sum = true,
                  .blocks = {},
                  .owner = nullptr};
    commit.blocks.push_back(
        {.table_id = table.id, .dim = 2, .lr = 1.0f, .keys = std::span(&key, 1), .grads = grads.data()});
    return log.commit(std::move(commit), false).status();
  }

  // All workers' pulls and commits of a step, with all that a server asks beside.
  void step(std::int64_t step) {
    for (std::uint32_t worker = 0; worker < workers; ++worker) {
      log.when_readable(1, worker, 1, step, Clock::now() + std::chrono::seconds(30), [](const Status&) {});
      static_cast<void>(log.steps_behind(1, step));
    }
    for (std::uint32_t worker = 0; worker < workers; ++worker) {
      static_cast<void>(log.pending_bytes(1, {worker, 1}));
      static_cast<void>(commit(worker, step));
    }
  }
};

}  // namespace

TEST_CASE("random clocks: what is kept in order is what a scan finds") {
  const std::uint64_t seed = std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  const auto below = [&random](std::int64_t end) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(end));
  };
  std::vector<WorkerClock> workers;
  WorkerClocks clocks;
  const auto random_clock = [&] {
    // Some count for no step, some left before they were done, some are done before they begin.
    return WorkerClock{below(12), below(3) == 0 ? below(14) - 1 : kForever, below(14) - 1};
  };
  for (int operation = 0; operation < 5000; ++operation) {
    const auto which = workers.empty() ? 0 : static_cast<std::size_t>(below(static_cast<std::int64_t>(workers.size())));
    if (workers.empty() || (workers.size() < 40 && below(4) == 0)) {
      workers.push_back(random_clock());
      clocks.add(workers.back());
    } else if (below(5) == 0) {
      clocks.remove(workers[which]);
      workers.erase(workers.begin() + static_cast<std::ptrdiff_t>(which));
    } else {
      WorkerClock after = workers[which];
      if (below(2) == 0) {
        after.done_step += below(3);
      } else {
        after = random_clock();
      }
      clocks.replace(workers[which], after);
      workers[which] = after;
    }
    std::uint32_t live = 0;
    std::int64_t slowest = kForever;
    for (const WorkerClock& worker : workers) {
      if (!worker.is_live()) continue;
      ++live;
      slowest = std::min(slowest, worker.done_step);
    }
    REQUIRE(clocks.live() == live);
    REQUIRE(clocks.slowest() == slowest);
    for (std::int64_t step = -1; step < 16; ++step) {
      const auto counts = [step](const WorkerClock& worker) { return worker.counts(step); };
      REQUIRE(clocks.counted(step) == std::count_if(workers.begin(), workers.end(), counts));
      REQUIRE(clocks.is_done(step) == std::none_of(workers.begin(), workers.end(), [&](const WorkerClock& worker) {
                return counts(worker) && worker.done_step < step;
              }));
    }
  }
}

TEST_CASE("a commit and a pull look at no other worker, at any staleness and with a quorum") {
  struct Mode {
    std::optional<std::uint32_t> staleness;
    std::uint32_t quorum;
  };
  for (const Mode mode : {Mode{0u, 0}, Mode{0u, 1}, Mode{0u, 40}, Mode{2u, 0}, Mode{std::nullopt, 0}}) {
    CAPTURE(mode.quorum);
    Crowd crowd(64, mode.staleness, mode.quorum);
    crowd.step(0);
    const std::uint64_t before = crowd.log.stats().workers_visited;
    for (std::int64_t step = 1; step < 4; ++step) crowd.step(step);
    CHECK(crowd.log.stats().workers_visited - before == 0);
    CHECK(crowd.log.stats().commits_accepted == 4 * (mode.quorum == 0 ? 64 : mode.quorum));
    CHECK(crowd.log.pending_bytes(1, {0, 1}) == 0);
  }
}

TEST_CASE("a cut that waits for many workers looks at each of them a few times") {
  for (const std::optional<std::uint32_t> staleness : {std::optional(0u), std::optional<std::uint32_t>()}) {
    constexpr std::uint32_t kWorkers = 64;
    Crowd crowd(kWorkers, staleness);
    REQUIRE(crowd.commit(0, 0).is_ok());
    REQUIRE(crowd.log.freeze(1, 1, {}).is_ok());
    CutTarget target{.job_id = 1, .operation = 1, .step = 0, .workers = {}};
    for (std::uint32_t worker = 0; worker < kWorkers; ++worker) target.workers.push_back({worker, 1, 1});
    const std::uint64_t before = crowd.log.stats().workers_visited;
    auto cut = std::async(std::launch::async, [&] {
      return crowd.log.cut({target}, Clock::now() + std::chrono::seconds(30), [] { return Status::ok(); });
    });
    for (std::uint32_t worker = 1; worker < kWorkers; ++worker) {
      Status status = crowd.commit(worker, 0);
      while (status.code() == Code::kUnavailable) status = crowd.commit(worker, 0);  // the cut has not begun
      REQUIRE(status.is_ok());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // for the cut to look
    }
    const auto images = cut.get();
    REQUIRE(images.is_ok());
    for (const WorkerImage& worker : images.value()[0].workers) CHECK(worker.window.committed_sequence == 1);
    CHECK(crowd.log.stats().workers_visited - before <= 4 * kWorkers);
  }
}

TEST_CASE("bytes of kept commits are a sum: of what waits for its step, less what leaves with its worker") {
  Crowd crowd(3, 0u);
  const std::uint64_t bytes = 8 + 2 * 4;
  REQUIRE(crowd.commit(0, 0).is_ok());
  REQUIRE(crowd.commit(1, 0).is_ok());
  REQUIRE(crowd.commit(1, 1).is_ok());
  CHECK(crowd.log.pending_bytes(1, {2, 1}) == 3 * bytes);
  JobSpec spec{.job_id = 1, .name = "job", .staleness = 0, .members = {{0, 1, 0}, {2, 1, 2}}};
  REQUIRE(crowd.log.set_job(spec).is_ok());
  CHECK(crowd.log.pending_bytes(1, {2, 1}) == bytes);
  CHECK(crowd.log.stats().kept_bytes == bytes);
  REQUIRE(crowd.commit(2, 0).is_ok());
  CHECK(crowd.log.pending_bytes(1, {2, 1}) == 0);
}
