// The session's native half over stores of this process: the step cache, sums, commits and the merged pull.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "session/session.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <thread>

#include "rpc/local_shards.h"
#include "session/merge.h"

using namespace sparserow;

namespace {

constexpr std::uint32_t kDim = 3;

// Shards over two stores that can be told to refuse.
class Refusing final : public rpc::Shards {
 public:
  explicit Refusing(std::shared_ptr<rpc::Shards> inner) : inner_(std::move(inner)) {}
  Code pull_refusal = Code::kOk;
  Code prepare_refusal = Code::kOk;
  Code commit_refusal = Code::kOk;
  int pulls = 0;
  int aborts = 0;

  std::uint32_t shard_count() const noexcept override { return inner_->shard_count(); }
  std::span<const std::uint16_t> slot_owner() const noexcept override { return inner_->slot_owner(); }
  Status pull(std::span<const rpc::TablePull> tables, const rpc::CallOptions& options) override {
    ++pulls;
    return pull_refusal == Code::kOk ? inner_->pull(tables, options) : Status(pull_refusal, "refused");
  }
  Status prepare(std::span<const rpc::TablePush> tables, const rpc::CommitOptions& options) override {
    return prepare_refusal == Code::kOk ? inner_->prepare(tables, options) : Status(prepare_refusal, "refused");
  }
  Status commit_prepared(const rpc::CommitOptions& options) override {
    return commit_refusal == Code::kOk ? inner_->commit_prepared(options) : Status(commit_refusal, "refused");
  }
  Status abort(const rpc::CommitOptions& options) override {
    ++aborts;
    return inner_->abort(options);
  }
  Status commit(std::span<const rpc::TablePush> tables, const rpc::CommitOptions& options) override {
    return inner_->commit(tables, options);
  }
  Status assign(std::span<const rpc::TablePush> tables, const rpc::CallOptions& options) override {
    return inner_->assign(tables, options);
  }
  Result<std::uint64_t> erase(std::uint32_t table_id, std::span<const std::uint64_t> keys,
                              std::span<const std::uint32_t> shard_begin, const rpc::CallOptions& options) override {
    return inner_->erase(table_id, keys, shard_begin, options);
  }
  Result<ScanPage> scan(std::uint32_t shard, std::uint32_t table_id, std::uint64_t cursor, std::uint32_t max_rows,
                        bool with_state, const rpc::CallOptions& options) override {
    return inner_->scan(shard, table_id, cursor, max_rows, with_state, options);
  }

 private:
  std::shared_ptr<rpc::Shards> inner_;
};

struct Fixture {
  std::shared_ptr<Store> stores[2];
  std::shared_ptr<Refusing> shards;
  std::shared_ptr<Session> session;

  Fixture() {
    TableSchema schema;
    schema.id = id_of_name("test/t");
    schema.name = "test/t";
    schema.dim = kDim;
    schema.init = {InitKind::kConstant, 1.0f, 0.0f};
    for (auto& store : stores) {
      store = std::move(Store::create({})).value();
      REQUIRE(store->create_table(schema).is_ok());
    }
    shards = std::make_shared<Refusing>(rpc::LocalShards::create({stores[0], stores[1]}).value());
    session = Session::create(shards, {}).value();
    REQUIRE(session->bind({"test/t", schema.id, 1, kDim, 100, 0.5f}).is_ok());
  }

  std::shared_ptr<Binding> binding() const { return find_binding("test/t").value(); }
};

IdsRef ref(const std::vector<std::int64_t>& ids) { return {ids, {ids.data(), {}, {}, 8}}; }

void stage_ones(Binding& binding, const std::vector<std::int64_t>& ids, float value = 1.0f) {
  auto sums = binding.stage(ref(ids));
  REQUIRE(sums.is_ok());
  const std::vector<float> grad(kDim, value);
  for (std::size_t i = 0; i < ids.size(); ++i) sums.value().add(sums.value().lookup().indexes()[i], grad.data(), 1.0f);
}

float first_weight(Binding& binding, std::int64_t id) {
  const std::vector<std::int64_t> ids{id};
  return binding.lookup(ref(ids), /*train=*/false).value().row(0)[0];
}

}  // namespace

TEST_CASE("repeated keys are pulled once, summed, and committed to both shards") {
  Fixture f;
  const auto binding = f.binding();
  const std::vector<std::int64_t> first{1, 2, 1, 50}, second{2, 60, 1};
  REQUIRE(binding->lookup(ref(first), true).is_ok());
  const Lookup held = binding->lookup(ref(second), true).value();
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
  CHECK(held.row(0)[0] == 1.0f);  // what a graph still holds does not change under it
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

TEST_CASE("names are unique while they are bound") {
  Fixture f;
  CHECK(f.session->bind({"test/t", 1, 1, kDim, 0, 0.1f}).code() == Code::kFailedPrecondition);
  const auto binding = f.binding();
  f.session->close();
  CHECK(find_binding("test/t").status().code() == Code::kFailedPrecondition);
  const std::vector<std::int64_t> ids{1};
  CHECK(binding->lookup(ref(ids), true).status().code() == Code::kFailedPrecondition);
}

TEST_CASE("a plan is learnt from views of the batch and serves the next batch with one pull") {
  Fixture f;
  std::vector<std::int64_t> batch{1, 2, 3, 4, 5, 6};  // (3, 2)
  const std::vector<std::int64_t> sizes{3, 2}, strides{2, 1}, column_size{3}, column_stride{2};
  const std::vector<std::int64_t> column{2, 4, 6};
  f.session->state().start_trace();
  REQUIRE(f.binding()->lookup({column, {batch.data() + 1, column_size, column_stride, 8}}, true).is_ok());
  const BatchTensor root{batch.data(), {batch.data(), sizes, strides, 8}};
  const MergePlan plan = learn_merge(f.session->state().stop_trace(), {&root, 1});
  REQUIRE(plan.entries.size() == 1);
  CHECK(plan.entries[0].kind == MergeEntry::Kind::kSelect);
  CHECK(plan.entries[0].dim == 1);
  CHECK(plan.entries[0].start == 1);
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
