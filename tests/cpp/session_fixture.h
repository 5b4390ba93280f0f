// A session over two stores of this process that can be told to refuse.
#pragma once

#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <vector>

#include "session/session.h"
#include "shards/local_shards.h"

namespace sparserow {

inline constexpr std::uint32_t kDim = 3;

// Shards over two stores that can be told to refuse.
class Refusing final : public Shards {
 public:
  explicit Refusing(std::shared_ptr<Shards> inner) : inner_(std::move(inner)) {}
  Code pull_refusal = Code::kOk;
  Code prepare_refusal = Code::kOk;
  Code commit_refusal = Code::kOk;
  bool loses_commit_reply = false;  // it refuses after the commit was taken
  std::atomic<int> pulls{0};
  int aborts = 0;

  std::uint32_t shard_count() const noexcept override { return inner_->shard_count(); }
  std::span<const std::uint16_t> slot_owner() const noexcept override { return inner_->slot_owner(); }
  Status pull(std::span<const TablePull> tables, const CallOptions& options) override {
    ++pulls;
    return pull_refusal == Code::kOk ? inner_->pull(tables, options) : Status(pull_refusal, "refused");
  }
  Status prepare(std::span<const TablePush> tables, const CommitOptions& options) override {
    return prepare_refusal == Code::kOk ? inner_->prepare(tables, options) : Status(prepare_refusal, "refused");
  }
  Status commit_prepared(const CommitOptions& options) override {
    if (loses_commit_reply) static_cast<void>(inner_->commit_prepared(options));
    return commit_refusal == Code::kOk ? inner_->commit_prepared(options) : Status(commit_refusal, "refused");
  }
  Status abort(const CommitOptions& options) override {
    ++aborts;
    return inner_->abort(options);
  }
  Status commit(std::span<const TablePush> tables, const CommitOptions& options) override {
    return inner_->commit(tables, options);
  }
  Status assign(std::span<const TablePush> tables, const CallOptions& options) override {
    return inner_->assign(tables, options);
  }
  Result<std::uint64_t> erase(std::uint32_t table_id, std::span<const std::uint64_t> keys,
                              std::span<const std::uint32_t> shard_begin, const CallOptions& options) override {
    return inner_->erase(table_id, keys, shard_begin, options);
  }
  Result<ScanPage> scan(std::uint32_t shard, std::uint32_t table_id, std::uint64_t cursor, std::uint32_t max_rows,
                        bool with_state, const CallOptions& options) override {
    return inner_->scan(shard, table_id, cursor, max_rows, with_state, options);
  }

 private:
  std::shared_ptr<Shards> inner_;
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
    shards = std::make_shared<Refusing>(LocalShards::create({stores[0], stores[1]}).value());
    session = Session::create(shards, {}).value();
    REQUIRE(session->bind({"test/t", schema.id, 1, kDim, 100, 0.5f}).is_ok());
  }

  std::shared_ptr<Binding> binding() const { return find_binding("test/t").value(); }
};

inline IdsRef ref(const std::vector<std::int64_t>& ids) { return {ids, {ids.data(), {}, {}, 8}}; }

inline void stage_ones(Binding& binding, const std::vector<std::int64_t>& ids, float value = 1.0f) {
  auto sums = binding.stage(ref(ids));
  REQUIRE(sums.is_ok());
  const std::vector<float> grad(kDim, value);
  for (std::size_t i = 0; i < ids.size(); ++i) sums.value().add(sums.value().lookup().indexes()[i], grad.data(), 1.0f);
}

inline float first_weight(Binding& binding, std::int64_t id) {
  const std::vector<std::int64_t> ids{id};
  return binding.lookup(ref(ids), /*train=*/false).value().row(0)[0];
}

}  // namespace sparserow
