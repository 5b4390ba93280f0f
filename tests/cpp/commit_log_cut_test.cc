// A cut of the commit log: what belongs to it is taken and applied, what comes later waits, and its windows make a new
// log answer as the old one did.
#include <doctest/doctest.h>

#include <future>
#include <numeric>
#include <thread>

#include "commit/commit_log.h"
#include "rpc_fixture.h"

using namespace sparserow;
using namespace sparserow::rpc;
using namespace sparserow::testing;
using Clock = std::chrono::steady_clock;

namespace {

struct Fixture {
  TableSchema table = sgd_table("t/a", 2, 0.0f);
  std::shared_ptr<Store> store = make_store(0);
  CommitLog log;
  std::optional<std::uint32_t> staleness;

  explicit Fixture(std::optional<std::uint32_t> job_staleness, CommitLog::Options options = {})
      : log(*store, std::move(options)), staleness(job_staleness) {
    REQUIRE(store->create_table(table).is_ok());
    set_members(1);
  }

  void set_members(std::uint64_t operation, std::uint32_t generation = 1) {
    JobSpec spec{.job_id = 1, .name = "job", .staleness = staleness, .members = {{1, 1, 0}, {2, 1, 1}}};
    spec.operation = operation;
    spec.generation = generation;
    REQUIRE(log.set_job(spec).is_ok());
  }

  // keys: 7 and the following ones.
  Result<CommitResult> commit(std::uint32_t worker, std::uint64_t sequence, std::int64_t step, std::size_t keys = 1) {
    std::vector<std::uint64_t> all(keys);
    std::iota(all.begin(), all.end(), 7);
    Commit commit = make_commit(table, worker, sequence, step, std::move(all), -1.0f);
    commit.grad_sum = true;
    return log.commit(std::move(commit), false);
  }

  // As a client does that is told to try again: until the cut that takes it has begun.
  Status commit_in_time(std::uint32_t worker, std::uint64_t sequence, std::int64_t step) {
    for (int attempt = 0;; ++attempt) {
      Status status = commit(worker, sequence, step).status();
      if (status.code() != Code::kUnavailable || attempt == 5000) return status;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  float row() const {
    const std::uint64_t key = 7;
    float values[2];
    REQUIRE(store->pull(table.id, std::span(&key, 1), Dtype::kFloat32, reinterpret_cast<std::byte*>(values)).is_ok());
    return values[0];
  }

  // As the coordinator names it from the reports.
  CutTarget freeze(std::uint64_t operation, std::optional<std::chrono::milliseconds> lease = std::nullopt) {
    const auto reports = log.freeze(1, operation, {}, lease);
    REQUIRE(reports.is_ok());
    CutTarget target{.job_id = 1, .operation = operation, .step = kNoStep, .workers = {}};
    for (const WorkerReport& report : reports.value()) {
      if (staleness == 0u) target.step = std::max(target.step, report.committed_step);
      target.workers.push_back({report.worker_id, report.epoch, report.committed_sequence});
    }
    return target;
  }

  std::future<Result<std::vector<JobImage>>> cut(CutTarget target, float& seen,
                                                 std::chrono::milliseconds deadline = std::chrono::seconds(20)) {
    return std::async(std::launch::async, [this, target, &seen, deadline] {
      return log.cut({target}, Clock::now() + deadline, [&] {
        seen = row();
        return Status::ok();
      });
    });
  }
};

}  // namespace

TEST_CASE("staleness 0: the cut takes the step that one worker has begun, and none after it") {
  Fixture fixture(0);
  REQUIRE(fixture.commit(1, 1, 0).is_ok());
  REQUIRE(fixture.commit(2, 1, 0).is_ok());
  REQUIRE(fixture.commit(1, 2, 1).is_ok());
  const CutTarget target = fixture.freeze(2);
  CHECK(target.step == 1);
  float seen = -1;
  auto cut = fixture.cut(target, seen);
  const auto later = fixture.commit(1, 3, 2);
  CHECK(later.status().code() == Code::kUnavailable);
  REQUIRE(fixture.commit_in_time(2, 2, 1).is_ok());  // belongs to it, though the job is held
  const auto images = cut.get();
  INFO(images.status().message());
  REQUIRE(images.is_ok());
  CHECK(seen == 4.0f);
  REQUIRE(images.value().size() == 1);
  CHECK(images.value()[0].completed == 1);
  for (const WorkerImage& worker : images.value()[0].workers) CHECK(worker.window.committed_sequence == 2);
  CHECK(fixture.commit(1, 3, 2).status().code() == Code::kUnavailable);  // until the members are set again
  fixture.set_members(2);
  CHECK(fixture.commit(1, 3, 2).is_ok());
}

TEST_CASE("without a barrier: each worker's last commit, and who is missing is named") {
  Fixture fixture(std::nullopt);
  REQUIRE(fixture.commit(1, 1, 0).is_ok());
  CutTarget target = fixture.freeze(2);
  target.workers = {{1, 1, 2}, {2, 1, 0}};  // another shard has the second one of worker 1
  float seen = -1;
  const auto late = fixture.cut(target, seen, std::chrono::milliseconds(30)).get();
  CHECK(late.status().code() == Code::kDeadlineExceeded);
  CHECK(late.status().message().find("worker ids 1") != std::string::npos);
  CHECK(fixture.commit(2, 1, 0).status().code() == Code::kUnavailable);
  auto cut = fixture.cut(target, seen);
  REQUIRE(fixture.commit_in_time(1, 2, 1).is_ok());
  REQUIRE(cut.get().is_ok());
  CHECK(seen == 2.0f);
}

TEST_CASE("a change of members ends a cut that waits, and another freeze does") {
  for (const bool is_set : {true, false}) {
    Fixture fixture(std::nullopt);
    CutTarget target = fixture.freeze(2);
    target.workers = {{1, 1, 5}};
    float seen = -1;
    auto cut = fixture.cut(target, seen);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (is_set) {
      fixture.set_members(3);
    } else {
      static_cast<void>(fixture.freeze(3));
    }
    REQUIRE(fixture.commit(1, 1, 0).is_ok() == is_set);
    CHECK(cut.get().status().code() == Code::kUnavailable);
    CHECK(seen == -1);
  }
}

TEST_CASE("a FREEZE that is repeated while its cut waits ends the cut") {
  Fixture fixture(std::nullopt);
  CutTarget target = fixture.freeze(2);
  target.workers = {{1, 1, 1}};  // another shard has it
  float seen = -1;
  auto cut = fixture.cut(target, seen);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  static_cast<void>(fixture.freeze(2));
  CHECK(cut.get().status().code() == Code::kUnavailable);
  CHECK(seen == -1);
}

TEST_CASE("a job whose freezer is gone goes on when the freeze's lease has ended, and no cut of it is taken any more") {
  for (const bool is_waited_for : {true, false}) {
    Fixture fixture(std::nullopt);
    static_cast<void>(fixture.freeze(2, std::chrono::hours(1)));
    CHECK(fixture.commit(1, 1, 0).status().code() == Code::kUnavailable);
    CutTarget target = fixture.freeze(3, std::chrono::milliseconds(50));
    target.workers = {{2, 1, 5}};  // another shard said that it has these
    float seen = -1;
    std::future<Result<std::vector<JobImage>>> cut;
    if (is_waited_for) cut = fixture.cut(target, seen);
    REQUIRE(fixture.commit_in_time(1, 1, 0).is_ok());
    if (!is_waited_for) cut = fixture.cut(target, seen);
    CHECK(cut.get().status().code() == Code::kUnavailable);
    CHECK(seen == -1);
    fixture.set_members(3);  // the freezer was slow: its RESOLVE comes
    CHECK(fixture.commit(2, 1, 0).is_ok());
  }
}

TEST_CASE("a log with the windows of a cut answers again what is in it, and takes what is not") {
  Fixture fixture(std::nullopt);
  REQUIRE(fixture.commit(1, 1, 0).is_ok());
  REQUIRE(fixture.commit(1, 2, 1).is_ok());
  REQUIRE(fixture.log.abort(1, 1, 1, 3).is_ok());
  float seen = -1;
  const auto images = fixture.cut(fixture.freeze(2), seen).get();
  REQUIRE(images.is_ok());

  Fixture fresh(std::nullopt);
  REQUIRE(fresh.log.drop_job(1, 2).is_ok());
  fresh.log.install(images.value());
  fresh.set_members(3);
  const auto again = fresh.commit(1, 2, 1);
  REQUIRE(again.is_ok());
  CHECK(again.value().duplicate);
  CHECK(fresh.commit(1, 3, 2).status().code() == Code::kFailedPrecondition);  // aborted before the cut
  CHECK(fresh.row() == 0.0f);
  CHECK(fresh.commit(1, 4, 2).is_ok());
  CHECK(fresh.row() == 1.0f);
  // Windows of another generation are ignored.
  fresh.set_members(4, 2);
  CHECK(fresh.commit(1, 2, 1).is_ok());
  CHECK(fresh.row() == 2.0f);
}

TEST_CASE("what was taken of a worker is counted once, and goes on from a cut") {
  Fixture fixture(std::nullopt);
  for (std::uint64_t sequence = 1; sequence <= 5; ++sequence) {
    REQUIRE(fixture.commit(1, sequence, static_cast<std::int64_t>(sequence) - 1).is_ok());
  }
  REQUIRE(fixture.commit(1, 5, 4).is_ok());  // a repeat
  const auto write = [] { return Result<std::uint64_t>(1); };
  REQUIRE(fixture.log.write_once({1, 1}, 1, 6, write).is_ok());
  REQUIRE(fixture.log.write_once({1, 1}, 1, 6, write).is_ok());
  REQUIRE(fixture.log.abort(1, 1, 1, 7).is_ok());
  const auto reports = fixture.log.freeze(1, 9, {}, std::nullopt);
  REQUIRE(reports.is_ok());
  for (const WorkerReport& report : reports.value()) {
    CHECK(report.steps_taken == (report.worker_id == 1 ? 5 : 0));
    CHECK(report.writes_taken == (report.worker_id == 1 ? 1 : 0));
  }
  JobWindow window;
  window.begin(1, 0);
  window.finish(1, 0, 1);
  window.begin_write(2);
  window.finish_write(2, 1);
  window.begin(3, 1);
  window.take_back(3, 1);
  JobWindow again(window.image());
  again.begin(4, 1);
  again.finish(4, 1, 1);
  CHECK(again.steps_taken() == 2);
  CHECK(again.writes_taken() == 1);
}

TEST_CASE("a commit that is taken back is not in the next report, so that no cut waits for it") {
  int refusals = 0;
  CommitLog::Options options;
  options.parts = 2;
  options.parallel_for = [&refusals](std::uint32_t parts, const std::function<void(std::uint32_t)>& work) {
    if (refusals-- > 0) throw std::bad_alloc();
    for (std::uint32_t part = 0; part < parts; ++part) work(part);
  };
  constexpr std::size_t kManyKeys = 4096;  // enough to be applied in parts
  Fixture refusing(3, options);
  Fixture other(3);
  for (Fixture* shard : {&refusing, &other}) REQUIRE(shard->commit(1, 1, 0).is_ok());
  refusals = 1;
  CHECK(refusing.commit(1, 2, 1, kManyKeys).status().code() == Code::kResourceExhausted);
  const auto reports = refusing.log.freeze(1, 2, {});
  REQUIRE(reports.is_ok());
  CHECK(reports.value()[0].committed_sequence == 1);
  CHECK(reports.value()[0].committed_step == 0);
  refusing.set_members(2);

  const CutTarget target = refusing.freeze(3);
  static_cast<void>(other.freeze(3));
  for (Fixture* shard : {&refusing, &other}) {
    float seen = -1;
    const auto images = shard->cut(target, seen, std::chrono::milliseconds(300)).get();
    INFO(images.status().message());
    REQUIRE(images.is_ok());
    CHECK(images.value()[0].workers[0].window.committed_sequence == 1);
    CHECK(images.value()[0].workers[0].window.committed_step == 0);
    shard->set_members(4);
    CHECK(shard->commit(1, 2, 1, kManyKeys).is_ok());
  }
}

TEST_CASE("of commits that are applied at once, the one that is taken back does not count as the highest") {
  JobWindow window;
  window.begin(5, 0);
  window.begin(7, 2);
  window.begin(6, 1);
  CHECK(window.committed_sequence() == 7);
  CHECK(window.committed_step() == 2);
  window.take_back(7, 2);
  CHECK(window.committed_sequence() == 6);
  CHECK(window.committed_step() == 1);
  window.finish(5, 0, 1);
  window.take_back(6, 1);
  CHECK(window.committed_sequence() == 5);
  CHECK(window.committed_step() == 0);
  CHECK(window.image().committed_sequence == 5);
  window.begin(7, 2);
  window.finish(7, 2, 1);
  CHECK(window.committed_sequence() == 7);
}
