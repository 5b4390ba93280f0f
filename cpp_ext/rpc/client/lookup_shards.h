// The shards of a served model behind the seam that sessions and ops use: an exported program reads its rows from a
// serving process group as a training one does from a cluster. Reads only: whatever changes rows is
// kFailedPrecondition, and a shard that does not answer fails the pull.
#pragma once

#include <memory>

#include "rpc/client/client.h"
#include "shards/shards.h"

namespace sparserow::rpc {

class LookupShards final : public Shards {
 public:
  // model: handle (rpc/server/served_models.h), of a version, so that rows and program stay together.
  LookupShards(std::shared_ptr<Client> client, std::uint32_t model) : client_(std::move(client)), model_(model) {}

  [[nodiscard]] std::uint32_t shard_count() const noexcept override { return client_->shard_count(); }
  [[nodiscard]] std::span<const std::uint16_t> slot_owner() const noexcept override { return client_->slot_owner(); }
  Status pull(std::span<const TablePull> tables, const CallOptions& options) override;
  Status prepare(std::span<const TablePush> tables, const CommitOptions& options) override;
  Status commit_prepared(const CommitOptions& options) override;
  Status abort(const CommitOptions& options) override;
  Status commit(std::span<const TablePush> tables, const CommitOptions& options) override;
  Status assign(std::span<const TablePush> tables, const CallOptions& options) override;
  Result<std::uint64_t> erase(std::uint32_t table_id, std::span<const std::uint64_t> keys,
                              std::span<const std::uint32_t> shard_begin, const CallOptions& options) override;
  Result<ScanPage> scan(std::uint32_t shard, std::uint32_t table_id, std::uint64_t cursor, std::uint32_t max_rows,
                        bool with_state, const CallOptions& options) override;

 private:
  std::shared_ptr<Client> client_;
  std::uint32_t model_;
};

}  // namespace sparserow::rpc
