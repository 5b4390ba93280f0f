#include "store/table/table_map.h"

#include <algorithm>
#include <mutex>
#include <sstream>
#include <utility>

namespace sparserow {

std::shared_ptr<Table> TableMap::find(std::uint32_t table_id) const {
  const std::shared_lock lock(mutex_);
  const auto found = tables_.find(table_id);
  return found == tables_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<Table>> TableMap::all() const {
  const std::shared_lock lock(mutex_);
  std::vector<std::shared_ptr<Table>> tables;
  tables.reserve(tables_.size());
  for (const auto& [id, table] : tables_) tables.push_back(table);
  return tables;
}

std::vector<std::shared_ptr<Table>> TableMap::named(std::span<const std::uint32_t> ids) const {
  const std::shared_lock lock(mutex_);
  std::vector<std::shared_ptr<Table>> tables;
  for (const std::uint32_t id : ids) {
    if (const auto found = tables_.find(id); found != tables_.end()) tables.push_back(found->second);
  }
  return tables;
}

Result<bool> TableMap::add(const TableSchema& schema, bool is_tiered,
                           const std::function<std::shared_ptr<Table>()>& make) {
  const std::unique_lock lock(mutex_);
  if (const auto found = tables_.find(schema.id); found != tables_.end()) {
    SR_RETURN_IF_ERROR(same_schema(found->second->schema, schema));
    return false;
  }
  SR_RETURN_IF_ERROR(check_share(schema, is_tiered));
  const std::shared_ptr<Table> made = make();
  made->is_followed = is_followed(schema.id);
  tables_.emplace(schema.id, made);
  return schema.id <= last_removed_;
}

std::shared_ptr<Table> TableMap::remove(std::uint32_t table_id) {
  const std::unique_lock lock(mutex_);
  const auto found = tables_.find(table_id);
  if (found == tables_.end()) return nullptr;
  std::shared_ptr<Table> removed = std::move(found->second);
  tables_.erase(found);
  last_removed_ = std::max(last_removed_, table_id);
  return removed;
}

Status TableMap::check_share(const TableSchema& schema, bool is_tiered) const {
  const float wanted = schema.policy.ram_share;
  if (wanted == 0) return Status::ok();
  if (!is_tiered) {
    return {Code::kFailedPrecondition,
            "table " + schema.name + ": policy.ram_share needs shards with an ssd_path; allowed without: 0"};
  }
  float taken = 0;
  for (const auto& [id, table] : tables_) taken += table->schema.policy.ram_share;
  if (taken + wanted <= 0.9f + 1e-6f) return Status::ok();
  std::ostringstream text;
  text << "table " << schema.name << ": policy.ram_share: " << wanted << " is not allowed; other tables have " << taken
       << "; allowed: together at most 0.9";
  return {Code::kInvalidArgument, text.str()};
}

bool TableMap::has_followers(std::uint32_t table_id) const {
  const std::shared_lock lock(mutex_);
  return is_followed(table_id);
}

bool TableMap::is_followed(std::uint32_t table_id) const { return cursors_of_all_ > 0 || cursors_.contains(table_id); }

void TableMap::mark_followed() {
  for (const auto& [id, table] : tables_) table->is_followed = is_followed(id);
}

bool TableMap::follow(const std::vector<std::uint32_t>& wanted) {
  const std::unique_lock lock(mutex_);
  bool is_new = wanted.empty() && cursors_of_all_ == 0;
  for (const std::uint32_t table_id : wanted) is_new |= !is_followed(table_id);
  if (wanted.empty()) ++cursors_of_all_;
  for (const std::uint32_t table_id : wanted) ++cursors_[table_id];
  mark_followed();
  return is_new;
}

void TableMap::unfollow(const std::vector<std::uint32_t>& wanted) {
  const std::unique_lock lock(mutex_);
  if (wanted.empty()) --cursors_of_all_;
  for (const std::uint32_t table_id : wanted) {
    const auto found = cursors_.find(table_id);
    if (--found->second == 0) cursors_.erase(found);
  }
  mark_followed();
}

}  // namespace sparserow
