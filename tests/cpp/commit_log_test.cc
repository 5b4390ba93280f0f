#include "commit/commit_log.h"

#include <doctest/doctest.h>

#include <atomic>
#include <cmath>
#include <future>
#include <map>
#include <new>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>

#include "rpc_fixture.h"

using namespace sparserow;
using namespace sparserow::rpc;
using namespace sparserow::testing;
using Clock = std::chrono::steady_clock;

namespace {

// A log over one table of dim 2 whose rows begin at 0 and move by -lr * gradient.
struct Fixture {
  TableSchema table = sgd_table("t/a", 2, 0.0f);
  std::shared_ptr<Store> store;
  CommitLog log;

  explicit Fixture(std::optional<std::uint32_t> staleness, std::uint32_t workers, CommitLog::Options options = {},
                   std::uint64_t memory = 0)
      : store(make_store(memory)), log(*store, std::move(options)) {
    REQUIRE(store->create_table(table).is_ok());
    set_members(staleness, workers);
  }

  void set_members(std::optional<std::uint32_t> staleness, std::uint32_t workers, std::uint32_t epoch = 1) {
    JobSpec spec{.job_id = 1, .name = "job", .staleness = staleness, .members = {}, .first_step = 0};
    // Ranks run against ids, so that reduction by id would be noticed.
    for (std::uint32_t w = 0; w < workers; ++w) spec.members.push_back({w, epoch, workers - w});
    REQUIRE(log.set_job(spec).is_ok());
  }

  Commit make(std::uint32_t worker, std::uint64_t sequence, std::int64_t step, std::vector<std::uint64_t> keys,
              float gradient, std::uint32_t epoch = 1) {
    return make_commit(table, worker, sequence, step, std::move(keys), gradient, epoch);
  }
  Result<CommitResult> commit(std::uint32_t worker, std::uint64_t sequence, std::int64_t step,
                              std::vector<std::uint64_t> keys, float gradient, std::uint32_t epoch = 1) {
    return log.commit(make(worker, sequence, step, std::move(keys), gradient, epoch), false);
  }
  float row(std::uint64_t key) const {
    float values[2];
    REQUIRE(store->pull(table.id, std::span(&key, 1), Dtype::kFloat32, reinterpret_cast<std::byte*>(values)).is_ok());
    return values[0];
  }
  // What a pull was answered; nullopt while it is parked.
  std::shared_ptr<std::optional<Status>> pull(std::uint32_t worker, std::int64_t step,
                                              std::chrono::milliseconds deadline = std::chrono::seconds(30),
                                              std::uint32_t epoch = 1) {
    auto answer = std::make_shared<std::optional<Status>>();
    log.when_readable(1, worker, epoch, step, Clock::now() + deadline,
                      [answer](Status status) { *answer = std::move(status); });
    return answer;
  }
};

bool is_ok(const std::shared_ptr<std::optional<Status>>& answer) { return answer->has_value() && (*answer)->is_ok(); }

}  // namespace

TEST_CASE("staleness 0: a step is applied once, by all, scaled by 1/N, and pulls wait for it") {
  Fixture f(0u, 2);
  CHECK(is_ok(f.pull(0, 0)));
  CHECK(is_ok(f.pull(1, 0)));
  REQUIRE(f.commit(0, 1, 0, {5, 6}, 2.0f).is_ok());
  CHECK(f.row(5) == 0.0f);
  const auto waits = f.pull(0, 1);
  CHECK(!waits->has_value());
  REQUIRE(f.commit(1, 1, 0, {6, 7}, 4.0f).is_ok());
  CHECK(is_ok(waits));
  CHECK(f.row(5) == -1.0f);
  CHECK(f.row(6) == -3.0f);
  CHECK(f.row(7) == -2.0f);
  CHECK(f.log.stats().steps_reduced == 1);
  CHECK(f.log.stats().kept_bytes == 0);
}

TEST_CASE("staleness 0: the sum runs in rank order in float64") {
  Fixture f(0u, 3);
  // In float32 1e8 + 1 - 1e8 would be 0.
  REQUIRE(f.commit(0, 1, 0, {1}, 1e8f).is_ok());
  REQUIRE(f.commit(1, 1, 0, {1}, 1.0f).is_ok());
  REQUIRE(f.commit(2, 1, 0, {1}, -1e8f).is_ok());
  CHECK(f.row(1) == -static_cast<float>(1.0 / 3.0));
}

TEST_CASE("staleness k: a pull waits for the slowest within k, commits apply as they arrive") {
  Fixture f(2u, 2);
  CHECK(is_ok(f.pull(0, 0)));
  CHECK(is_ok(f.pull(1, 0)));
  for (std::int64_t step = 0; step < 3; ++step) {
    REQUIRE(f.commit(0, static_cast<std::uint64_t>(step) + 1, step, {1}, 2.0f).is_ok());
    CHECK(f.row(1) == -static_cast<float>(step + 1));
    if (step < 2) CHECK(is_ok(f.pull(0, step + 1)));
  }
  const auto waits = f.pull(0, 3);  // needs step 0 of everyone
  CHECK(!waits->has_value());
  REQUIRE(f.commit(1, 1, 0, {2}, 2.0f).is_ok());
  CHECK(is_ok(waits));
  CHECK(f.log.stats().staleness_max == 2);
}

TEST_CASE("async: nothing waits, gradients are scaled by 1/N") {
  Fixture f(std::nullopt, 4);
  CHECK(is_ok(f.pull(0, 1000)));
  REQUIRE(f.commit(3, 1, kNoStep, {1}, 4.0f).is_ok());
  CHECK(f.row(1) == -1.0f);
}

TEST_CASE("a sequence is applied once, in whatever order sequences arrive") {
  Fixture f(std::nullopt, 1);
  REQUIRE(f.commit(0, 2, kNoStep, {1}, 1.0f).is_ok());
  const auto again = f.commit(0, 2, kNoStep, {1}, 1.0f);
  REQUIRE(again.is_ok());
  CHECK(again.value().duplicate);
  CHECK(again.value().applied_rows == 1);
  const auto earlier = f.commit(0, 1, kNoStep, {1}, 1.0f);  // sent before, arrives after: not a duplicate
  REQUIRE(earlier.is_ok());
  CHECK(!earlier.value().duplicate);
  CHECK(f.row(1) == -2.0f);
  for (std::uint64_t s = 3; s < 3 + CommitLog::kWindow; ++s) REQUIRE(f.commit(0, s, kNoStep, {2}, 0.0f).is_ok());
  const auto old = f.commit(0, 1, kNoStep, {1}, 1.0f);
  CHECK(old.status().code() == Code::kFailedPrecondition);
  CHECK(f.row(1) == -2.0f);
  CHECK(f.commit(0, 0, kNoStep, {1}, 1.0f).status().code() == Code::kInvalidArgument);
}

TEST_CASE("two phases: prepare applies nothing, commit once, abort forgets") {
  Fixture f(0u, 1);
  REQUIRE(f.log.prepare(f.make(0, 1, 0, {1}, 1.0f)).is_ok());
  REQUIRE(f.log.prepare(f.make(0, 1, 0, {1}, 3.0f)).is_ok());  // replaces the first try
  CHECK(f.row(1) == 0.0f);
  CHECK(f.log.stats().kept_bytes > 0);
  Commit signal = f.make(0, 1, 0, {}, 0.0f);
  signal.blocks.clear();
  REQUIRE(f.log.commit(signal, true).is_ok());
  CHECK(f.row(1) == -3.0f);
  const auto again = f.log.commit(signal, true);
  REQUIRE(again.is_ok());
  CHECK(again.value().duplicate);
  REQUIRE(f.log.prepare(f.make(0, 1, 0, {1}, 1.0f)).is_ok());  // a late copy of a committed prepare
  CHECK(f.log.stats().kept_bytes == 0);

  REQUIRE(f.log.prepare(f.make(0, 2, 1, {1}, 1.0f)).is_ok());
  REQUIRE(f.log.abort(1, 0, 1, 2).is_ok());
  REQUIRE(f.log.abort(1, 0, 1, 2).is_ok());
  CHECK(f.log.stats().kept_bytes == 0);
  signal.sequence = 2;
  signal.step = 1;
  CHECK(f.log.commit(signal, true).status().code() == Code::kFailedPrecondition);
  CHECK(f.row(1) == -3.0f);
}

TEST_CASE("an old epoch is fenced, a newer one asked to wait, a member that left fenced") {
  Fixture f(0u, 2);
  REQUIRE(f.commit(0, 1, 0, {1}, 1.0f).is_ok());
  f.set_members(0u, 2, 2);
  CHECK(f.commit(0, 2, 1, {1}, 1.0f, 1).status().code() == Code::kFenced);
  CHECK((*f.pull(0, 1))->code() == Code::kFenced);
  // The coordinator's word may be under way: to be tried again.
  CHECK(f.commit(0, 1, 0, {1}, 1.0f, 3).status().code() == Code::kUnavailable);
  CHECK(f.commit(9, 1, 0, {1}, 1.0f, 2).status().code() == Code::kUnavailable);
  CHECK(f.log.stats().kept_bytes == 0);  // what the old epoch left is gone
  f.set_members(0u, 1, 2);
  CHECK(f.commit(1, 1, 0, {1}, 1.0f, 2).status().code() == Code::kFenced);
  CHECK(f.log.stats().commits_fenced == 2);
  REQUIRE(f.log.drop_job(1).is_ok());
  CHECK(f.commit(0, 1, 0, {1}, 1.0f, 2).status().code() == Code::kFenced);
  CHECK(f.log.drop_job(1).code() == Code::kNotFound);
}

TEST_CASE("ABORT finishes a sequence: a late PREPARE of it holds nothing, a COMMIT of it is refused") {
  Fixture f(0u, 1);
  REQUIRE(f.log.prepare(f.make(0, 1, 0, {1}, 1.0f)).is_ok());
  REQUIRE(f.log.abort(1, 0, 1, 1).is_ok());
  REQUIRE(f.log.abort(1, 0, 1, 2).is_ok());  // a shard that refused its PREPARE, or has it still to come
  for (const std::uint64_t sequence : {1u, 2u}) {
    REQUIRE(f.log.prepare(f.make(0, sequence, 0, {1}, 1.0f)).is_ok());
    CHECK(f.log.stats().kept_bytes == 0);
    CHECK(f.log.commit(f.make(0, sequence, 0, {}, 0.0f), true).status().code() == Code::kFailedPrecondition);
    CHECK(f.commit(0, sequence, 0, {1}, 1.0f).status().code() == Code::kFailedPrecondition);
  }
  CHECK(f.row(1) == 0.0f);
  REQUIRE(f.log.prepare(f.make(0, 3, 0, {1}, 1.0f)).is_ok());  // the same step, under a new sequence
  REQUIRE(f.log.commit(f.make(0, 3, 0, {}, 0.0f), true).is_ok());
  CHECK(f.row(1) == -1.0f);
  REQUIRE(f.log.abort(1, 0, 1, 3).is_ok());  // too late
  CHECK(f.log.commit(f.make(0, 3, 0, {}, 0.0f), true).is_ok());
}

TEST_CASE("a step comes once at staleness k, and a later one does not stand for it") {
  for (const std::optional<std::uint32_t> staleness : {std::optional(1u), std::optional<std::uint32_t>()}) {
    Fixture f(staleness, 1);
    REQUIRE(f.commit(0, 1, 0, {1}, 1.0f).is_ok());
    REQUIRE(f.commit(0, 3, 2, {1}, 1.0f).is_ok());  // overtook step 1
    CHECK(f.commit(0, 4, 2, {1}, 1.0f).status().code() == Code::kFailedPrecondition);
    CHECK(f.log.prepare(f.make(0, 4, 0, {1}, 1.0f)).code() == Code::kFailedPrecondition);
    if (staleness) {
      const auto waits = f.pull(0, 3);  // needs step 1
      CHECK(!waits->has_value());
      REQUIRE(f.commit(0, 2, 1, {1}, 1.0f).is_ok());
      CHECK(is_ok(waits));
      CHECK(is_ok(f.pull(0, 4)));
    } else {
      REQUIRE(f.commit(0, 2, 1, {1}, 1.0f).is_ok());
    }
    CHECK(f.row(1) == -3.0f);
  }
}

namespace {

JobSpec resolved(std::optional<std::uint32_t> staleness, std::uint64_t operation, std::vector<Member> members) {
  return {.job_id = 1,
          .name = "job",
          .staleness = staleness,
          .members = std::move(members),
          .first_step = 0,
          .generation = 0,
          .operation = operation};
}

}  // namespace

TEST_CASE("between FREEZE and RESOLVE no new commit is taken, what was taken is answered again") {
  Fixture f(0u, 2);
  REQUIRE(f.commit(0, 1, 0, {1}, 2.0f).is_ok());
  REQUIRE(f.log.prepare(f.make(1, 7, 0, {1}, 4.0f)).is_ok());
  const auto reports = f.log.freeze(1, 5, {});
  REQUIRE(reports.is_ok());
  REQUIRE(reports.value().size() == 2);
  CHECK(reports.value()[0].committed_sequence == 1);
  CHECK(reports.value()[0].committed_step == 0);
  CHECK(reports.value()[1].committed_sequence == 0);
  CHECK(reports.value()[1].committed_step == kNoStep);
  CHECK(reports.value()[1].prepared_sequence == 7);
  CHECK(f.commit(0, 2, 1, {1}, 1.0f).status().code() == Code::kUnavailable);
  CHECK(f.log.commit(f.make(1, 7, 0, {}, 0.0f), true).status().code() == Code::kUnavailable);
  CHECK(f.commit(0, 1, 0, {1}, 2.0f).value().duplicate);
  CHECK(f.log.freeze(1, 4, {}).status().code() == Code::kFailedPrecondition);
  CHECK(f.log.set_job(resolved(0u, 4, {{0, 1, 0}})).code() == Code::kFailedPrecondition);
  CHECK(f.log.freeze(1, 5, {}).is_ok());  // asked again
  REQUIRE(f.log.set_job(resolved(0u, 5, {{0, 1, 0}, {1, 1, 1}})).is_ok());
  CHECK(f.log.freeze(1, 5, {}).status().code() == Code::kFailedPrecondition);
  REQUIRE(f.log.commit(f.make(1, 7, 0, {}, 0.0f), true).is_ok());
  CHECK(f.row(1) == -3.0f);
  CHECK(f.log.set_job(resolved(0u, 6, {{0, 0, 0}})).code() == Code::kFailedPrecondition);  // an epoch goes down
}

TEST_CASE("what a worker that died has in doubt is applied when any shard took it, else forgotten") {
  for (const std::optional<std::uint32_t> staleness : {std::optional(0u), std::optional(2u)}) {
    for (const bool taken_elsewhere : {false, true}) {
      Fixture f(staleness, 2);
      REQUIRE(f.commit(0, 1, 0, {1}, 2.0f).is_ok());
      REQUIRE(f.log.prepare(f.make(1, 1, 0, {1}, 4.0f)).is_ok());
      CHECK(is_ok(f.pull(1, 0)));
      const auto waits = f.pull(1, 5);
      REQUIRE(f.log.freeze(1, 1, {{1, 1}}).is_ok());
      CHECK((*waits)->code() == Code::kFenced);
      CHECK(f.log.commit(f.make(1, 1, 0, {}, 0.0f), true).status().code() == Code::kUnavailable);  // not decided yet
      CHECK(f.log.commit(f.make(1, 2, 1, {}, 0.0f), true).status().code() == Code::kFenced);
      Member gone{.worker_id = 1, .epoch = 1, .rank = 1};
      gone.until_step = taken_elsewhere ? 0 : -1;
      gone.final_sequence = taken_elsewhere ? 1 : 0;
      for (int i = 0; i < 2; ++i) REQUIRE(f.log.set_job(resolved(staleness, 1, {{0, 1, 0}, gone})).is_ok());
      // Staleness 0: N of step 0 is 2 when both count for it, else 1. At k the first was applied before.
      const float expected = staleness == 0u ? (taken_elsewhere ? -3.0f : -2.0f) : (taken_elsewhere ? -3.0f : -1.0f);
      CHECK(f.row(1) == expected);
      CHECK(f.log.stats().kept_bytes == 0);
      const auto repeated = [&f] { return f.log.commit(f.make(1, 1, 0, {}, 0.0f), true); };
      const auto is_answered = [&](Code refusal) {
        return taken_elsewhere ? repeated().is_ok() && repeated().value().duplicate
                               : repeated().status().code() == refusal;
      };
      CHECK(is_answered(Code::kFenced));
      CHECK(is_ok(f.pull(0, 1)));                                           // nobody waits for it
      REQUIRE(f.log.set_job(resolved(staleness, 2, {{0, 1, 0}})).is_ok());  // the worker is forgotten
      CHECK(is_answered(Code::kFenced));
      CHECK(f.commit(0, 1, 0, {1}, 2.0f).value().duplicate);
      REQUIRE(f.log.drop_job(1, 3).is_ok());
      CHECK(is_answered(Code::kFenced));
      CHECK(f.log.commit(f.make(1, 9, 9, {}, 0.0f), true).status().code() == Code::kFenced);
      CHECK(f.row(1) == expected);
      f.log.install({});  // a restore: the rows that it tells of are gone
      CHECK(repeated().status().code() == Code::kFenced);
    }
  }
}

TEST_CASE("who left counts up to its last step, who came from its first one") {
  Fixture f(0u, 2);
  REQUIRE(f.commit(1, 1, 0, {1}, 4.0f).is_ok());  // and leaves in order, ahead of the other
  REQUIRE(f.log.freeze(1, 1, {{1, 1}}).is_ok());
  Member gone{.worker_id = 1, .epoch = 1, .rank = 1, .first_step = 0, .until_step = 0, .final_sequence = 1};
  Member came{.worker_id = 2, .epoch = 1, .rank = 2, .first_step = 2};
  REQUIRE(f.log.set_job(resolved(0u, 1, {{0, 1, 0}, gone, came})).is_ok());
  CHECK(f.row(1) == 0.0f);
  REQUIRE(f.commit(0, 1, 0, {1}, 2.0f).is_ok());
  CHECK(f.row(1) == -3.0f);  // both, N = 2
  REQUIRE(f.commit(0, 2, 1, {1}, 2.0f).is_ok());
  CHECK(f.row(1) == -5.0f);  // alone
  REQUIRE(f.commit(0, 3, 2, {1}, 2.0f).is_ok());
  CHECK(f.row(1) == -5.0f);  // waits for the newcomer
  REQUIRE(f.commit(2, 1, 2, {1}, 6.0f).is_ok());
  CHECK(f.row(1) == -9.0f);

  Fixture k(3u, 2);
  REQUIRE(k.log.set_job(resolved(3u, 1, {{0, 1, 0}, gone, came})).is_ok());
  for (std::uint64_t s = 0; s < 4; ++s) REQUIRE(k.commit(0, s + 1, static_cast<std::int64_t>(s), {9}, 2.0f).is_ok());
  CHECK(k.row(9) == -1.0f - 2.0f - 1.0f - 1.0f);
}

TEST_CASE("the next generation has a clock of its own; epochs that are over stay over") {
  Fixture f(0u, 2);
  REQUIRE(f.commit(0, 1, 0, {1}, 2.0f).is_ok());
  CHECK(is_ok(f.pull(1, 0)));
  const auto waits = f.pull(1, 3);
  JobSpec next = resolved(0u, 3, {{0, 2, 0}});
  next.generation = 1;
  REQUIRE(f.log.set_job(next).is_ok());
  CHECK((*waits)->code() == Code::kFenced);
  CHECK(f.log.stats().kept_bytes == 0);
  CHECK(f.commit(0, 2, 1, {1}, 1.0f, 1).status().code() == Code::kFenced);
  CHECK(f.commit(1, 1, 0, {1}, 1.0f, 1).status().code() == Code::kFenced);
  CHECK(is_ok(f.pull(0, 0, std::chrono::seconds(30), 2)));
  REQUIRE(f.commit(0, 1, 0, {1}, 5.0f, 2).is_ok());
  CHECK(f.row(1) == -5.0f);
  CHECK(f.log.drop_job(1, 2).code() == Code::kFailedPrecondition);
  REQUIRE(f.log.drop_job(1, 4).is_ok());
  CHECK(f.log.set_job(next).code() == Code::kFailedPrecondition);  // late
  next.operation = 5;
  next.members = {{1, 3, 1}};
  REQUIRE(f.log.set_job(next).is_ok());
  CHECK(f.commit(0, 2, 1, {1}, 1.0f, 1).status().code() == Code::kFenced);
}

TEST_CASE("a member that leaves no longer holds the step") {
  Fixture f(0u, 3);
  REQUIRE(f.commit(0, 1, 0, {1}, 2.0f).is_ok());
  REQUIRE(f.commit(1, 1, 0, {1}, 4.0f).is_ok());
  const auto waits = f.pull(0, 1);
  CHECK(!waits->has_value());
  f.set_members(0u, 2);
  CHECK(is_ok(waits));
  CHECK(f.row(1) == -3.0f);  // N is who is live when the step is applied
}

TEST_CASE("a clock starts where its workers start") {
  Fixture f(0u, 2);
  const auto first = f.pull(0, 100);  // resumed at step 100: waits until the other worker is there as well
  CHECK(!first->has_value());
  CHECK(is_ok(f.pull(1, 100)));
  CHECK(is_ok(first));
  REQUIRE(f.commit(0, 1, 100, {1}, 1.0f).is_ok());
  REQUIRE(f.commit(1, 1, 100, {1}, 1.0f).is_ok());
  CHECK(f.row(1) == -1.0f);
  CHECK(is_ok(f.pull(0, 101)));

  // A newcomer holds the steps that are not complete.
  f.set_members(0u, 3);
  REQUIRE(f.commit(0, 2, 101, {1}, 3.0f).is_ok());
  REQUIRE(f.commit(1, 2, 101, {1}, 3.0f).is_ok());
  CHECK(f.row(1) == -1.0f);
  REQUIRE(f.commit(2, 1, 101, {1}, 3.0f).is_ok());
  CHECK(f.row(1) == -4.0f);
}

TEST_CASE("a commit that names its first step before the other pulled does not hold it") {
  Fixture f(0u, 2);
  REQUIRE(f.commit(0, 1, 100, {1}, 2.0f).is_ok());
  CHECK(is_ok(f.pull(1, 100)));
  REQUIRE(f.commit(1, 1, 100, {1}, 2.0f).is_ok());
  CHECK(f.row(1) == -2.0f);
}

TEST_CASE("a pull made ahead within the bound does not name the first step") {
  Fixture f(2u, 2);
  CHECK(is_ok(f.pull(1, 0)));
  CHECK(is_ok(f.pull(0, 2)));  // rows for step 2, before step 0 is committed
  for (std::int64_t step = 0; step < 2; ++step) {
    REQUIRE(f.commit(0, static_cast<std::uint64_t>(step) + 1, step, {1}, 2.0f).is_ok());
  }
  CHECK(f.row(1) == -2.0f);
  const auto waits = f.pull(0, 3);  // needs step 0 of the other
  CHECK(!waits->has_value());
  REQUIRE(f.commit(1, 1, 0, {2}, 2.0f).is_ok());
  CHECK(is_ok(waits));
}

TEST_CASE("a pull made ahead that overtakes the first commit does not begin the clock after it") {
  Fixture f(2u, 2);
  CHECK(is_ok(f.pull(1, 0)));
  REQUIRE(f.log.prepare(f.make(0, 1, 0, {1}, 2.0f)).is_ok());
  const auto waits = f.pull(0, 3);  // its worker is at step 1, whose rows ahead are those of step 3
  CHECK(!waits->has_value());
  REQUIRE(f.log.commit(f.make(0, 1, 0, {1}, 2.0f), true).is_ok());
  CHECK(f.row(1) == -1.0f);
  CHECK(!waits->has_value());
  REQUIRE(f.commit(1, 1, 0, {2}, 2.0f).is_ok());
  CHECK(is_ok(waits));
}

TEST_CASE("a job resumed at a later step may pull ahead at once") {
  Fixture f(2u, 2);
  CHECK(!f.pull(0, 102)->has_value());  // until the other worker is known to be there as well
  CHECK(is_ok(f.pull(1, 102)));
  REQUIRE(f.commit(0, 1, 100, {1}, 2.0f).is_ok());
  REQUIRE(f.commit(1, 1, 100, {1}, 2.0f).is_ok());
  CHECK(f.row(1) == -2.0f);
  CHECK(is_ok(f.pull(1, 103)));
}

TEST_CASE("a step comes once per worker") {
  Fixture f(0u, 2);
  REQUIRE(f.commit(0, 1, 0, {1}, 1.0f).is_ok());
  CHECK(f.commit(0, 2, 0, {1}, 1.0f).status().code() == Code::kFailedPrecondition);
}

TEST_CASE("a parked pull that expires names the workers it waited for") {
  Fixture f(0u, 4);
  for (std::uint32_t w = 0; w < 4; ++w) CHECK(is_ok(f.pull(w, 0)));
  REQUIRE(f.commit(0, 1, 0, {1}, 1.0f).is_ok());
  REQUIRE(f.commit(2, 1, 0, {1}, 1.0f).is_ok());
  const auto waits = f.pull(0, 1, std::chrono::milliseconds(50));
  f.log.expire(Clock::now());
  CHECK(!waits->has_value());
  f.log.expire(Clock::now() + std::chrono::seconds(1));
  REQUIRE(waits->has_value());
  CHECK((*waits)->code() == Code::kDeadlineExceeded);
  CHECK((*waits)->message().find("pull of step 1 waited") == 0);
  CHECK((*waits)->message().find("s for commits of step 0 from worker ids 1, 3") != std::string::npos);

  const auto failed = f.pull(0, 1);
  f.log.fail_parked(Status(Code::kUnavailable, "draining"));
  CHECK((*failed)->code() == Code::kUnavailable);
  CHECK(f.log.stats().pulls_waiting == 0);
}

TEST_CASE("a commit without memory is refused whole and may come again under its sequence") {
  Fixture f(std::nullopt, 1, {}, 64u << 20);
  std::vector<std::uint64_t> many(4'000'000);
  for (std::size_t i = 0; i < many.size(); ++i) many[i] = i;
  const auto refused = f.commit(0, 1, kNoStep, many, 1.0f);
  CHECK(refused.status().code() == Code::kResourceExhausted);
  CHECK(f.store->stats()[0].rows == 0);
  const auto smaller = f.commit(0, 1, kNoStep, {1, 2}, 1.0f);
  REQUIRE(smaller.is_ok());
  CHECK(!smaller.value().duplicate);

  Fixture tight(0u, 2, {.kept_budget_bytes = 100});
  CHECK(tight.log.prepare(tight.make(0, 1, 0, {1, 2, 3, 4, 5, 6, 7, 8}, 1.0f)).code() == Code::kResourceExhausted);
  REQUIRE(tight.commit(0, 1, 0, {1}, 1.0f).is_ok());
  CHECK(tight.commit(1, 1, 0, {1, 2, 3, 4, 5, 6, 7, 8}, 1.0f).status().code() == Code::kResourceExhausted);
  REQUIRE(tight.commit(1, 1, 0, {1}, 1.0f).is_ok());
  CHECK(tight.row(1) == -1.0f);
}

TEST_CASE("job specifications are checked") {
  Fixture f(0u, 1);
  CHECK(f.log.set_job({.job_id = 0, .name = "x", .staleness = 0, .members = {}, .first_step = 0}).code() ==
        Code::kInvalidArgument);
  CHECK(f.log.set_job({.job_id = 2, .name = "x", .staleness = 0, .members = {{1, 1, 0}, {1, 1, 1}}, .first_step = 0})
            .code() == Code::kInvalidArgument);
}

TEST_CASE("threads that commit, repeat and pull at once: every step is applied once") {
  const std::uint64_t seed = std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  constexpr std::uint32_t kWorkers = 3;
  constexpr std::int64_t kSteps = 60;
  Fixture f(0u, kWorkers);
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (std::uint32_t worker = 0; worker < kWorkers; ++worker) {
    threads.emplace_back([&, worker] {
      std::mt19937_64 random(seed + worker);
      for (std::int64_t step = 0; step < kSteps; ++step) {
        std::atomic<int> readable{0};
        f.log.when_readable(1, worker, 1, step, Clock::now() + std::chrono::seconds(60), [&](Status status) {
          readable = status.is_ok() ? 1 : -1;
          readable.notify_one();
        });
        readable.wait(0);
        if (readable != 1) ++failures;
        const auto sequence = static_cast<std::uint64_t>(step) + 1;
        const int tries = 1 + static_cast<int>(random() % 3);
        for (int i = 0; i < tries; ++i) {
          if (!f.commit(worker, sequence, step, {1, 10 + worker}, 3.0f).is_ok()) ++failures;
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(failures == 0);
  CHECK(f.row(1) == -3.0f * kSteps);
  for (std::uint32_t worker = 0; worker < kWorkers; ++worker) CHECK(f.row(10 + worker) == -1.0f * kSteps);
  CHECK(f.log.stats().steps_reduced == kSteps);
}

namespace {

constexpr std::uint64_t kManyKeys = 4096;  // enough for a batch to be applied in parts

std::vector<std::uint64_t> many_keys() {
  std::vector<std::uint64_t> keys(kManyKeys);
  for (std::uint64_t key = 0; key < kManyKeys; ++key) keys[key] = key;
  return keys;
}

// Options of a log whose batches of many keys call `before` first; what it throws, the store throws.
CommitLog::Options with_hook(std::function<void()> before) {
  CommitLog::Options options;
  options.parts = 2;
  options.parallel_for = [before = std::move(before)](std::uint32_t parts,
                                                      const std::function<void(std::uint32_t)>& work) {
    before();
    for (std::uint32_t part = 0; part < parts; ++part) work(part);
  };
  return options;
}

}  // namespace

TEST_CASE("of very many jobs that were dropped the oldest are forgotten") {
  Fixture f(2u, 1);
  constexpr std::uint32_t kJobs = 2'000, kFirst = 10;
  for (std::uint32_t job = kFirst; job < kFirst + kJobs; ++job) {
    JobSpec spec = resolved(2u, 2 * job, {{job, 1, 0}});
    spec.job_id = job;
    REQUIRE(f.log.set_job(spec).is_ok());
    REQUIRE(f.log.drop_job(job, 2 * job + 1).is_ok());
  }
  const auto words_of = [&f](std::uint32_t job) { return f.log.drop_job(job).message(); };
  const auto is_named = [&](std::uint32_t job) { return words_of(job).find("job '") != std::string::npos; };
  CHECK_FALSE(is_named(kFirst));
  CHECK_FALSE(is_named(kFirst + kJobs - 1025));
  CHECK(is_named(kFirst + kJobs - 1024));
  CHECK(is_named(kFirst + kJobs - 1));
}

TEST_CASE("a RESOLVE that is overtaken while it applies what is in doubt lets nothing go") {
  std::promise<void> applying, go_on;
  Fixture f(2u, 2, with_hook([&] {
              applying.set_value();
              go_on.get_future().wait();
            }));
  REQUIRE(f.log.prepare(f.make(1, 1, 0, many_keys(), 4.0f)).is_ok());
  REQUIRE(f.log.freeze(1, 1, {{1, 1}}).is_ok());
  Member gone{.worker_id = 1, .epoch = 1, .rank = 1};
  gone.until_step = 0;
  gone.final_sequence = 1;
  auto first = std::async(std::launch::async, [&] { return f.log.set_job(resolved(2u, 1, {{0, 1, 0}, gone})); });
  applying.get_future().wait();
  REQUIRE(f.log.freeze(1, 2, {}).is_ok());
  go_on.set_value();
  CHECK(first.get().code() == Code::kFailedPrecondition);
  CHECK(f.commit(0, 1, 0, {1}, 1.0f).status().code() == Code::kUnavailable);  // held by the second still
  CHECK(f.log.freeze(1, 1, {}).status().code() == Code::kFailedPrecondition);
  REQUIRE(f.log.set_job(resolved(2u, 2, {{0, 1, 0}, gone})).is_ok());
  CHECK(f.row(1) == -2.0f);  // once
  REQUIRE(f.commit(0, 1, 0, {1}, 1.0f).is_ok());
}

TEST_CASE("a commit that fails before a row changed is refused, and may come again") {
  int throws = 1;
  Fixture f(std::nullopt, 1, with_hook([&] {
              if (throws-- > 0) throw std::bad_alloc();
            }));
  const auto keys = many_keys();
  CHECK(f.commit(0, 1, kNoStep, keys, 1.0f).status().code() == Code::kResourceExhausted);
  CHECK(f.row(7) == 0.0f);
  REQUIRE(f.commit(0, 1, kNoStep, keys, 1.0f).is_ok());
  CHECK(f.row(7) == -1.0f);
  CHECK(f.log.cut({}, Clock::now() + std::chrono::seconds(5), [] { return Status::ok(); }).is_ok());
}

TEST_CASE("a commit that fails after a part of it was applied fails its job, and is never applied again") {
  int calls = 0;
  Fixture f(std::nullopt, 2, with_hook([&] {
              if (++calls == 2) throw std::runtime_error("the disk is gone");
            }));
  const auto keys = many_keys();
  REQUIRE(f.log.prepare(f.make(1, 7, kNoStep, {7}, 1.0f)).is_ok());
  Commit commit = f.make(0, 1, kNoStep, keys, 1.0f);
  commit.blocks.push_back(commit.blocks[0]);
  for (int i = 0; i < 2; ++i) {
    Commit again = f.make(0, 1, kNoStep, keys, 1.0f);
    again.blocks.push_back(again.blocks[0]);
    const Status status = f.log.commit(i == 0 ? std::move(commit) : std::move(again), false).status();
    CHECK(status.code() == Code::kDataLoss);
    CHECK(status.message().find("the disk is gone") != std::string::npos);
  }
  CHECK(f.row(7) == -0.5f);  // the first block, once
  CHECK(f.commit(1, 1, kNoStep, {7}, 1.0f).status().code() == Code::kDataLoss);
  CHECK(f.log.commit(f.make(1, 7, kNoStep, {}, 0.0f), true).status().code() == Code::kDataLoss);
  CHECK(f.log.freeze(1, 1, {}).is_ok());
  CHECK(f.log.cut({}, Clock::now() + std::chrono::seconds(5), [] { return Status::ok(); }).is_ok());
}

TEST_CASE("what was prepared was promised: a failure to apply it fails the job") {
  int throws = 1;
  Fixture f(std::nullopt, 1, with_hook([&] {
              if (throws-- > 0) throw std::bad_alloc();
            }));
  REQUIRE(f.log.prepare(f.make(0, 1, kNoStep, many_keys(), 1.0f)).is_ok());
  CHECK(f.log.commit(f.make(0, 1, kNoStep, {}, 0.0f), true).status().code() == Code::kDataLoss);
  CHECK(f.log.commit(f.make(0, 1, kNoStep, {}, 0.0f), true).status().code() == Code::kDataLoss);
}

TEST_CASE("a write by key that throws holds up nothing") {
  Fixture f(std::nullopt, 1);
  const auto throwing = []() -> Result<std::uint64_t> { throw std::bad_alloc(); };
  CHECK(f.log.write_once({0, 1}, 1, 1, throwing).status().code() == Code::kResourceExhausted);
  CHECK(f.log.write_unnamed(throwing).status().code() == Code::kResourceExhausted);
  CHECK(f.log.cut({}, Clock::now() + std::chrono::seconds(5), [] { return Status::ok(); }).is_ok());
  CHECK(f.log.write_once({0, 1}, 1, 1, [] { return Result<std::uint64_t>(std::uint64_t{3}); }).value().applied_rows ==
        3);
}

TEST_CASE("retired windows are kept for a time, and the oldest go first") {
  RetiredWindows retired;
  const auto now = Clock::now();
  JobWindow window;
  window.begin(5, kNoStep);
  window.finish(5, kNoStep, 42);
  window.abort(6);
  retired.add(1, {0, 1}, window, now);
  CHECK(retired.rows_of(1, {0, 1}, 5, now) == std::optional<std::uint64_t>(42));
  CHECK_FALSE(retired.rows_of(1, {0, 1}, 6, now).has_value());
  CHECK_FALSE(retired.rows_of(1, {0, 2}, 5, now).has_value());
  CHECK_FALSE(retired.rows_of(2, {0, 1}, 5, now).has_value());
  CHECK_FALSE(retired.rows_of(1, {0, 1}, 5, now + RetiredWindows::kKept).has_value());
  for (std::uint32_t worker = 1; worker <= RetiredWindows::kMost; ++worker) retired.add(1, {worker, 1}, window, now);
  CHECK(retired.size() == RetiredWindows::kMost);
  CHECK_FALSE(retired.rows_of(1, {0, 1}, 5, now).has_value());
  CHECK(retired.rows_of(1, {1, 1}, 5, now).has_value());
  retired.forget(1, {1, 1});
  CHECK_FALSE(retired.rows_of(1, {1, 1}, 5, now).has_value());
  retired.add(1, {1, 2}, window, now + 2 * RetiredWindows::kKept);
  CHECK(retired.size() == 1);
}

TEST_CASE("what a dead worker took along is counted once, however often the shard is told of it") {
  Fixture f(std::nullopt, 2);
  WindowImage window;
  window.committed_sequence = 10;
  window.committed_step = window.done_step = 9;
  f.log.install({{.job_id = 1, .generation = 7, .completed = -1, .lossy = true, .workers = {{1, 1, window}}}});
  JobSpec spec = resolved(std::nullopt, 1, {{0, 1, 0}, {1, 1, 1}});
  spec.generation = 7;
  REQUIRE(f.log.set_job(spec).is_ok());
  REQUIRE(f.log.prepare(f.make(1, 110, 109, {1}, 4.0f)).is_ok());
  Member gone{.worker_id = 1, .epoch = 1, .rank = 1};
  gone.until_step = 109;
  gone.final_sequence = 110;
  for (std::uint64_t operation = 2; operation < 12; ++operation) {
    spec.members = {{0, 1, 0}, gone};
    spec.operation = operation;
    REQUIRE(f.log.freeze(1, operation, {{1, 1}}).is_ok());
    REQUIRE(f.log.set_job(spec).is_ok());
    CHECK(f.log.stats().commits_lost == 99);  // 11 to 109: the last one is applied
  }
  CHECK(f.log.lost() == std::vector<LostRange>{{1, 1, 1, false, 11, 109}});
  CHECK(f.row(1) == -2.0f);  // once, of two workers
}

TEST_CASE("ranges of lost commits are merged, and each counts once") {
  LostCommits lost;
  CHECK(lost.add({1, 2, 3, false, 10, 19}) == 10);
  CHECK(lost.add({1, 2, 3, false, 15, 24}) == 5);
  CHECK(lost.add({1, 2, 3, true, 10, 19}) == 10);   // steps are not sequences
  CHECK(lost.add({1, 2, 4, false, 10, 19}) == 10);  // nor are epochs one
  CHECK(lost.add({1, 2, 3, false, 30, 39}) == 10);
  CHECK(lost.add({1, 2, 3, false, 25, 29}) == 5);
  CHECK(lost.add({1, 2, 3, false, 0, 100}) == 71);
  CHECK(lost.add({1, 2, 3, false, 40, 39}) == 0);
  CHECK(lost.count() == 121);
  CHECK(lost.ranges() ==
        std::vector<LostRange>{{1, 2, 3, false, 0, 100}, {1, 2, 3, true, 10, 19}, {1, 2, 4, false, 10, 19}});
  std::mt19937_64 random(11);
  std::set<std::uint64_t> expected;
  LostCommits merged;
  for (int i = 0; i < 2000; ++i) {
    const std::uint64_t first = random() % 3000;
    const std::uint64_t last = first + random() % 7;
    for (std::uint64_t at = first; at <= last; ++at) expected.insert(at);
    merged.add({1, 1, 1, false, first, last});
    REQUIRE(merged.count() == expected.size());
  }
}

TEST_CASE("counts of writes end with their tables, and no later number is one of before") {
  WriteCounts counts;
  const WriteCounts::Writer writer{1, 2, 1};
  std::set<std::uint64_t> seen;
  for (std::uint32_t table = 2; table <= 20'000; ++table) {
    const auto exists = [table](std::uint32_t id) { return id == 1 || id + 10 > table; };
    counts.add(table, nullptr, exists);
    const std::vector<std::uint32_t> asked = {table, 1};
    CHECK(seen.insert(counts.by_others(asked, &writer)).second);
    CHECK(counts.tables() <= 1024);
    counts.add(1, nullptr, exists);
  }
  const std::vector<std::uint32_t> first = {1};
  const std::uint64_t before = counts.by_others(first, &writer);
  counts.add(1, &writer, [](std::uint32_t) { return true; });
  CHECK(counts.by_others(first, &writer) == before);
}
