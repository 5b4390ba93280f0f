#include "store/change_log.h"

#include <algorithm>
#include <utility>

#include "store/store_impl.h"
#include "store/tiering.h"

namespace sparserow {
namespace {

Status no_cursor(const std::string& name) {
  return {Code::kNotFound, "cursor '" + name + "' is not known to this store; open it with the versions that it has"};
}

bool is_wanted(const std::vector<std::uint32_t>& tables, std::uint32_t table_id) {
  return tables.empty() || std::binary_search(tables.begin(), tables.end(), table_id);
}

// How often each key stands there.
void count_runs(ChangedKeys& table) {
  for (std::size_t i = 0; i < table.keys.size(); ++i) {
    if (i == 0 || table.keys[i] != table.keys[i - 1]) table.times.push_back(0);
    ++table.times.back();
  }
}

std::vector<ChangedKeys> ordered(std::map<std::uint32_t, ChangedKeys>& tables, bool is_counted) {
  std::vector<ChangedKeys> out;
  for (auto& [id, table] : tables) {
    std::sort(table.keys.begin(), table.keys.end());
    if (is_counted) count_runs(table);
    table.keys.erase(std::unique(table.keys.begin(), table.keys.end()), table.keys.end());
    table.table_id = id;
    out.push_back(std::move(table));
  }
  return out;
}

}  // namespace

std::vector<std::uint64_t> ChangeLog::versions() const {
  const Store::Impl& store = *store_->impl_;
  std::vector<std::uint64_t> out(store.options.slot_count);
  for (std::uint32_t stripe = 0; stripe < store.slots.stripe_count(); ++stripe) {
    const std::shared_lock lock(store.stripes[stripe].mutex);
    for (std::uint32_t slot = stripe; slot < out.size(); slot += store.slots.stripe_count()) {
      out[slot] = store.version_of(slot);
    }
  }
  return out;
}

Status ChangeLog::open(const std::string& name, std::span<const std::uint64_t> versions,
                       std::vector<std::uint32_t> tables, std::chrono::seconds idle_limit, const HoldOptions& hold) {
  const std::uint32_t slot_count = store_->options().slot_count;
  if (versions.size() != slot_count) {
    return {Code::kInvalidArgument, "cursor '" + name + "': " + std::to_string(versions.size()) +
                                        " versions; allowed: one for each of " + std::to_string(slot_count) + " slots"};
  }
  std::sort(tables.begin(), tables.end());
  const std::lock_guard lock(cursors_mutex_);
  if (cursors_.empty()) SR_RETURN_IF_ERROR(start_rings());
  Cursor cursor{.versions = {versions.begin(), versions.end()},
                .tables = std::move(tables),
                .idle_limit = idle_limit,
                .used_at = Clock::now(),
                .hold = hold.is_on() ? std::make_shared<ChangeHold>(hold) : nullptr};
  const std::uint64_t lineage = store_->lineage();
  for (std::uint64_t& version : cursor.versions) {
    if (version != kNotFollowed && version >> 48 != lineage) version = 0;
  }
  cursors_.insert_or_assign(name, std::move(cursor));
  return Status::ok();
}

void ChangeLog::close(const std::string& name) {
  const std::lock_guard lock(cursors_mutex_);
  if (const auto found = cursors_.find(name); found != cursors_.end()) drop(found);
}

void ChangeLog::close_idle() {
  const auto now = Clock::now();
  const std::lock_guard lock(cursors_mutex_);
  for (auto at = cursors_.begin(); at != cursors_.end();) {
    const auto cursor = at++;
    const auto limit = cursor->second.idle_limit;
    if (limit.count() > 0 && now - cursor->second.used_at > limit) drop(cursor);
  }
}

bool ChangeLog::is_open(const std::string& name) const {
  const std::lock_guard lock(cursors_mutex_);
  return cursors_.contains(name);
}

void ChangeLog::drop(std::map<std::string, Cursor>::iterator cursor) {
  cursors_.erase(cursor);
  if (cursors_.empty()) {
    end_rings();
    return;
  }
  for (std::uint32_t slot = 0; slot < store_->options().slot_count; ++slot) pass(slot);
}

Status ChangeLog::start_rings() {
  Store::Impl& store = *store_->impl_;
  const std::uint64_t bytes = std::uint64_t{store.options.slot_count} * sizeof(SlotLog);
  if (!store.change_budget.take(bytes)) {
    return {Code::kResourceExhausted, "change_log_bytes: " + std::to_string(store.change_budget.limit_bytes) +
                                          " is not enough to follow changes; allowed: >= " + std::to_string(bytes)};
  }
  for (Store::Impl::Stripe& stripe : store.stripes) {
    std::vector<SlotLog> logs;
    const std::unique_lock lock(stripe.mutex);
    logs.reserve(stripe.sequences.size());
    for (const std::uint64_t sequence : stripe.sequences) logs.emplace_back(sequence);
    stripe.logs = std::move(logs);
  }
  return Status::ok();
}

void ChangeLog::end_rings() {
  Store::Impl& store = *store_->impl_;
  for (Store::Impl::Stripe& stripe : store.stripes) {
    const std::unique_lock lock(stripe.mutex);
    for (SlotLog& log : stripe.logs) {
      log.written.reset(0, store.change_budget);
      log.erased.reset(0, store.change_budget);
    }
    stripe.logs = {};
  }
  store.change_budget.give_back(std::uint64_t{store.options.slot_count} * sizeof(SlotLog));
}

// Drops what every cursor has of a slot.
void ChangeLog::pass(std::uint32_t slot) {
  constexpr std::uint64_t kSequence = (std::uint64_t{1} << 48) - 1;
  std::uint64_t passed = kNotFollowed;
  for (const auto& [name, cursor] : cursors_) {
    const std::uint64_t version = cursor.versions[slot];
    const bool is_held = cursor.hold != nullptr && version != kNotFollowed;
    passed = std::min(passed, is_held ? cursor.hold->safe(slot, version) : version);
  }
  Store::Impl& store = *store_->impl_;
  Store::Impl::Stripe& stripe = store.stripes[slot % store.slots.stripe_count()];
  const std::uint32_t in_stripe = slot / store.slots.stripe_count();
  const std::unique_lock lock(stripe.mutex);
  const std::uint64_t sequence = passed == kNotFollowed ? stripe.sequences[in_stripe] : passed & kSequence;
  stripe.logs[in_stripe].written.pass(sequence, store.change_budget);
  stripe.logs[in_stripe].erased.pass(sequence, store.change_budget);
}

ChangeLog::Cursor* ChangeLog::find(const std::string& name) {
  const auto found = cursors_.find(name);
  if (found == cursors_.end()) return nullptr;
  found->second.used_at = Clock::now();
  return &found->second;
}

Result<std::vector<std::uint32_t>> ChangeLog::slots_behind(const std::string& name, std::uint32_t begin,
                                                           std::size_t limit) {
  const std::vector<std::uint64_t> now = versions();
  const auto slot_count = static_cast<std::uint32_t>(now.size());
  const std::lock_guard lock(cursors_mutex_);
  const Cursor* cursor = find(name);
  if (cursor == nullptr) return no_cursor(name);
  const auto due = cursor->hold != nullptr ? cursor->hold->due() : std::unordered_set<std::uint32_t>{};
  std::vector<std::uint32_t> slots;
  for (std::uint32_t i = 0; i < slot_count && slots.size() < limit; ++i) {
    const std::uint32_t slot = (begin + i) % slot_count;
    const std::uint64_t version = cursor->versions[slot];
    if (version != kNotFollowed && (version < now[slot] || due.contains(slot))) slots.push_back(slot);
  }
  return slots;
}

Result<SlotChanges> ChangeLog::read(const std::string& name, std::uint32_t slot) {
  std::vector<std::uint32_t> wanted;
  SlotChanges out{.slot = slot};
  {
    const std::lock_guard lock(cursors_mutex_);
    const Cursor* cursor = find(name);
    if (cursor == nullptr) return no_cursor(name);
    if (slot >= cursor->versions.size() || cursor->versions[slot] == kNotFollowed) {
      return Status(Code::kInvalidArgument, "cursor '" + name + "': does not follow slot " + std::to_string(slot));
    }
    out.since = cursor->versions[slot];
    wanted = cursor->tables;
  }
  const Store::Impl& store = *store_->impl_;
  const Store::Impl::Stripe& stripe = store.stripes[slot % store.slots.stripe_count()];
  const std::uint32_t in_stripe = slot / store.slots.stripe_count();
  const std::uint64_t since = out.since & ((std::uint64_t{1} << 48) - 1);
  std::map<std::uint32_t, ChangedKeys> tables;
  bool is_complete = false;
  {
    const std::shared_lock lock(stripe.mutex);
    out.until = store.version_of(slot);
    if (stripe.logs.empty()) return no_cursor(name);  // closed since
    const SlotLog& log = stripe.logs[in_stripe];
    const bool is_of_this_lineage = out.since >> 48 == out.until >> 48;
    if (!is_of_this_lineage || since < log.erased.floor()) {
      out.kind = SlotChanges::Kind::kSnapshot;
      out.since = 0;
    } else {
      is_complete = since >= log.written.floor();
      if (is_complete) {
        log.written.visit_after(since, [&](const Change& change) {
          if (!is_wanted(wanted, change.table_id)) return;
          if (out.oldest_at_ms == 0) out.oldest_at_ms = change.at_ms;
          tables[change.table_id].keys.push_back(change.key);
        });
      }
      log.erased.visit_after(since, [&](const Change& change) {
        if (!is_wanted(wanted, change.table_id)) return;
        ChangedKeys& table = tables[change.table_id];
        table.erased.push_back(change.key);
        table.erased_versions.push_back(out.until >> 48 << 48 | change.sequence);
      });
    }
  }
  if (!is_complete) {
    SR_RETURN_IF_ERROR(list_rows(slot, out.since, wanted, tables));
    const std::lock_guard lock(cursors_mutex_);
    ++(out.kind == SlotChanges::Kind::kSnapshot ? snapshots_ : scans_);
  }
  out.tables = ordered(tables, is_complete);
  return out;
}

// Keys of the slot whose rows are newer than `since`, from a look at all of them.
Status ChangeLog::list_rows(std::uint32_t slot, std::uint64_t since, const std::vector<std::uint32_t>& wanted,
                            std::map<std::uint32_t, ChangedKeys>& tables) const {
  const Store::Impl& store = *store_->impl_;
  const SlotOrder& slots = store.slots;
  const std::uint32_t stripe = slot % slots.stripe_count();
  const std::uint32_t in_stripe = slot / slots.stripe_count();
  std::vector<std::shared_ptr<Table>> all;
  {
    const std::shared_lock lock(store.tables_mutex);
    for (const auto& [id, table] : store.tables) {
      if (is_wanted(wanted, id)) all.push_back(table);
    }
  }
  for (const auto& table : all) {
    const auto add = [&](std::uint64_t path, std::uint64_t version) {
      if (version <= since) return;
      tables[table->schema.id].keys.push_back(key_of_hash(table->schema.id, slots.hash(stripe, path)));
    };
    bool may_be_on_ssd = false;
    {
      const std::shared_lock lock(store.stripes[stripe].mutex);
      may_be_on_ssd = table->ssd_rows[stripe].load(std::memory_order_relaxed) > 0;
      const TableStripe* held = table->stripes[stripe].get();
      for (std::uint64_t path = slots.first_path(in_stripe); held != nullptr;) {
        const RowIndex::Range range = held->index.range_at(path);
        for (const RowIndex::Entry& entry : range.entries) {
          if (slots.slot_in_stripe(entry.path) == in_stripe) add(entry.path, held->slab.at(entry.row).version());
        }
        path = range.next;
        if (path == 0 || slots.slot_in_stripe(path) != in_stripe) break;
      }
    }
    if (!may_be_on_ssd) continue;
    SR_RETURN_IF_ERROR(store.tiering->visit_slot(
        *table, slot, [&](std::uint64_t path, const RowImage& image) { add(path, image.version); }));
  }
  return Status::ok();
}

Result<std::vector<ChangedKeys>> ChangeLog::keys_of(std::uint32_t slot) const {
  std::map<std::uint32_t, ChangedKeys> tables;
  SR_RETURN_IF_ERROR(list_rows(slot, 0, {}, tables));
  return ordered(tables, false);
}

Status ChangeLog::ack(const std::string& name, std::uint32_t slot, std::uint64_t version) {
  const std::lock_guard lock(cursors_mutex_);
  Cursor* cursor = find(name);
  if (cursor == nullptr) return no_cursor(name);
  if (slot >= cursor->versions.size()) {
    return {Code::kInvalidArgument, "cursor '" + name + "': there is no slot " + std::to_string(slot)};
  }
  std::uint64_t now = 0;
  {
    const Store::Impl& store = *store_->impl_;
    const std::shared_lock stripe_lock(store.stripes[slot % store.slots.stripe_count()].mutex);
    now = store.version_of(slot);
  }
  std::uint64_t& held = cursor->versions[slot];
  if (held == kNotFollowed || version > now) return Status::ok();
  if (cursor->hold != nullptr ? !cursor->hold->commit(slot, version) || version < held : version <= held) {
    return Status::ok();
  }
  held = version;
  pass(slot);
  return Status::ok();
}

Status ChangeLog::passed(const std::string& name, std::uint32_t slot, std::uint64_t version) {
  const std::lock_guard lock(cursors_mutex_);
  Cursor* cursor = find(name);
  if (cursor == nullptr) return no_cursor(name);
  std::uint64_t& held = cursor->versions[slot];
  if (version <= held) return Status::ok();
  held = version;
  pass(slot);
  return Status::ok();
}

Result<std::shared_ptr<ChangeHold>> ChangeLog::hold_of(const std::string& name) {
  const std::lock_guard lock(cursors_mutex_);
  const Cursor* cursor = find(name);
  if (cursor == nullptr) return no_cursor(name);
  return cursor->hold;
}

ChangeLogStats ChangeLog::stats() const {
  const ChangeBudget& budget = store_->impl_->change_budget;
  const std::lock_guard lock(cursors_mutex_);
  std::uint64_t held_rows = 0;
  for (const auto& [name, cursor] : cursors_) held_rows += cursor.hold != nullptr ? cursor.hold->rows() : 0;
  return {.cursors = cursors_.size(),
          .used_bytes = budget.used_bytes,
          .forgotten = budget.forgotten,
          .scans = scans_,
          .snapshots = snapshots_,
          .held_rows = held_rows};
}

}  // namespace sparserow
