// The client for callers that have keys as they come: dedup, partition and per-key sums happen here.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "rpc/client/client.h"
#include "util/partition.h"

namespace sparserow::bindings {

// Which table, as a caller names it.
struct TableRef {
  std::uint32_t table_id;
  std::uint32_t schema_version;
  std::uint32_t dim;
};

// Scratch of one call; used again by the next.
struct Workspace {
  explicit Workspace(const RowReader& shards) : partitioner(shards.slot_owner(), shards.shard_count()) {}
  Partitioner partitioner;
  Partition partition;
  std::shared_ptr<RowMemory> rows;
  std::vector<std::uint64_t> versions;
  std::vector<std::uint8_t> found;

  // Room for so many floats in `rows`; what was there is lost.
  std::span<float> make_room(RowReader& shards, std::size_t floats) {
    if (!rows || rows->size() < floats || rows->is_abandoned()) rows = shards.make_rows(floats);
    return {rows->data(), floats};
  }
};

// A client that takes keys in any order, also repeated, and gives rows in that order. Thread-safe.
class KeyedClient {
 public:
  explicit KeyedClient(std::shared_ptr<rpc::Client> client) : client_(std::move(client)) {}
  [[nodiscard]] const std::shared_ptr<rpc::Client>& shards() const { return client_; }

  Status pull(const TableRef& table, std::span<const std::uint64_t> keys, float* rows, std::uint64_t* versions,
              std::uint8_t* found, const CallOptions& options) {
    Lease lease(*this);
    Workspace& work = *lease.workspace;
    work.partitioner.partition(table.table_id, keys, work.partition);
    const std::size_t uniques = work.partition.keys.size();
    TablePull pull{.table_id = table.table_id,
                   .schema_version = table.schema_version,
                   .dim = table.dim,
                   .keys = work.partition.keys,
                   .shard_begin = work.partition.shard_begin,
                   .rows = {rows, uniques * table.dim}};
    if (versions != nullptr) pull.versions = {versions, uniques};
    if (found != nullptr) pull.found = {found, uniques};
    if (in_order(work, keys)) return client_->pull(std::span(&pull, 1), options);
    pull.rows = work.make_room(*client_, uniques * table.dim);
    pull.memory = work.rows;
    if (versions != nullptr) {
      work.versions.resize(uniques);
      pull.versions = work.versions;
    }
    if (found != nullptr) {
      work.found.resize(uniques);
      pull.found = work.found;
    }
    SR_RETURN_IF_ERROR(client_->pull(std::span(&pull, 1), options));
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const std::size_t from = work.partition.inverse[i];
      std::memcpy(rows + i * table.dim, pull.rows.data() + from * table.dim, table.dim * sizeof(float));
      if (versions != nullptr) versions[i] = work.versions[from];
      if (found != nullptr) found[i] = work.found[from];
    }
    return Status::ok();
  }

  // Calls send(TablePush) with unique grouped keys; values of repeated keys are summed in order, or, for an
  // assign, the last one stands.
  template <class Send>
  Status push(const TableRef& table, std::span<const std::uint64_t> keys, const float* values, float lr, bool sums,
              Send&& send) {
    Lease lease(*this);
    Workspace& work = *lease.workspace;
    work.partitioner.partition(table.table_id, keys, work.partition);
    TablePush push{.table_id = table.table_id,
                   .schema_version = table.schema_version,
                   .dim = table.dim,
                   .lr = lr,
                   .keys = work.partition.keys,
                   .shard_begin = work.partition.shard_begin,
                   .grads = {values, work.partition.keys.size() * table.dim}};
    if (!in_order(work, keys)) {
      const auto room = work.make_room(*client_, work.partition.keys.size() * table.dim);
      gather(work, room.data(), table.dim, keys.size(), values, sums);
      push.grads = room;
      push.memory = work.rows;
    }
    return send(push);
  }

 private:
  // A workspace for the time of one call.
  struct Lease {
    explicit Lease(KeyedClient& owner) : client(owner), workspace(client.take_workspace()) {}
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease() {
      const std::lock_guard lock(client.mutex_);
      client.workspaces_.push_back(std::move(workspace));
    }
    KeyedClient& client;
    std::unique_ptr<Workspace> workspace;
  };

  std::unique_ptr<Workspace> take_workspace() {
    const std::lock_guard lock(mutex_);
    if (workspaces_.empty()) return std::make_unique<Workspace>(*client_);
    auto workspace = std::move(workspaces_.back());
    workspaces_.pop_back();
    return workspace;
  }

  // Unique keys of a single shard stand in the caller's order: no row needs to move.
  [[nodiscard]] bool in_order(const Workspace& work, std::span<const std::uint64_t> keys) const {
    return client_->shard_count() == 1 && work.partition.keys.size() == keys.size();
  }

  static void gather(Workspace& work, float* out, std::uint32_t dim, std::size_t n, const float* values, bool sums) {
    work.found.assign(work.partition.keys.size(), 0);  // which rows have a value
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t at = work.partition.inverse[i];
      float* to = out + at * dim;
      const float* from = values + i * dim;
      if (sums && work.found[at] != 0) {
        for (std::uint32_t d = 0; d < dim; ++d) to[d] += from[d];
      } else {
        std::memcpy(to, from, dim * sizeof(float));
      }
      work.found[at] = 1;
    }
  }

  const std::shared_ptr<rpc::Client> client_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Workspace>> workspaces_;  // guarded by mutex_
};

}  // namespace sparserow::bindings
