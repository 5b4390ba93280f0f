#include "session/table_step.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "util/finite.h"
#include "util/hash.h"
#include "util/row_norm.h"

namespace sparserow {
namespace {

constexpr std::uint32_t kAbsent = 0xffffffffu;

// Whether no other owner reads what `owner` points to. use_count() alone orders nothing: giving up a copy joins the
// chain of releases, so what the last reader did happens before what the caller does next.
template <class T>
bool is_unshared(const std::shared_ptr<T>& owner) noexcept {
  if (owner.use_count() != 1) return false;
  std::shared_ptr<T> copy = owner;
  copy.reset();
  return true;
}

}  // namespace

TableStep::TableStep(std::string name, std::uint32_t table_id, std::uint32_t schema_version, std::uint32_t dim,
                     RowReader& shards)
    : name_(std::move(name)),
      table_id_(table_id),
      schema_version_(schema_version),
      dim_(dim),
      shards_(&shards),
      shard_count_(shards.shard_count()) {}

std::optional<Lookup> TableStep::recall(const IdsRef& ids) const {
  // The same tensor first; then equal ids from another one: a computed tensor that was named ahead of its lookup.
  for (const bool same_source : {true, false}) {
    for (const Memo& memo : memos_) {
      if ((memo.source == ids.source.data) == same_source && is_memo_of(memo, ids.ids)) return lookup_of(memo);
    }
  }
  return std::nullopt;
}

bool TableStep::is_memo_of(const Memo& memo, std::span<const std::int64_t> ids) const noexcept {
  if (memo.n != ids.size()) return false;
  const std::uint32_t* indexes = memo.indexes->data() + memo.offset;
  constexpr std::size_t kBlock = 256;  // without a branch inside; other ids mostly differ in the first one
  for (std::size_t begin = 0; begin < memo.n; begin += kBlock) {
    const std::size_t end = std::min(memo.n, begin + kBlock);
    std::uint64_t differs = 0;
    for (std::size_t i = begin; i < end; ++i) differs |= keys_[indexes[i]] ^ static_cast<std::uint64_t>(ids[i]);
    if (differs != 0) return false;
  }
  return true;
}

std::optional<Lookup> TableStep::find(const IdsRef& ids, std::int64_t* missing) {
  auto indexes = fresh_indexes(ids.ids.size());
  missing_at_.clear();
  if (index_known(ids.ids, *indexes) > 0) {
    *missing = ids.ids[missing_at_.front()];
    return std::nullopt;
  }
  remember(ids.source, 0, ids.ids.size(), indexes);
  return lookup_of(Memo{nullptr, 0, ids.ids.size(), indexes});
}

void TableStep::add(std::span<const IdsRef> lookups, Partitioner& partitioner) {
  std::span<const std::int64_t> ids = lookups.front().ids;
  if (lookups.size() > 1) {
    joined_ids_.clear();
    for (const IdsRef& lookup : lookups) joined_ids_.insert(joined_ids_.end(), lookup.ids.begin(), lookup.ids.end());
    ids = joined_ids_;
  }
  auto indexes = fresh_indexes(0);
  if (keys_.empty()) {
    fresh_.inverse.swap(*indexes);
    partitioner.partition(table_id_, {reinterpret_cast<const std::uint64_t*>(ids.data()), ids.size()}, fresh_);
    indexes->swap(fresh_.inverse);
    append_fresh();
  } else {
    indexes->resize(ids.size());
    if (index_known(ids, *indexes) > 0) {
      partitioner.partition(table_id_, missing_ids_, fresh_);
      const auto base = static_cast<std::uint32_t>(keys_.size());
      for (std::size_t i = 0; i < missing_at_.size(); ++i) (*indexes)[missing_at_[i]] = base + fresh_.inverse[i];
      append_fresh();
    }
  }
  std::size_t offset = 0;
  for (const IdsRef& lookup : lookups) {
    remember(lookup.source, offset, lookup.ids.size(), indexes);
    offset += lookup.ids.size();
  }
}

// Fills the indexes of known ids; the others go to missing_ids_ and missing_at_. Returns their number.
std::size_t TableStep::index_known(std::span<const std::int64_t> ids, Lookup::Indexes& indexes) {
  build_map();
  missing_ids_.clear();
  missing_at_.clear();
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto key = static_cast<std::uint64_t>(ids[i]);
    indexes[i] = map_find(key);
    if (indexes[i] != kAbsent) continue;
    missing_ids_.push_back(key);
    missing_at_.push_back(static_cast<std::uint32_t>(i));
  }
  return missing_ids_.size();
}

void TableStep::append_fresh() {
  if (batches_.size() == batches_used_) batches_.emplace_back();
  Batch& batch = batches_[batches_used_++];
  batch.begin = keys_.size();
  batch.shard_begin.swap(fresh_.shard_begin);
  if (keys_.empty()) {
    keys_.swap(fresh_.keys);
  } else {
    keys_.insert(keys_.end(), fresh_.keys.begin(), fresh_.keys.end());
  }
  staged_.resize(keys_.size(), kNotStaged);
  grow_rows(keys_.size());
}

void TableStep::grow_rows(std::size_t keys) {
  // A buffer that a Lookup of an earlier step still reads is left to it.
  const bool shared = rows_ && (rows_->is_abandoned() || (confirmed_ == 0 && !is_unshared(rows_)));
  if (keys <= row_capacity_ && !shared) return;
  move_rows(std::max(keys, row_capacity_ + row_capacity_ / 2), confirmed_);
}

// Moves the first rows to other memory with room for `capacity` of them.
void TableStep::move_rows(std::size_t capacity, std::size_t rows) {
  auto moved = shards_->make_rows(capacity * dim_);
  if (rows > 0) std::memcpy(moved->data(), rows_->data(), rows * dim_ * sizeof(float));
  rows_ = std::move(moved);
  row_capacity_ = capacity;
}

void TableStep::pending(std::vector<TablePull>& out) { requests_from(batches_confirmed_, out); }

void TableStep::requests(std::vector<TablePull>& out) { requests_from(0, out); }

void TableStep::requests_from(std::size_t first, std::vector<TablePull>& out) {
  if (rows_ && rows_->is_abandoned()) move_rows(keys_.size(), keys_.size());
  for (std::size_t b = first; b < batches_used_; ++b) {
    const Batch& batch = batches_[b];
    TablePull pull;
    pull.name = name_;
    pull.table_id = table_id_;
    pull.schema_version = schema_version_;
    pull.dim = dim_;
    pull.keys = std::span<const std::uint64_t>(keys_).subspan(batch.begin, batch.shard_begin.back());
    pull.shard_begin = batch.shard_begin;
    if (!pull.keys.empty()) pull.rows = {rows_->data() + batch.begin * dim_, pull.keys.size() * dim_};
    pull.memory = rows_;
    out.push_back(pull);
  }
}

void TableStep::confirm() {
  confirmed_ = keys_.size();
  batches_confirmed_ = batches_used_;
}

void TableStep::rollback() {
  if (confirmed_ == keys_.size()) return;
  keys_.resize(confirmed_);
  staged_.resize(confirmed_);
  batches_used_ = batches_confirmed_;
  map_.clear();
  mapped_ = 0;
  memos_.clear();
}

void TableStep::take(TableStep& ahead, Partitioner& partitioner) {
  if (keys_.empty() && memos_.empty()) {
    std::swap(*this, ahead);
    sums_.swap(ahead.sums_);  // the buffers of the step's end stay where they are used
    push_grads_.swap(ahead.push_grads_);
    push_keys_.swap(ahead.push_keys_);
    push_shard_begin_.swap(ahead.push_shard_begin_);
    ahead.clear();
    return;
  }
  std::vector<std::int64_t> ids;
  for (const Memo& memo : ahead.memos_) {
    const std::uint32_t* indexes = memo.indexes->data() + memo.offset;
    ids.resize(memo.n);
    for (std::size_t i = 0; i < memo.n; ++i) ids[i] = static_cast<std::int64_t>(ahead.keys_[indexes[i]]);
    const IdsRef again{ids, {memo.source, {}, {}, 8}};
    add({&again, 1}, partitioner);
  }
  ahead.build_map();
  for (std::size_t i = confirmed_; i < keys_.size(); ++i) {
    const std::size_t from = ahead.map_find(keys_[i]);
    std::memcpy(rows_->data() + i * dim_, ahead.rows_->data() + from * dim_, dim_ * sizeof(float));
  }
  confirm();
  ahead.clear();
}

std::size_t TableStep::fill_pending(TableStep& other) {
  if (other.empty()) return 0;
  other.build_map();
  std::size_t found = 0;
  for (std::size_t i = confirmed_; i < keys_.size(); ++i) {
    const std::uint32_t from = other.map_find(keys_[i]);
    if (from == kAbsent || from >= other.confirmed_) continue;
    std::memcpy(rows_->data() + i * dim_, other.rows_->data() + std::size_t{from} * dim_, dim_ * sizeof(float));
    ++found;
  }
  return found;
}

std::optional<Lookup> TableStep::known(const IdsRef& ids) {
  if (keys_.empty()) return std::nullopt;
  if (auto remembered = recall(ids)) return remembered;
  auto indexes = fresh_indexes(ids.ids.size());
  if (index_known(ids.ids, *indexes) > 0) return std::nullopt;
  return lookup_of(Memo{nullptr, 0, ids.ids.size(), indexes});
}

std::optional<std::int64_t> TableStep::indexes_of(std::span<const std::uint64_t> keys,
                                                  std::span<const std::uint8_t> marks,
                                                  std::vector<std::uint32_t>& out) {
  out.resize(keys.size());
  // A pack of a whole step has its keys in the step's order, and then nothing is searched.
  if (keys.size() == keys_.size() && std::equal(keys.begin(), keys.end(), keys_.begin())) {
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<std::uint32_t>(i);
    return std::nullopt;
  }
  build_map();
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (marks[i] == 0) continue;
    out[i] = map_find(keys[i]);
    if (out[i] == kAbsent) return static_cast<std::int64_t>(keys[i]);
  }
  return std::nullopt;
}

void TableStep::trim_memos(std::size_t most) {
  if (memos_.size() > most) memos_.clear();
}

std::uint64_t TableStep::bytes() const noexcept {
  std::uint64_t indexes = 0;
  for (const auto& one : pool_) indexes += one->capacity() * sizeof(std::uint32_t);
  return row_capacity_ * dim_ * sizeof(float) + keys_.capacity() * sizeof(std::uint64_t) + staged_.capacity() +
         map_.capacity() * sizeof(std::uint32_t) + indexes;
}

float* TableStep::sums() {
  const std::size_t wanted = keys_.size() * dim_;
  const std::size_t had = sums_ ? sums_->size() : 0;
  if (!sums_ || had < wanted || sums_->is_abandoned()) {
    auto moved = shards_->make_rows(std::max(wanted, had < wanted ? had * 3 / 2 : had));
    if (had > 0) std::memcpy(moved->data(), sums_->data(), had * sizeof(float));
    sums_ = std::move(moved);
  }
  if (!lent_.empty()) std::copy(lent_.begin(), lent_.end(), sums_->data());
  lent_ = {};
  return sums_->data();
}

bool TableStep::take_sums(std::span<const std::uint64_t> keys, std::span<float> sums) {
  if (keys_.empty() || !std::equal(keys.begin(), keys.end(), keys_.begin(), keys_.end())) return false;
  if (std::any_of(staged_.begin(), staged_.end(), [](std::uint8_t one) { return one != kNotStaged; })) return false;
  lent_ = sums;
  const bool finite = all_finite_of_many(sums.data(), sums.size());
  std::fill(staged_.begin(), staged_.end(), finite ? kStagedFinite : kStaged);  // seal() looks at each that may not be
  return true;
}

void TableStep::drop_sums() {
  std::fill(staged_.begin(), staged_.end(), kNotStaged);
  lent_ = {};
}

TableStep::Seal TableStep::seal(float scale, float clip_row_norm) {
  const bool clips = clip_row_norm < std::numeric_limits<float>::infinity();
  float* base = !lent_.empty() ? lent_.data() : sums_ ? sums() : nullptr;
  Seal seal;
  for (std::size_t i = 0; i < staged_.size(); ++i) {
    if (staged_[i] == kNotStaged) continue;
    ++seal.rows;
    if (staged_[i] == kStagedFinite && scale == 1.0f && !clips) continue;
    float* sum = base + i * dim_;
    if (scale != 1.0f) {
      for (std::uint32_t c = 0; c < dim_; ++c) sum[c] *= scale;
    }
    if (!all_finite(sum, dim_)) {
      if (seal.nonfinite_rows++ == 0) seal.first_nonfinite_key = keys_[i];
    } else if (clips) {
      seal.clipped_rows += clip_norm(sum, dim_, clip_row_norm) ? 1 : 0;
    }
  }
  direct_push_ = batches_used_ == 1 && seal.rows == keys_.size();
  if (!direct_push_) gather_pushes();
  return seal;
}

void TableStep::gather_pushes() {
  push_keys_.clear();
  const auto staged = std::count_if(staged_.begin(), staged_.end(), [](std::uint8_t one) { return one != kNotStaged; });
  const std::size_t floats = static_cast<std::size_t>(staged) * dim_;
  if (!push_grads_ || push_grads_->size() < floats || push_grads_->is_abandoned()) {
    push_grads_ = shards_->make_rows(floats);
  }
  float* to = push_grads_->data();
  push_shard_begin_.assign(1, 0);
  for (std::uint32_t shard = 0; shard < shard_count_; ++shard) {
    for (std::size_t b = 0; b < batches_used_; ++b) {
      const Batch& batch = batches_[b];
      for (std::size_t i = batch.shard_begin[shard]; i < batch.shard_begin[shard + 1]; ++i) {
        const std::size_t index = batch.begin + i;
        if (staged_[index] == kNotStaged) continue;
        push_keys_.push_back(keys_[index]);
        to = std::copy_n(sums_now() + index * dim_, dim_, to);
      }
    }
    push_shard_begin_.push_back(static_cast<std::uint32_t>(push_keys_.size()));
  }
}

TablePush TableStep::push(float lr) const {
  TablePush push;
  push.table_id = table_id_;
  push.schema_version = schema_version_;
  push.dim = dim_;
  push.lr = lr;
  push.keys = direct_push_ ? keys_ : push_keys_;
  push.shard_begin = direct_push_ ? batches_.front().shard_begin : push_shard_begin_;
  push.grads = {direct_push_ ? sums_now() : push_grads_->data(), push.keys.size() * dim_};
  if (!direct_push_) {
    push.memory = push_grads_;
  } else if (lent_.empty()) {
    push.memory = sums_;
  }
  return push;
}

void TableStep::clear() {
  keys_.clear();
  staged_.clear();
  lent_ = {};
  confirmed_ = 0;
  batches_used_ = 0;
  batches_confirmed_ = 0;
  map_.clear();
  mapped_ = 0;
  memos_.clear();
  push_keys_.clear();
  direct_push_ = false;
}

std::shared_ptr<Lookup::Indexes> TableStep::fresh_indexes(std::size_t n) {
  for (auto& candidate : pool_) {
    if (!is_unshared(candidate)) continue;
    candidate->resize(n);
    return candidate;
  }
  pool_.push_back(std::make_shared<Lookup::Indexes>(n));
  return pool_.back();
}

void TableStep::remember(const TensorView& source, std::size_t offset, std::size_t n,
                         const std::shared_ptr<Lookup::Indexes>& indexes) {
  const Memo memo{source.data, offset, n, indexes};
  for (Memo& old : memos_) {
    if (old.source == memo.source && old.n == n) {
      old = memo;
      return;
    }
  }
  memos_.push_back(memo);
}

Lookup TableStep::lookup_of(const Memo& memo) const {
  // Where there are no ids, there may be no memory of rows.
  std::shared_ptr<const float[]> rows = rows_ ? std::shared_ptr<const float[]>(rows_, rows_->data()) : nullptr;
  return {memo.indexes, memo.offset, memo.n, std::move(rows), dim_};
}

void TableStep::build_map() {
  const std::size_t wanted = std::bit_ceil(std::max<std::size_t>(64, keys_.size() * 2));
  if (map_.size() < wanted) {
    map_.assign(wanted, 0);
    mapped_ = 0;
  }
  for (; mapped_ < keys_.size(); ++mapped_) map_insert(static_cast<std::uint32_t>(mapped_));
}

void TableStep::map_insert(std::uint32_t index) {
  const std::size_t mask = map_.size() - 1;
  std::size_t at = row_hash(table_id_, keys_[index]) & mask;
  while (map_[at] != 0) at = (at + 1) & mask;
  map_[at] = index + 1;
}

std::uint32_t TableStep::map_find(std::uint64_t key) const noexcept {
  const std::size_t mask = map_.size() - 1;
  for (std::size_t at = row_hash(table_id_, key) & mask; map_[at] != 0; at = (at + 1) & mask) {
    if (keys_[map_[at] - 1] == key) return map_[at] - 1;
  }
  return kAbsent;
}

}  // namespace sparserow
