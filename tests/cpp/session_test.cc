// The session's native half over stores of this process: the step cache, sums, commits and the merged pull.
#include "session/session.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <thread>

#include "session/planned_ids.h"
#include "session/table_access.h"
#include "session_fixture.h"

using namespace sparserow;

TEST_CASE("repeated keys are pulled once, summed, and committed to both shards") {
  Fixture f;
  const auto binding = f.binding();
  const std::vector<std::int64_t> first{1, 2, 1, 50}, second{2, 60, 1};
  REQUIRE(binding->lookup(ref(first), true).is_ok());
  const Lookup kept = binding->lookup(ref(second), true).value();
  CHECK(f.session->stats().rows_pulled == 4);
  stage_ones(*binding, first);
  stage_ones(*binding, second);
  CHECK(f.session->seal(1.0f).value().rows == 4);
  REQUIRE(f.session->prepare().is_ok());
  REQUIRE(f.session->commit_prepared().is_ok());
  CHECK(f.session->step() == 1);
  CHECK(first_weight(*binding, 1) == 1.0f - 0.5f * 3);
  CHECK(first_weight(*binding, 2) == 1.0f - 0.5f * 2);
  CHECK(first_weight(*binding, 60) == 0.5f);
  CHECK(kept.row(0)[0] == 1.0f);  // what a graph still holds does not change under it
}

TEST_CASE("a failed pull leaves the step as it was") {
  Fixture f;
  const auto binding = f.binding();
  const std::vector<std::int64_t> known{1, 2}, fresh{2, 3};
  REQUIRE(binding->lookup(ref(known), true).is_ok());
  f.shards->pull_refusal = Code::kUnavailable;
  CHECK(binding->lookup(ref(fresh), true).status().code() == Code::kUnavailable);
  CHECK(binding->lookup(ref(known), true).is_ok());  // known rows need no pull
  CHECK(binding->stage(ref(fresh)).status().code() == Code::kFailedPrecondition);
  f.shards->pull_refusal = Code::kOk;
  CHECK(binding->lookup(ref(fresh), true).is_ok());
  stage_ones(*binding, fresh);
  CHECK(f.session->seal(1.0f).value().rows == 2);
}

TEST_CASE("a refused prepare is aborted and the step can be taken again") {
  Fixture f;
  const auto binding = f.binding();
  const std::vector<std::int64_t> ids{1, 60};
  f.shards->prepare_refusal = Code::kResourceExhausted;
  REQUIRE(binding->lookup(ref(ids), true).is_ok());
  stage_ones(*binding, ids);
  REQUIRE(f.session->seal(1.0f).is_ok());
  CHECK(binding->lookup(ref(ids), true).status().code() == Code::kFailedPrecondition);
  CHECK(f.session->prepare().code() == Code::kResourceExhausted);
  CHECK(f.session->abort().is_ok());
  CHECK(f.shards->aborts == 1);
  CHECK(f.session->step() == 0);
  CHECK(first_weight(*binding, 1) == 1.0f);
  f.shards->prepare_refusal = Code::kOk;
  REQUIRE(binding->lookup(ref(ids), true).is_ok());
  stage_ones(*binding, ids, 2.0f);
  REQUIRE(f.session->seal(0.5f).is_ok());
  REQUIRE(f.session->prepare().is_ok());
  REQUIRE(f.session->commit_prepared().is_ok());
  CHECK(first_weight(*binding, 1) == 0.5f);
}

TEST_CASE("a commit that fails after it was prepared closes the session") {
  Fixture f;
  REQUIRE(f.session->seal(1.0f).is_ok());
  REQUIRE(f.session->prepare().is_ok());
  f.shards->commit_refusal = Code::kDeadlineExceeded;
  CHECK(f.session->commit_prepared().code() == Code::kDeadlineExceeded);
  CHECK(f.session->seal(1.0f).status().code() == Code::kFailedPrecondition);
  const std::vector<std::int64_t> ids{1};
  CHECK(f.binding()->lookup(ref(ids), true).status().message().find("outcome") != std::string::npos);
}

TEST_CASE("rows that are not finite are counted and named") {
  Fixture f;
  const auto binding = f.binding();
  const std::vector<std::int64_t> ids{7, 8};
  REQUIRE(binding->lookup(ref(ids), true).is_ok());
  stage_ones(*binding, {7});
  stage_ones(*binding, {8}, std::numeric_limits<float>::infinity());
  const SealReport report = f.session->seal(1.0f).value();
  CHECK(report.nonfinite_rows == 1);
  CHECK(report.nonfinite_table == "test/t");
  CHECK(report.nonfinite_key == 8);
}

TEST_CASE("a sum of finite gradients that is not finite is found, whichever way it became so") {
  const float largest = std::numeric_limits<float>::max();
  for (const bool by_scale : {false, true}) {
    Fixture f;
    const auto binding = f.binding();
    const std::vector<std::int64_t> ids{7, 8};
    REQUIRE(binding->lookup(ref(ids), true).is_ok());
    stage_ones(*binding, {7});
    stage_ones(*binding, {8}, largest);
    if (!by_scale) stage_ones(*binding, {8}, largest);
    const SealReport report = f.session->seal(by_scale ? 2.0f : 1.0f).value();
    CHECK(report.nonfinite_rows == 1);
    CHECK(report.nonfinite_key == 8);
  }
}

TEST_CASE("rows that are too long are shortened, after the scale and however large") {
  Fixture f;
  const auto binding = f.binding();
  const std::vector<std::int64_t> ids{7, 8, 9};
  REQUIRE(binding->lookup(ref(ids), true).is_ok());
  stage_ones(*binding, {7}, 3.0f);
  stage_ones(*binding, {8}, 0.1f);
  stage_ones(*binding, {9}, 1e30f);
  const SealReport report = f.session->seal(0.5f, 1.0f).value();
  CHECK(report.nonfinite_rows == 0);
  REQUIRE(f.session->commit().is_ok());
  CHECK(f.session->stats().clipped_rows == 2);
  const float clipped = 1.0f / std::sqrt(static_cast<float>(kDim));
  CHECK(first_weight(*binding, 7) == doctest::Approx(1.0f - 0.5f * clipped));
  CHECK(first_weight(*binding, 8) == doctest::Approx(1.0f - 0.5f * 0.05f));
  CHECK(first_weight(*binding, 9) == doctest::Approx(1.0f - 0.5f * clipped));
}

TEST_CASE("another thread may evaluate while a step ends, and none may train") {
  Fixture f;
  const auto binding = f.binding();
  const std::vector<std::int64_t> ids{1, 60}, others{2, 50};
  REQUIRE(binding->lookup(ref(ids), true).is_ok());
  stage_ones(*binding, ids);
  REQUIRE(f.session->seal(1.0f).is_ok());
  const AheadLookup lookups[]{{"test/t", ref(others)}};
  std::thread evaluates([&] {
    CHECK(f.session->pull_ahead(lookups, false).is_ok());
    CHECK(binding->lookup(ref(others), false).value().row(0)[0] == 1.0f);
  });
  evaluates.join();
  const Status refused = f.session->pull_ahead(lookups, true);
  CHECK(refused.code() == Code::kFailedPrecondition);
  CHECK(refused.message() == "session: a forward that trains is not allowed in this phase of the step");
  REQUIRE(f.session->prepare().is_ok());
  REQUIRE(f.session->commit_prepared().is_ok());
}

TEST_CASE("names are unique while they are bound") {
  Fixture f;
  CHECK(f.session->bind({"test/t", 1, 1, kDim, 0, 0.1f}).code() == Code::kFailedPrecondition);
  const auto binding = f.binding();
  f.session->close();
  CHECK(find_binding("test/t").status().code() == Code::kFailedPrecondition);
  const std::vector<std::int64_t> ids{1};
  CHECK(binding->lookup(ref(ids), true).status().code() == Code::kFailedPrecondition);
}

TEST_CASE("planned ids serve a batch with one pull") {
  Fixture f;
  std::vector<std::int64_t> batch{1, 2, 3, 4, 5, 6};  // (3, 2)
  const std::vector<std::int64_t> sizes{3, 2}, strides{2, 1}, column_size{3}, column_stride{2};
  const std::vector<std::int64_t> column{2, 4, 6};
  const auto trace = f.session->state().start_trace();
  REQUIRE(f.binding()->lookup({column, {batch.data() + 1, column_size, column_stride, 8}}, true).is_ok());
  REQUIRE(trace->lookups().size() == 1);
  CHECK(trace->lookups()[0].data == batch.data() + 1);
  CHECK(trace->lookups()[0].sizes == column_size);
  CHECK(trace->lookups()[0].strides == column_stride);
  const BatchTensor root{batch.data(), {batch.data(), sizes, strides, 8}};
  const PlannedIds plan{{{"test/t", 0, IdPart::Kind::kSelect, 1, 1, 0}}};
  REQUIRE(f.session->abort().is_ok());
  const int before = f.shards->pulls;
  REQUIRE(pull_merged(*f.session, plan, {&root, 1}, true).is_ok());
  REQUIRE(f.binding()->lookup({column, {batch.data() + 1, column_size, column_stride, 8}}, true).is_ok());
  CHECK(f.shards->pulls == before + 1);
  const std::vector<std::int64_t> flat{6};
  const BatchTensor smaller{batch.data(), {batch.data(), flat, {strides.data() + 1, 1}, 8}};
  CHECK(pull_merged(*f.session, plan, {&smaller, 1}, true).is_ok());  // does not fit: left out
  batch[1] = -5;
  CHECK(pull_merged(*f.session, plan, {&root, 1}, true).is_ok());  // not an id: left to the op
}

TEST_CASE("lookups and staging from several threads") {
  Fixture f;
  const auto binding = f.binding();
  std::vector<std::thread> threads;
  for (std::int64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&binding, t] {
      for (std::int64_t i = 0; i < 20; ++i) {
        const std::vector<std::int64_t> ids{t * 20 + i, 99};
        CHECK(binding->lookup(ref(ids), true).is_ok());
        stage_ones(*binding, ids);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(f.session->seal(1.0f).value().rows == 81);
  REQUIRE(f.session->prepare().is_ok());
  REQUIRE(f.session->commit_prepared().is_ok());
  CHECK(first_weight(*binding, 99) == 1.0f - 0.5f * 80);
}

namespace {

float weight_by_key(TableAccess& rows, std::uint64_t key) {
  float values[kDim];
  REQUIRE(rows.pull(std::span(&key, 1), values).is_ok());
  for (const float value : values) CHECK(value == values[0]);
  return values[0];
}

// One push of 1 at rate 1 to each key.
PushOutcome push_ones(TableAccess& rows, const std::vector<std::uint64_t>& keys) {
  const std::vector<float> grads(keys.size() * kDim, 1.0f);
  return rows.push(keys, grads.data(), 1.0f);
}

}  // namespace

TEST_CASE("pushes by key of several threads are each applied once") {
  for (const std::size_t shards : {std::size_t{1}, std::size_t{2}}) {
    Fixture f;
    if (shards == 1) f.session = Session::create(LocalShards::create({f.stores[0]}).value(), {}).value();
    constexpr int kThreads = 8, kPushes = 300;
    const std::vector<std::uint64_t> keys{3, 700, 90'000, 12'345'678};  // of both stores
    std::vector<std::thread> threads;
    std::atomic<int> failures{0};
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&] {
        TableAccess rows(f.session, {id_of_name("test/t"), 1, kDim});
        for (int i = 0; i < kPushes; ++i) failures += push_ones(rows, keys).status.is_ok() ? 0 : 1;
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(failures == 0);
    TableAccess rows(f.session, {id_of_name("test/t"), 1, kDim});
    for (const std::uint64_t key : keys) CHECK(weight_by_key(rows, key) == 1.0f - kThreads * kPushes);
  }
}

TEST_CASE("steps beside threads that assign and push by key keep their numbers") {
  Fixture f;
  const auto binding = f.binding();
  std::atomic<bool> is_over{false};
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      TableAccess rows(f.session, {id_of_name("test/t"), 1, kDim});
      const std::vector<std::uint64_t> keys{80 + t};
      const std::vector<float> values(kDim, 5.0f);
      while (!is_over) {
        if (!rows.assign(keys, values.data()).is_ok()) ++failures;
        if (t == 0 && !push_ones(rows, keys).status.is_ok()) ++failures;
      }
    });
  }
  const std::vector<std::int64_t> ids{1, 2, 50, 60};
  for (int step = 0; step < 200; ++step) {
    REQUIRE(binding->lookup(ref(ids), true).is_ok());
    stage_ones(*binding, ids);
    REQUIRE(f.session->seal(1.0f).is_ok());
    REQUIRE(f.session->prepare().is_ok());
    REQUIRE(f.session->commit_prepared().is_ok());
  }
  is_over = true;
  for (std::thread& thread : threads) thread.join();
  CHECK(failures == 0);
  for (const std::int64_t id : ids) CHECK(first_weight(*binding, id) == 1.0f - 0.5f * 200);
}

TEST_CASE("a push waits for the step of another thread, and is refused in the thread that ends the step") {
  Fixture f;
  TableAccess rows(f.session, {id_of_name("test/t"), 1, kDim});
  REQUIRE(f.session->seal(1.0f).is_ok());
  REQUIRE(f.session->prepare().is_ok());
  const PushOutcome refused = push_ones(rows, {7});
  CHECK(refused.status.code() == Code::kFailedPrecondition);
  CHECK_FALSE(refused.may_be_applied);
  std::atomic<bool> is_done{false};
  std::thread pusher([&] {
    CHECK(push_ones(rows, {7}).status.is_ok());
    is_done = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK_FALSE(is_done);
  REQUIRE(f.session->commit_prepared().is_ok());
  pusher.join();
  CHECK(weight_by_key(rows, 7) == 0.0f);
}

TEST_CASE("writes by key run at most so far ahead of a step that a shard still knows its number") {
  Fixture f;
  SessionOptions options;
  options.deadline = std::chrono::milliseconds(200);
  f.session = Session::create(f.shards, options).value();
  TableAccess rows(f.session, {id_of_name("test/t"), 1, kDim});
  REQUIRE(f.session->seal(1.0f).is_ok());
  REQUIRE(f.session->prepare().is_ok());
  const std::vector<std::uint64_t> keys{7};
  const std::vector<float> fives(kDim, 5.0f);
  std::uint64_t taken = 0;
  while (taken < 2 * SequenceNumbers::kMostAhead && rows.assign(keys, fives.data()).is_ok()) ++taken;
  CHECK(taken == SequenceNumbers::kMostAhead - 1);
  CHECK(rows.erase(keys).status().code() == Code::kDeadlineExceeded);
  REQUIRE(f.session->commit_prepared().is_ok());
  CHECK(rows.assign(keys, fives.data()).is_ok());
}

TEST_CASE("a push whose turn does not come by its deadline leaves no trace") {
  Fixture f;
  SessionOptions options;
  options.deadline = std::chrono::milliseconds(50);
  f.session = Session::create(f.shards, options).value();
  TableAccess rows(f.session, {id_of_name("test/t"), 1, kDim});
  REQUIRE(f.session->seal(1.0f).is_ok());
  REQUIRE(f.session->prepare().is_ok());
  PushOutcome late;
  std::thread([&] { late = push_ones(rows, {7}); }).join();
  CHECK(late.status.code() == Code::kDeadlineExceeded);
  CHECK_FALSE(late.may_be_applied);
  REQUIRE(f.session->commit_prepared().is_ok());
  REQUIRE(push_ones(rows, {7}).status.is_ok());
  CHECK(weight_by_key(rows, 7) == 0.0f);
}

TEST_CASE("a push by key whose COMMIT is in doubt ends before the next write leaves") {
  for (const auto& [is_taken, code] : {std::pair(false, Code::kDeadlineExceeded), std::pair(true, Code::kUnavailable),
                                       std::pair(true, Code::kDataLoss), std::pair(false, Code::kStaleRoute)}) {
    Fixture f;
    TableAccess rows(f.session, {id_of_name("test/t"), 1, kDim});
    f.shards->commit_refusal = code;
    f.shards->loses_commit_reply = is_taken;
    const PushOutcome in_doubt = push_ones(rows, {7});
    CHECK(in_doubt.status.code() == code);
    CHECK(in_doubt.may_be_applied);
    const PushOutcome next = push_ones(rows, {7});
    CHECK(next.status.code() == code);
    CHECK(next.status.message().find("in doubt still") != std::string::npos);
    CHECK_FALSE(next.may_be_applied);
    const std::vector<float> nines(kDim, 9.0f);
    const std::vector<std::uint64_t> keys{7};
    CHECK(rows.assign(keys, nines.data()).code() == code);
    REQUIRE(f.session->seal(1.0f).is_ok());
    CHECK(f.session->prepare().code() == code);
    CHECK(f.session->abort().is_ok());
    CHECK(weight_by_key(rows, 7) == (is_taken ? 0.0f : 1.0f));

    f.shards->commit_refusal = Code::kOk;
    f.shards->loses_commit_reply = false;
    REQUIRE(push_ones(rows, {7}).status.is_ok());
    CHECK(weight_by_key(rows, 7) == -1.0f);  // both pushes, once each
  }
}

TEST_CASE("a push whose PREPARE is refused is known not to be applied") {
  Fixture f;
  TableAccess rows(f.session, {id_of_name("test/t"), 1, kDim});
  f.shards->prepare_refusal = Code::kFenced;
  const PushOutcome refused = push_ones(rows, {7});
  CHECK(refused.status.code() == Code::kFenced);
  CHECK_FALSE(refused.may_be_applied);
}
