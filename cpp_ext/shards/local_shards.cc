#include "shards/local_shards.h"

#include <algorithm>

#include "util/not_allowed.h"

namespace sparserow {
namespace {

constexpr std::size_t kRemembered = 1024;  // of sequences, as a shard's window

// Keys [begin, end) of a conditional pull.
Status pull_changed(const Store& store, const TablePull& table, std::size_t begin, std::size_t end) {
  const std::size_t n = end - begin;
  std::vector<float> rows(n * table.dim);
  std::vector<std::uint64_t> versions(n);
  std::vector<std::uint8_t> found(n);
  SR_RETURN_IF_ERROR(store.pull(table.table_id, table.keys.subspan(begin, n), Dtype::kFloat32,
                                reinterpret_cast<std::byte*>(rows.data()), {.versions = versions, .found = found}));
  for (std::size_t i = 0; i < n; ++i) {
    const bool differs = table.known[begin + i] != versions[i];
    if (!table.changed.empty()) table.changed[begin + i] = differs ? 1 : 0;
    if (!differs) continue;
    std::copy_n(rows.begin() + static_cast<std::ptrdiff_t>(i * table.dim), table.dim,
                table.rows.data() + (begin + i) * table.dim);
    table.versions[begin + i] = versions[i];
    if (!table.found.empty()) table.found[begin + i] = found[i];
  }
  return Status::ok();
}

}  // namespace

LocalShards::LocalShards(std::vector<std::shared_ptr<Store>> stores, std::shared_ptr<std::atomic<std::uint64_t>> writes)
    : stores_(std::move(stores)), slot_owner_(stores_.front()->options().slot_count), writes_(std::move(writes)) {
  for (std::size_t slot = 0; slot < slot_owner_.size(); ++slot) {
    slot_owner_[slot] = static_cast<std::uint16_t>(slot * stores_.size() / slot_owner_.size());
  }
}

Result<std::shared_ptr<LocalShards>> LocalShards::create(std::vector<std::shared_ptr<Store>> stores) {
  const auto slots = stores.empty() ? 0 : stores.front()->options().slot_count;
  const bool equal = std::all_of(stores.begin(), stores.end(),
                                 [slots](const auto& store) { return store->options().slot_count == slots; });
  if (stores.empty() || stores.size() > slots || !equal) {
    return Status(Code::kInvalidArgument, "stores: give at least one, of the same slot_count, at most one per slot");
  }
  const auto writes = std::make_shared<std::atomic<std::uint64_t>>(0);
  return std::shared_ptr<LocalShards>(new LocalShards(std::move(stores), writes));
}

std::shared_ptr<LocalShards> LocalShards::for_another_worker() const {
  return std::shared_ptr<LocalShards>(new LocalShards(stores_, writes_));
}

// The caller holds mutex_. The own count is read first: read second, it could exceed a total that was never given.
void LocalShards::count_write(std::int64_t step) {
  if (step != kNoStep) ++own_steps_;
  ++*writes_;
}

std::uint32_t LocalShards::shard_count() const noexcept { return static_cast<std::uint32_t>(stores_.size()); }

Status LocalShards::check(std::uint32_t table_id, std::uint32_t dim, std::span<const std::uint64_t> keys,
                          std::span<const std::uint32_t> shard_begin) const {
  const auto schema = stores_.front()->schema(table_id);
  if (!schema) return {Code::kNotFound, "table id " + std::to_string(table_id) + " does not exist"};
  if (schema->dim != dim) {
    return not_allowed("dim of table '" + schema->name + "'", dim, std::to_string(schema->dim));
  }
  if (shard_begin.size() != stores_.size() + 1 || shard_begin.back() != keys.size()) {
    return {Code::kInvalidArgument, "table '" + schema->name + "': keys are not grouped by shard"};
  }
  return Status::ok();
}

Status check_outputs(const TablePull& pull) {
  const std::size_t n = pull.keys.size();
  const auto refuse = [n](const char* name, std::size_t has, const std::string& allowed) {
    return not_allowed("pull." + std::string(name) + "'s length", has, allowed + " for " + std::to_string(n) + " keys");
  };
  if (pull.rows.size() != n * pull.dim) return refuse("rows", pull.rows.size(), std::to_string(n * pull.dim));
  const std::array<std::pair<const char*, std::size_t>, 4> optional{{{"versions", pull.versions.size()},
                                                                     {"found", pull.found.size()},
                                                                     {"known", pull.known.size()},
                                                                     {"changed", pull.changed.size()}}};
  for (const auto& [name, has] : optional) {
    if (has != 0 && has != n) return refuse(name, has, "none, or as many");
  }
  if (!pull.known.empty() && pull.versions.empty()) {
    return {Code::kInvalidArgument, "pull.versions: must be set when pull.known is"};
  }
  return Status::ok();
}

Status LocalShards::pull(std::span<const TablePull> tables, const CallOptions& options) {
  if (options.writes_of_others != nullptr) {
    std::fill_n(options.writes_of_others, stores_.size(), writes_->load() - own_steps_.load());
  }
  for (const TablePull& table : tables) {
    SR_RETURN_IF_ERROR(check(table.table_id, table.dim, table.keys, table.shard_begin));
    SR_RETURN_IF_ERROR(check_outputs(table));
    for (std::size_t s = 0; s < stores_.size(); ++s) {
      const std::size_t begin = table.shard_begin[s];
      if (!table.known.empty()) {
        SR_RETURN_IF_ERROR(pull_changed(*stores_[s], table, begin, table.shard_begin[s + 1]));
        continue;
      }
      PullExtras extras;
      const std::size_t count = table.shard_begin[s + 1] - begin;
      if (!table.versions.empty()) extras.versions = table.versions.subspan(begin, count);
      if (!table.found.empty()) extras.found = table.found.subspan(begin, count);
      auto* out = reinterpret_cast<std::byte*>(table.rows.data() + begin * table.dim);
      SR_RETURN_IF_ERROR(
          stores_[s]->pull(table.table_id, table.keys.subspan(begin, count), Dtype::kFloat32, out, extras));
    }
  }
  return Status::ok();
}

Result<std::vector<Store::Reservation>> LocalShards::reserve(std::span<const TablePush> tables) {
  std::vector<Store::Reservation> reservations;
  for (const TablePush& table : tables) {
    SR_RETURN_IF_ERROR(check(table.table_id, table.dim, table.keys, table.shard_begin));
    for (std::size_t s = 0; s < stores_.size(); ++s) {
      const std::size_t begin = table.shard_begin[s];
      auto one = stores_[s]->reserve(table.table_id, table.keys.subspan(begin, table.shard_begin[s + 1] - begin));
      if (!one.is_ok()) return one.status();
      reservations.push_back(std::move(one).value());
    }
  }
  return reservations;
}

Status LocalShards::apply(std::span<const TablePush> tables, const CommitOptions& commit) {
  SR_RETURN_IF_ERROR(half_applied_);
  bool has_changed = false;
  for (const TablePush& table : tables) {
    for (std::size_t s = 0; s < stores_.size(); ++s) {
      const std::size_t begin = table.shard_begin[s];
      ApplyOptions options;
      options.lr = table.lr;
      options.step = commit.step;
      options.has_changed = &has_changed;
      options.observation = commit.step == kNoStep ? commit.sequence : static_cast<std::uint64_t>(commit.step);
      const auto keys = table.keys.subspan(begin, table.shard_begin[s + 1] - begin);
      const Status status = stores_[s]->apply(table.table_id, keys, table.grads.data() + begin * table.dim, options);
      if (!status.is_ok() && has_changed) {
        half_applied_ = {Code::kDataLoss, "commit " + std::to_string(commit.sequence) +
                                              " was applied in part: " + std::string(status.message())};
        return half_applied_;
      }
      SR_RETURN_IF_ERROR(status);
    }
  }
  return Status::ok();
}

Status LocalShards::prepare(std::span<const TablePush> tables, const CommitOptions& options) {
  const MutexLock lock(mutex_);
  if (is_duplicate(options)) return Status::ok();
  reservations_.clear();
  prepared_.clear();
  prepared_sequence_ = 0;
  auto reservations = reserve(tables);
  if (!reservations.is_ok()) return reservations.status();
  for (const TablePush& table : tables) {
    auto prepared = std::make_unique<PreparedPush>();
    prepared->keys.assign(table.keys.begin(), table.keys.end());
    prepared->shard_begin.assign(table.shard_begin.begin(), table.shard_begin.end());
    prepared->grads.assign(table.grads.begin(), table.grads.end());
    prepared->push = table;
    prepared->push.keys = prepared->keys;
    prepared->push.shard_begin = prepared->shard_begin;
    prepared->push.grads = prepared->grads;
    prepared_.push_back(std::move(prepared));
  }
  reservations_ = std::move(reservations).value();
  prepared_sequence_ = options.sequence;
  return Status::ok();
}

Status LocalShards::commit_prepared(const CommitOptions& options) {
  const MutexLock lock(mutex_);
  if (is_duplicate(options)) return Status::ok();
  if (prepared_sequence_ != options.sequence) {
    return {Code::kFailedPrecondition,
            "commit: nothing is prepared under sequence " + std::to_string(options.sequence)};
  }
  std::vector<TablePush> pushes;
  for (const auto& prepared : prepared_) pushes.push_back(prepared->push);
  SR_RETURN_IF_ERROR(apply(pushes, options));
  count_write(options.step);
  remember_commit(options.sequence);
  prepared_sequence_ = 0;
  prepared_.clear();
  reservations_.clear();
  return Status::ok();
}

Status LocalShards::abort(const CommitOptions& options) {
  const MutexLock lock(mutex_);
  if (prepared_sequence_ != options.sequence) return Status::ok();
  prepared_sequence_ = 0;
  prepared_.clear();
  reservations_.clear();
  return Status::ok();
}

Status LocalShards::commit(std::span<const TablePush> tables, const CommitOptions& options) {
  const MutexLock lock(mutex_);
  if (is_duplicate(options)) return Status::ok();
  auto reservations = reserve(tables);
  if (!reservations.is_ok()) return reservations.status();
  if (options.may_be_applied != nullptr) *options.may_be_applied = true;
  SR_RETURN_IF_ERROR(apply(tables, options));
  count_write(options.step);
  remember_commit(options.sequence);
  return Status::ok();
}

void LocalShards::remember_commit(std::uint64_t sequence) {
  committed_.insert(sequence);
  if (committed_.size() <= kRemembered) return;
  forgotten_sequence_ = *committed_.begin();
  committed_.erase(committed_.begin());
}

void LocalShards::remember_write(std::uint64_t sequence, std::uint64_t rows) {
  count_write(kNoStep);
  if (sequence == 0) return;
  by_key_[sequence] = rows;
  if (by_key_.size() > kRemembered) by_key_.erase(by_key_.begin());
}

Status LocalShards::assign(std::span<const TablePush> tables, const CallOptions& options) {
  const MutexLock lock(mutex_);
  if (by_key_.contains(options.sequence)) return Status::ok();
  auto reservations = reserve(tables);
  if (!reservations.is_ok()) return reservations.status();
  for (const TablePush& table : tables) {
    for (std::size_t s = 0; s < stores_.size(); ++s) {
      const std::size_t begin = table.shard_begin[s];
      SR_RETURN_IF_ERROR(stores_[s]->assign(table.table_id, table.keys.subspan(begin, table.shard_begin[s + 1] - begin),
                                            table.grads.data() + begin * table.dim));
    }
  }
  remember_write(options.sequence, 0);
  return Status::ok();
}

Result<std::uint64_t> LocalShards::erase(std::uint32_t table_id, std::span<const std::uint64_t> keys,
                                         std::span<const std::uint32_t> shard_begin, const CallOptions& options) {
  const MutexLock lock(mutex_);
  if (const auto done = by_key_.find(options.sequence); done != by_key_.end()) return done->second;
  std::uint64_t erased = 0;
  if (shard_begin.size() != stores_.size() + 1 || shard_begin.back() != keys.size()) {
    return Status(Code::kInvalidArgument, "erase: keys are not grouped by shard");
  }
  for (std::size_t s = 0; s < stores_.size(); ++s) {
    auto one = stores_[s]->erase(table_id, keys.subspan(shard_begin[s], shard_begin[s + 1] - shard_begin[s]));
    if (!one.is_ok()) return one.status();
    erased += one.value();
  }
  remember_write(options.sequence, erased);
  return erased;
}

Result<ScanPage> LocalShards::scan(std::uint32_t shard, std::uint32_t table_id, std::uint64_t cursor,
                                   std::uint32_t max_rows, bool with_state, const CallOptions& /*options*/) {
  if (shard >= stores_.size()) return Status(Code::kInvalidArgument, "scan: shard is out of range");
  return stores_[shard]->scan(table_id, cursor, max_rows, with_state);
}

}  // namespace sparserow
