// The shards of a served model behind the seam that sessions and ops use. An exported program reads its rows from a
// serving process group as a training one does from a cluster. A shard that does not answer fails the pull.
#pragma once

#include <memory>

#include "rpc/client/client.h"
#include "shards/shards.h"

namespace sparserow::rpc {

class LookupShards final : public RowReader {
 public:
  // model: handle (rpc/server/served_models.h), of a version, so that rows and program stay together.
  LookupShards(std::shared_ptr<Client> client, std::uint32_t model) : client_(std::move(client)), model_(model) {}

  [[nodiscard]] std::uint32_t shard_count() const noexcept override { return client_->shard_count(); }
  [[nodiscard]] std::span<const std::uint16_t> slot_owner() const noexcept override { return client_->slot_owner(); }
  [[nodiscard]] std::shared_ptr<RowMemory> make_rows(std::size_t floats) override { return client_->make_rows(floats); }
  Status pull(std::span<const TablePull> tables, const CallOptions& options) override;

 private:
  std::shared_ptr<Client> client_;
  std::uint32_t model_;
};

}  // namespace sparserow::rpc
