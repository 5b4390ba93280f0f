#include "store/change_log.h"

#include <algorithm>
#include <array>
#include <numeric>
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

constexpr std::uint64_t kSequence = (std::uint64_t{1} << 48) - 1;
constexpr std::uint64_t kMostFresh = 1024;  // writes of a stripe that lie unsorted
constexpr std::uint64_t kFreshShare = 16;   // part of the budget that they may have
constexpr std::size_t kSlotsAtOnce = 64;    // that are passed while a stripe is held

}  // namespace

void join_rows(std::vector<ChangedRow>& rows) {
  std::sort(rows.begin(), rows.end(), [](const ChangedRow& a, const ChangedRow& b) {
    return a.table_id != b.table_id ? a.table_id < b.table_id : a.key < b.key;
  });
  std::size_t kept = 0;
  for (const ChangedRow& row : rows) {
    if (kept > 0 && rows[kept - 1].key == row.key && rows[kept - 1].table_id == row.table_id) {
      rows[kept - 1].times += row.times;
    } else {
      rows[kept++] = row;
    }
  }
  rows.resize(kept);
}

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
  // What was noted before a cursor's versions, and not seen yet, it would not see.
  Store::Impl& store = *store_->impl_;
  for (std::uint32_t number = 0; number < store.slots.stripe_count(); ++number) {
    const std::unique_lock stripe_lock(store.stripes[number].mutex);
    for (std::uint32_t slot = number; slot < slot_count; slot += store.slots.stripe_count()) {
      const std::uint64_t version = cursor.versions[slot];
      if (version == kNotFollowed) continue;
      store.stripes[number].log.see(slot / store.slots.stripe_count(), version & kSequence);
    }
  }
  if (hold.updates > 0) store.counts_writes = true;
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
  pass_all();
}

Status ChangeLog::start_rings() {
  Store::Impl& store = *store_->impl_;
  const std::uint64_t stripes = store.slots.stripe_count();
  const std::uint64_t fresh =
      std::min<std::uint64_t>(kMostFresh, store.change_budget.limit_bytes / kFreshShare / stripes / sizeof(Change));
  ring_bytes_ = std::uint64_t{store.options.slot_count} * sizeof(SlotLog) + stripes * fresh * sizeof(Change);
  if (!store.change_budget.take(ring_bytes_)) {
    return {Code::kResourceExhausted,
            "change_log_bytes: " + std::to_string(store.change_budget.limit_bytes) +
                " is not enough to follow changes; allowed: >= " + std::to_string(ring_bytes_)};
  }
  for (std::uint32_t number = 0; number < stripes; ++number) {
    Store::Impl::Stripe& stripe = store.stripes[number];
    const std::unique_lock lock(stripe.mutex);
    stripe.log.open(stripe.sequences, fresh);
  }
  return Status::ok();
}

void ChangeLog::end_rings() {
  Store::Impl& store = *store_->impl_;
  for (Store::Impl::Stripe& stripe : store.stripes) {
    const std::unique_lock lock(stripe.mutex);
    stripe.log.close(store.change_budget);
  }
  store.counts_writes = false;
  store.change_budget.give_back(ring_bytes_);
}

void ChangeLog::pass_all() {
  std::vector<std::uint32_t> all(store_->options().slot_count);
  std::iota(all.begin(), all.end(), 0u);
  pass(all);
}

// Drops what every cursor has of these slots.
void ChangeLog::pass(std::span<const std::uint32_t> slots) {
  Store::Impl& store = *store_->impl_;
  const std::uint32_t stripes = store.slots.stripe_count();
  std::array<std::vector<std::uint32_t>, kStripes> by_stripe;
  for (const std::uint32_t slot : slots) by_stripe[slot % stripes].push_back(slot);
  for (std::uint32_t number = 0; number < stripes; ++number) {
    Store::Impl::Stripe& stripe = store.stripes[number];
    const std::span<const std::uint32_t> all = by_stripe[number];
    for (std::size_t begin = 0; begin < all.size(); begin += kSlotsAtOnce) {
      const std::unique_lock lock(stripe.mutex);
      for (const std::uint32_t slot : all.subspan(begin, std::min(kSlotsAtOnce, all.size() - begin))) {
        std::uint64_t passed = kNotFollowed;
        for (const auto& [name, cursor] : cursors_) {
          const std::uint64_t version = cursor.versions[slot];
          const bool is_held = cursor.hold != nullptr && version != kNotFollowed;
          passed = std::min(passed, is_held ? cursor.hold->safe(slot, version) : version);
        }
        const std::uint64_t sequence = passed == kNotFollowed ? stripe.sequences[slot / stripes] : passed & kSequence;
        SlotLog& log = stripe.log.slot(slot / stripes, store.change_budget);
        log.written.pass(sequence, store.change_budget);
        log.erased.pass(sequence, store.change_budget);
      }
    }
  }
}

ChangeLog::Cursor* ChangeLog::find(const std::string& name) {
  const auto found = cursors_.find(name);
  if (found == cursors_.end()) return nullptr;
  found->second.used_at = Clock::now();
  return &found->second;
}

Result<ChangeLog::Behind> ChangeLog::behind(const std::string& name, std::uint32_t begin) {
  const std::vector<std::uint64_t> now = versions();
  const std::lock_guard lock(cursors_mutex_);
  const Cursor* cursor = find(name);
  if (cursor == nullptr) return no_cursor(name);
  const auto due = cursor->hold != nullptr ? cursor->hold->due() : std::unordered_set<std::uint32_t>{};
  Behind behind{.slots = {}, .tables = cursor->tables, .hold = cursor->hold};
  for (std::uint32_t slot = begin; slot < now.size(); ++slot) {
    const std::uint64_t version = cursor->versions[slot];
    if (version == kNotFollowed) continue;
    if (version < now[slot] || (!due.empty() && due.contains(slot))) behind.slots.push_back({slot, version});
  }
  return behind;
}

Result<SlotChanges> ChangeLog::read(const Behind& behind, const Behind::Slot& from) {
  SlotChanges out{.slot = from.slot, .since = from.since};
  Store::Impl& store = *store_->impl_;
  Store::Impl::Stripe& stripe = store.stripes[from.slot % store.slots.stripe_count()];
  const std::uint32_t in_stripe = from.slot / store.slots.stripe_count();
  const std::uint64_t since = from.since & kSequence;
  {
    const std::unique_lock lock(stripe.mutex);
    out.until = store.version_of(from.slot);
    if (!stripe.log.is_open()) return Status(Code::kNotFound, "the cursor was closed; open it again");
    stripe.log.see(in_stripe, out.until & kSequence);
    const SlotLog& log = stripe.log.slot(in_stripe, store.change_budget);
    if (from.since >> 48 != out.until >> 48 || since < log.erased.floor()) {
      out.kind = SlotChanges::Kind::kSnapshot;
      out.since = 0;
    } else {
      out.is_counted = since >= log.written.floor();
      if (out.is_counted) {
        log.written.visit_after(since, [&](const Change& change) {
          if (!is_wanted(behind.tables, change.table_id)) return;
          if (out.oldest_at_ms == 0) out.oldest_at_ms = change.at_ms;
          out.written.push_back({change.key, change.table_id, 1});
        });
      }
      log.erased.visit_after(since, [&](const Change& change) {
        if (!is_wanted(behind.tables, change.table_id)) return;
        out.erased.push_back({change.key, out.until >> 48 << 48 | change.sequence, change.table_id});
      });
    }
  }
  if (!out.is_counted) {
    SR_RETURN_IF_ERROR(list_rows(from.slot, out.since, behind.tables, out.written));
    ++(out.kind == SlotChanges::Kind::kSnapshot ? snapshots_ : scans_);
  }
  join_rows(out.written);
  return out;
}

// Keys of the slot whose rows are newer than `since`, from a look at all of them.
Status ChangeLog::list_rows(std::uint32_t slot, std::uint64_t since, const std::vector<std::uint32_t>& wanted,
                            std::vector<ChangedRow>& rows) const {
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
      rows.push_back({key_of_hash(table->schema.id, slots.hash(stripe, path)), table->schema.id, 0});
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

Result<std::vector<ChangedRow>> ChangeLog::rows_of(std::uint32_t slot) const {
  std::vector<ChangedRow> rows;
  SR_RETURN_IF_ERROR(list_rows(slot, 0, {}, rows));
  join_rows(rows);
  return rows;
}

Status ChangeLog::ack(const std::string& name, std::span<const std::uint32_t> slots,
                      std::span<const std::uint64_t> versions) {
  const std::vector<std::uint64_t> now = this->versions();
  const std::lock_guard lock(cursors_mutex_);
  Cursor* cursor = find(name);
  if (cursor == nullptr) return no_cursor(name);
  for (const std::uint32_t slot : slots) {
    if (slot >= now.size()) {
      return {Code::kInvalidArgument, "cursor '" + name + "': there is no slot " + std::to_string(slot)};
    }
  }
  std::vector<std::uint32_t> moved;
  moved.reserve(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    std::uint64_t& held = cursor->versions[slots[i]];
    if (held == kNotFollowed || versions[i] > now[slots[i]]) continue;
    if (cursor->hold != nullptr ? !cursor->hold->commit(slots[i], versions[i]) || versions[i] < held
                                : versions[i] <= held) {
      continue;
    }
    held = versions[i];
    moved.push_back(slots[i]);
  }
  pass(moved);
  return Status::ok();
}

Status ChangeLog::passed(const std::string& name, std::uint32_t slot, std::uint64_t version) {
  const std::lock_guard lock(cursors_mutex_);
  Cursor* cursor = find(name);
  if (cursor == nullptr) return no_cursor(name);
  std::uint64_t& held = cursor->versions[slot];
  if (version <= held) return Status::ok();
  held = version;
  pass(std::span(&slot, 1));
  return Status::ok();
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
