#include "rpc/client/lookup_shards.h"

namespace sparserow::rpc {

Status LookupShards::pull(std::span<const TablePull> tables, const CallOptions& options) {
  std::vector<ShardAnswer> answers;
  SR_RETURN_IF_ERROR(client_->lookup(tables, {.model = model_, .deadline = options.deadline}, answers));
  for (const ShardAnswer& answer : answers) SR_RETURN_IF_ERROR(answer.status);
  return Status::ok();
}

}  // namespace sparserow::rpc
