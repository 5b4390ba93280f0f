// Commits that are being applied while their worker's place in the job ends: a repeat gets the answer of the first.
#include <doctest/doctest.h>

#include <future>
#include <numeric>

#include "commit/commit_log.h"
#include "rpc_fixture.h"

using namespace sparserow;
using namespace sparserow::rpc;
using namespace sparserow::testing;
using namespace std::chrono_literals;

namespace {

constexpr std::uint64_t kKeys = 4096;  // enough for a batch to be applied in parts
constexpr WorkerKey kWorker{1, 1};

// A log in which worker 1's commit of sequence 1 stands still while it is applied, until end_apply() is called.
struct Fixture {
  TableSchema table = sgd_table("t/a", 2, 0.0f);
  std::shared_ptr<Store> store = make_store(0);
  std::promise<void> applying;
  std::promise<void> may_end;
  bool fails = false;
  int applied = 0;
  std::uint64_t operation = 0;
  CommitLog log;
  std::future<Result<CommitResult>> first;

  explicit Fixture(bool first_fails = false) : fails(first_fails), log(*store, options()) {
    REQUIRE(store->create_table(table).is_ok());
    set_members(true);
    first = std::async(std::launch::async, [this] { return commit(); });
    applying.get_future().wait();
  }

  CommitLog::Options options() {
    CommitLog::Options options;
    options.parts = 2;
    options.parallel_for = [this](std::uint32_t parts, const std::function<void(std::uint32_t)>& work) {
      if (++applied == 1) {
        applying.set_value();
        may_end.get_future().wait();
        if (fails) throw std::bad_alloc();
      }
      for (std::uint32_t part = 0; part < parts; ++part) work(part);
    };
    return options;
  }

  void set_members(bool with_worker, std::uint32_t epoch = 1) {
    JobSpec spec{.job_id = 1, .name = "job", .staleness = std::nullopt, .members = {{0, 1, 0}}};
    if (with_worker) spec.members.push_back({1, epoch, 1});
    spec.operation = ++operation;
    REQUIRE(log.set_job(spec).is_ok());
  }

  Result<CommitResult> commit(std::uint64_t sequence = 1) {
    std::vector<std::uint64_t> keys(kKeys);
    std::iota(keys.begin(), keys.end(), 0);
    Commit commit = make_commit(table, kWorker.first, sequence, kNoStep, std::move(keys), -1.0f, kWorker.second);
    commit.grad_sum = true;
    return log.commit(std::move(commit), false);
  }

  // A repeat that waits for the first try.
  std::future<Result<CommitResult>> repeat() {
    auto repeat = std::async(std::launch::async, [this] { return commit(); });
    CHECK(repeat.wait_for(50ms) == std::future_status::timeout);
    return repeat;
  }

  void end_apply() { may_end.set_value(); }

  float row() const {
    const std::uint64_t key = 7;
    float values[2];
    REQUIRE(store->pull(table.id, std::span(&key, 1), Dtype::kFloat32, reinterpret_cast<std::byte*>(values)).is_ok());
    return values[0];
  }
};

void check_duplicate(const Result<CommitResult>& repeat) {
  INFO(repeat.status().message());
  REQUIRE(repeat.is_ok());
  CHECK(repeat.value().duplicate);
  CHECK(repeat.value().applied_rows == kKeys);
}

}  // namespace

TEST_CASE("a commit that is applied while its worker is retired is answered again, during and after") {
  for (const bool is_dropped : {false, true}) {
    Fixture f;
    auto before = f.repeat();
    if (is_dropped) {
      REQUIRE(f.log.drop_job(1, ++f.operation).is_ok());
    } else {
      f.set_members(false);
    }
    auto after = f.repeat();
    f.end_apply();
    CHECK(f.first.get().is_ok());
    check_duplicate(before.get());
    check_duplicate(after.get());
    check_duplicate(f.commit());
    CHECK(f.commit(2).status().code() == Code::kFenced);
    CHECK(f.row() == 1.0f);
  }
}

TEST_CASE("a commit that fails while its worker is retired is fenced: nothing of it is applied") {
  Fixture f(true);
  auto before = f.repeat();
  f.set_members(false);
  auto after = f.repeat();
  f.end_apply();
  CHECK(f.first.get().status().code() == Code::kResourceExhausted);
  for (auto* repeat : {&before, &after}) CHECK(repeat->get().status().code() == Code::kFenced);
  CHECK(f.commit().status().code() == Code::kFenced);
  CHECK(f.row() == 0.0f);
}

TEST_CASE("a commit that is applied while its worker is retired and comes back is applied once") {
  for (const bool is_back_in_time : {true, false}) {
    Fixture f;
    f.set_members(false);
    if (is_back_in_time) {
      f.set_members(true);
      auto repeat = f.repeat();
      f.end_apply();
      CHECK(f.first.get().is_ok());
      check_duplicate(repeat.get());
    } else {
      f.end_apply();
      CHECK(f.first.get().is_ok());
      f.set_members(true);
    }
    check_duplicate(f.commit());
    CHECK(f.row() == 1.0f);
    CHECK(f.commit(2).is_ok());
    CHECK(f.row() == 2.0f);
  }
}

TEST_CASE("a write by key that is made while its worker is retired is answered again") {
  Fixture f;
  f.end_apply();
  CHECK(f.first.get().is_ok());
  int writes = 0;
  const auto write = [&]() -> Result<std::uint64_t> {
    if (++writes == 1) f.set_members(false);
    return std::uint64_t{3};
  };
  CHECK(f.log.write_once(kWorker, 1, 2, write).is_ok());
  const auto again = f.log.write_once(kWorker, 1, 2, write);
  REQUIRE(again.is_ok());
  CHECK(again.value().duplicate);
  CHECK(again.value().applied_rows == 3);
  CHECK(writes == 1);
}

TEST_CASE("a new clock knows nothing of the commits of the one before") {
  Fixture f;
  f.set_members(false);
  f.end_apply();
  CHECK(f.first.get().is_ok());
  JobSpec spec{.job_id = 1, .name = "job", .staleness = std::nullopt, .members = {{1, 1, 0}}};
  spec.operation = ++f.operation;
  spec.generation = 1;
  REQUIRE(f.log.set_job(spec).is_ok());
  const auto fresh = f.commit();
  REQUIRE(fresh.is_ok());
  CHECK_FALSE(fresh.value().duplicate);
  CHECK(f.row() == 2.0f);
}
