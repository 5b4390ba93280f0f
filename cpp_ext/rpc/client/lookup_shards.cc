#include "rpc/client/lookup_shards.h"

namespace sparserow::rpc {
namespace {

Status reads_only() {
  return {Code::kFailedPrecondition, "a served model is read, not trained: put it into eval mode"};
}

}  // namespace

Status LookupShards::pull(std::span<const TablePull> tables, const CallOptions& options) {
  std::vector<ShardAnswer> answers;
  SR_RETURN_IF_ERROR(client_->lookup(tables, {.model = model_, .deadline = options.deadline}, answers));
  for (const ShardAnswer& answer : answers) SR_RETURN_IF_ERROR(answer.status);
  return Status::ok();
}

Status LookupShards::prepare(std::span<const TablePush> /*tables*/, const CommitOptions& /*options*/) {
  return reads_only();
}
Status LookupShards::commit_prepared(const CommitOptions& /*options*/) { return reads_only(); }
Status LookupShards::abort(const CommitOptions& /*options*/) { return Status::ok(); }
Status LookupShards::commit(std::span<const TablePush> /*tables*/, const CommitOptions& /*options*/) {
  return reads_only();
}
Status LookupShards::assign(std::span<const TablePush> /*tables*/, const CallOptions& /*options*/) {
  return reads_only();
}
Result<std::uint64_t> LookupShards::erase(std::uint32_t /*table_id*/, std::span<const std::uint64_t> /*keys*/,
                                          std::span<const std::uint32_t> /*shard_begin*/,
                                          const CallOptions& /*options*/) {
  return reads_only();
}
Result<ScanPage> LookupShards::scan(std::uint32_t /*shard*/, std::uint32_t /*table_id*/, std::uint64_t /*cursor*/,
                                    std::uint32_t /*max_rows*/, bool /*with_state*/, const CallOptions& /*options*/) {
  return reads_only();
}

}  // namespace sparserow::rpc
