#include "commit/write_counts.h"

#include <random>

namespace sparserow {
namespace {

std::uint64_t random_number() {
  std::random_device device;
  return (std::uint64_t{device()} << 32) | device();
}

}  // namespace

WriteCounts::WriteCounts() : base_(random_number()) {}

std::uint64_t WriteCounts::by_others(std::span<const std::uint32_t> table_ids, const Writer* writer) {
  const MutexLock lock(mutex_);
  std::uint64_t sum = base_;
  for (const std::uint32_t table_id : table_ids) {
    if (writer == nullptr) {
      const auto table = tables_.find(table_id);
      if (table != tables_.end()) sum += table->second.all;
      continue;
    }
    Table& table = tables_[table_id];
    auto own = table.own.find(*writer);
    if (own == table.own.end()) {  // a worker has one epoch at a time
      table.own.erase(table.own.lower_bound({writer->job_id, writer->worker_id, 0}),
                      table.own.upper_bound({writer->job_id, writer->worker_id, UINT32_MAX}));
      own = table.own.emplace(*writer, 0).first;
    }
    sum += table.all - own->second;
  }
  return sum;
}

void WriteCounts::forget(const Writer& writer) {
  const MutexLock lock(mutex_);
  for (auto& [table_id, table] : tables_) table.own.erase(writer);
}

}  // namespace sparserow
