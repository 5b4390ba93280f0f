#include "session/table_access.h"

#include <cstring>

namespace sparserow {

Partition TableAccess::partition(std::span<const std::uint64_t> keys) {
  Partition partition;
  const auto locked = state().partitioner();
  locked.partitioner.partition(table_.id, keys, partition);
  return partition;
}

TablePush TableAccess::push_of(const Partition& partition, const std::vector<float>& values, float lr) const {
  TablePush push;
  push.table_id = table_.id;
  push.schema_version = table_.schema_version;
  push.dim = table_.dim;
  push.lr = lr;
  push.keys = partition.keys;
  push.shard_begin = partition.shard_begin;
  push.grads = values;
  return push;
}

Status TableAccess::pull(std::span<const std::uint64_t> keys, float* rows) {
  SR_RETURN_IF_ERROR(state().wait_for_commit());
  if (keys.empty()) return Status::ok();
  const Partition partition = this->partition(keys);
  std::vector<float> unique(partition.keys.size() * table_.dim);
  TablePull pull;
  pull.name = table_.name;
  pull.table_id = table_.id;
  pull.schema_version = table_.schema_version;
  pull.dim = table_.dim;
  pull.keys = partition.keys;
  pull.shard_begin = partition.shard_begin;
  pull.rows = unique;
  SR_RETURN_IF_ERROR(state().shards().pull({&pull, 1}, state().pull_options(/*train=*/false)));
  for (std::size_t i = 0; i < keys.size(); ++i) {
    std::memcpy(rows + i * table_.dim, unique.data() + std::size_t{partition.inverse[i]} * table_.dim,
                table_.dim * sizeof(float));
  }
  return Status::ok();
}

PushOutcome TableAccess::push(std::span<const std::uint64_t> keys, const float* grads, float lr) {
  if (Status status = state().wait_for_commit(); !status.is_ok()) return {std::move(status)};
  if (keys.empty()) return {};
  const Partition partition = this->partition(keys);
  std::vector<float> sums(partition.keys.size() * table_.dim, 0.0f);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    float* sum = sums.data() + std::size_t{partition.inverse[i]} * table_.dim;
    for (std::uint32_t c = 0; c < table_.dim; ++c) sum[c] += grads[i * table_.dim + c];
  }
  return session_->push_now(push_of(partition, sums, lr));
}

Status TableAccess::assign(std::span<const std::uint64_t> keys, const float* rows) {
  SR_RETURN_IF_ERROR(state().wait_for_commit());
  if (keys.empty()) return Status::ok();
  SR_RETURN_IF_ERROR(session_->settle());
  const Partition partition = this->partition(keys);
  std::vector<float> last(partition.keys.size() * table_.dim);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    std::memcpy(last.data() + std::size_t{partition.inverse[i]} * table_.dim, rows + i * table_.dim,
                table_.dim * sizeof(float));
  }
  const TablePush push = push_of(partition, last, 0.0f);
  const auto number = state().numbers.take(session_->write_deadline());
  if (!number.is_ok()) return number.status();
  CallOptions options = state().pull_options(/*train=*/false);
  options.sequence = number.value().value();
  const Status status = state().writer().assign({&push, 1}, options);
  state().forget_cached(table_.id, partition.keys);
  return status;
}

Result<std::uint64_t> TableAccess::erase(std::span<const std::uint64_t> keys) {
  SR_RETURN_IF_ERROR(state().wait_for_commit());
  if (keys.empty()) return std::uint64_t{0};
  SR_RETURN_IF_ERROR(session_->settle());
  const Partition partition = this->partition(keys);
  const auto number = state().numbers.take(session_->write_deadline());
  if (!number.is_ok()) return number.status();
  CallOptions options = state().pull_options(/*train=*/false);
  options.sequence = number.value().value();
  auto erased = state().writer().erase(table_.id, partition.keys, partition.shard_begin, options);
  state().forget_cached(table_.id, partition.keys);
  return erased;
}

Result<ScanPage> TableAccess::scan(std::uint32_t shard, std::uint64_t cursor, std::uint32_t max_rows) {
  SR_RETURN_IF_ERROR(state().wait_for_commit());
  return state().shards().scan(shard, table_.id, cursor, max_rows, /*with_state=*/false,
                               state().pull_options(/*train=*/false));
}

}  // namespace sparserow
