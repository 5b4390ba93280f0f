// What the data-plane tests share: tables, a served store, clients, and keys grouped by shard.
#pragma once

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "commit/commit.h"
#include "rpc/client/client.h"
#include "rpc/server/server.h"
#include "store/store.h"
#include "util/hash.h"
#include "util/partition.h"

namespace sparserow::testing {

inline constexpr std::uint32_t kSlots = 1024;

// Rows begin at `initial`; SGD, so that a row after a push of g at lr is row - lr * g.
inline TableSchema sgd_table(const std::string& name, std::uint32_t dim, float initial = 1.0f) {
  TableSchema schema;
  schema.name = name;
  schema.id = id_of_name(name);
  schema.dim = dim;
  schema.init = {InitKind::kConstant, initial, 0.0f};
  schema.optimizer.kind = OptimizerKind::kSgd;
  return schema;
}

template <class T>
T take(Result<T> result) {
  if (!result.is_ok()) throw std::runtime_error(result.status().message());
  return std::move(result).value();
}

inline std::shared_ptr<Store> make_store(std::uint64_t budget = 0) {
  return std::shared_ptr<Store>(
      take(Store::create({.memory_budget_bytes = budget, .slot_count = kSlots, .lineage = 1})));
}

inline std::vector<std::uint16_t> round_robin(std::uint32_t shards) {
  std::vector<std::uint16_t> owner(kSlots);
  for (std::uint32_t slot = 0; slot < kSlots; ++slot) owner[slot] = static_cast<std::uint16_t>(slot % shards);
  return owner;
}

// A commit of job 1 that owns its arrays; every element of its gradients is `gradient`.
inline Commit make_commit(const TableSchema& table, std::uint32_t worker, std::uint64_t sequence, std::int64_t step,
                          std::vector<std::uint64_t> keys, float gradient, std::uint32_t epoch = 1) {
  struct Owned {
    std::vector<std::uint64_t> keys;
    std::vector<float> grads;
  };
  auto owned = std::make_shared<Owned>(Owned{std::move(keys), {}});
  owned->grads.assign(owned->keys.size() * table.dim, gradient);
  Commit commit{.job_id = 1,
                .worker_id = worker,
                .worker_epoch = epoch,
                .sequence = sequence,
                .step = step,
                .blocks = {},
                .owner = owned};
  commit.blocks.push_back(
      {.table_id = table.id, .dim = table.dim, .lr = 1.0f, .keys = owned->keys, .grads = owned->grads.data()});
  return commit;
}

// Whether shards listen at local sockets too and all rows that can lie in shared memory do: how CTest runs some files a
// second time (cpp_ext/CMakeLists.txt).
inline bool is_by_lane() { return std::getenv("SPARSEROW_TEST_BY_LANE") != nullptr; }

// Shards in this process, each with a store of its own, one job (id 1) with workers 0..workers-1 of epoch 1.
struct Cluster {
  std::vector<std::shared_ptr<Store>> stores;
  std::vector<std::unique_ptr<rpc::Server>> servers;
  std::vector<std::uint16_t> slot_owner;
  std::uint64_t cluster_id = 77;

  explicit Cluster(std::uint32_t shards, std::vector<TableSchema> tables, rpc::ServerOptions options = {})
      : slot_owner(round_robin(shards)) {
    options.cluster_id = cluster_id;
    options.is_local |= is_by_lane();
    for (std::uint32_t shard = 0; shard < shards; ++shard) {
      stores.push_back(make_store());
      for (const TableSchema& table : tables) {
        if (!stores.back()->create_table(table).is_ok()) throw std::runtime_error("create_table");
      }
      options.shard_index = static_cast<std::uint16_t>(shard);
      servers.push_back(take(rpc::Server::start(options, stores.back())));
      if (!servers.back()->set_route(1, slot_owner).is_ok()) throw std::runtime_error("set_route");
    }
    set_job(0u, 1);
  }

  void set_job(std::optional<std::uint32_t> staleness, std::uint32_t workers, std::uint32_t epoch = 1) {
    JobSpec spec{.job_id = 1, .name = "job", .staleness = staleness, .members = {}, .first_step = 0};
    for (std::uint32_t worker = 0; worker < workers; ++worker) spec.members.push_back({worker, epoch, worker});
    for (auto& server : servers) {
      if (const Status status = server->set_job(spec); !status.is_ok()) throw std::runtime_error(status.message());
    }
  }

  [[nodiscard]] rpc::ClientOptions client_options(std::uint32_t worker = 0) const {
    rpc::ClientOptions options;
    for (const auto& server : servers) options.shards.push_back({"127.0.0.1", server->port()});
    options.slot_owner = slot_owner;
    options.route_epoch = 1;
    options.cluster_id = cluster_id;
    options.job_id = 1;
    options.worker_id = worker;
    options.worker_epoch = 1;
    if (is_by_lane()) options.least_in_lane = 1;
    return options;
  }
};

// Unique keys of one table in the order that a request wants them.
struct Grouped {
  Partition partition;
  Grouped(const Shards& shards, std::uint32_t table_id, const std::vector<std::uint64_t>& ids) {
    Partitioner(shards.slot_owner(), shards.shard_count()).partition(table_id, ids, partition);
  }
  [[nodiscard]] std::size_t size() const { return partition.keys.size(); }
  [[nodiscard]] TablePull pull(const TableSchema& table, float* rows) const {
    return {.table_id = table.id,
            .schema_version = table.version,
            .dim = table.dim,
            .keys = partition.keys,
            .shard_begin = partition.shard_begin,
            .rows = {rows, size() * table.dim}};
  }
  [[nodiscard]] TablePush push(const TableSchema& table, const float* grads, float lr) const {
    return {.table_id = table.id,
            .schema_version = table.version,
            .dim = table.dim,
            .lr = lr,
            .keys = partition.keys,
            .shard_begin = partition.shard_begin,
            .grads = {grads, size() * table.dim}};
  }
};

}  // namespace sparserow::testing
