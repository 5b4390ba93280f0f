#include "store/changes/change_log.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "store/store_impl.h"
#include "util/hash.h"
#include "util/not_allowed.h"

namespace sparserow {
namespace {

Status no_cursor(const std::string& name) {
  return {Code::kNotFound, "cursor '" + name + "' is not known to this store; open it with the versions that it has"};
}

bool is_wanted(const std::vector<std::uint32_t>& tables, std::uint32_t table_id) {
  return tables.empty() || std::binary_search(tables.begin(), tables.end(), table_id);
}

// Whether the rest of a slot can follow the parts that were acknowledged. since: sequence; now: version of the slot.
bool can_go_on(const ChangeLog::Begun& begun, std::uint64_t since, std::uint64_t now, const ChangeRing& erasures) {
  if (begun.until >> 48 != now >> 48) return false;
  const std::uint64_t erased_after = std::max(since, begun.from.erased_after);
  return begun.kind == SlotChanges::Kind::kSnapshot || erased_after >= erasures.floor() ||
         erased_after >= (begun.until & kSequence);
}

}  // namespace

void join_rows(std::vector<ChangedRow>& rows) {
  std::ranges::sort(rows, {},
                    [](const ChangedRow& row) { return std::pair(row.table_id, row_hash(row.table_id, row.key)); });
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

ChangeSignal& ChangeLog::signal() noexcept { return store_->impl_->versions.signal; }

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
                       std::vector<std::uint32_t> tables, std::chrono::seconds idle_limit,
                       const ThresholdOptions& threshold) {
  const std::uint32_t slot_count = store_->options().slot_count;
  if (versions.size() != slot_count) {
    return not_allowed("cursor '" + name + "': number of versions", versions.size(),
                       std::to_string(slot_count) + ", one for each slot");
  }
  std::sort(tables.begin(), tables.end());
  tables.erase(std::unique(tables.begin(), tables.end()), tables.end());
  const MutexLock lock(cursors_mutex_);
  if (cursors_.empty()) SR_RETURN_IF_ERROR(start_rings());
  Cursor cursor{.versions = {versions.begin(), versions.end()},
                .is_read_pass = std::vector<std::uint8_t>(slot_count),
                .tables = std::move(tables),
                .idle_limit = idle_limit,
                .used_at = Clock::now(),
                .threshold = threshold.is_on() ? std::make_shared<SendThreshold>(threshold) : nullptr};
  const std::uint64_t lineage = store_->lineage();
  for (std::uint64_t& version : cursor.versions) {
    if (version != kNotFollowed && version >> 48 != lineage) version = 0;
  }
  Store::Impl& store = *store_->impl_;
  const Cursor* const before = find(name);
  const bool is_wider = store.tables.follow(cursor.tables);
  const std::uint32_t stripes = store.slots.stripe_count();
  for (std::uint32_t number = 0; number < stripes; ++number) {
    Store::Impl::Stripe& stripe = store.stripes[number];
    const std::unique_lock stripe_lock(stripe.mutex);
    if (is_wider) stripe.log.widen(stripe.sequences);
    if (threshold.updates > 0) stripe.log.count(stripe.sequences);
    for (std::uint32_t slot = number; slot < slot_count; slot += stripes) {
      const std::uint64_t version = cursor.versions[slot];
      const std::uint64_t sequence = version & kSequence;
      const std::uint32_t in_stripe = slot / stripes;
      if (version == kNotFollowed) continue;
      if (sequence == stripe.sequences[in_stripe]) stripe.log.see(in_stripe, sequence);
      cursor.is_read_pass[slot] =
          sequence == stripe.log.seen(in_stripe) ||
          (before != nullptr && before->versions[slot] == version && before->is_read_pass[slot] != 0);
    }
  }
  if (before != nullptr) store.tables.unfollow(before->tables);
  cursors_.insert_or_assign(name, std::move(cursor));
  return Status::ok();
}

void ChangeLog::close(const std::string& name) {
  const MutexLock lock(cursors_mutex_);
  if (const auto found = cursors_.find(name); found != cursors_.end()) drop(found);
}

void ChangeLog::close_idle() {
  const auto now = Clock::now();
  const MutexLock lock(cursors_mutex_);
  for (auto at = cursors_.begin(); at != cursors_.end();) {
    const auto cursor = at++;
    const auto limit = cursor->second.idle_limit;
    if (limit.count() > 0 && now - cursor->second.used_at > limit) drop(cursor);
  }
}

bool ChangeLog::is_open(const std::string& name) const {
  const MutexLock lock(cursors_mutex_);
  return cursors_.contains(name);
}

void ChangeLog::drop(std::map<std::string, Cursor>::iterator cursor) {
  store_->impl_->tables.unfollow(cursor->second.tables);
  cursors_.erase(cursor);
  if (cursors_.empty()) {
    end_rings();
    return;
  }
  pass_all();
}

Status ChangeLog::start_rings() {
  Store::Impl& store = *store_->impl_;
  ring_bytes_ = StripeLog::bytes_for(store.options.slot_count);
  if (!store.versions.change_budget.take(ring_bytes_)) {
    return {Code::kResourceExhausted,
            "change_log_bytes: " + std::to_string(store.versions.change_budget.limit_bytes) +
                " is not enough to follow changes; allowed: >= " + std::to_string(ring_bytes_)};
  }
  for (std::uint32_t number = 0; number < store.slots.stripe_count(); ++number) {
    Store::Impl::Stripe& stripe = store.stripes[number];
    const std::unique_lock lock(stripe.mutex);
    stripe.log.open(stripe.sequences);
  }
  return Status::ok();
}

void ChangeLog::end_rings() {
  Store::Impl& store = *store_->impl_;
  for (Store::Impl::Stripe& stripe : store.stripes) {
    const std::unique_lock lock(stripe.mutex);
    stripe.log.close(store.versions.change_budget);
  }
  store.versions.change_budget.give_back(ring_bytes_);
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
  std::vector<std::uint64_t> passed;
  for (std::uint32_t number = 0; number < stripes; ++number) {
    if (by_stripe[number].empty()) continue;
    Store::Impl::Stripe& stripe = store.stripes[number];
    const std::unique_lock lock(stripe.mutex);
    passed.assign(stripe.sequences.size(), 0);
    for (const std::uint32_t slot : by_stripe[number]) {
      std::uint64_t least = kNotFollowed;
      for (const auto& [name, cursor] : cursors_) {
        const std::uint64_t version = cursor.versions[slot];
        const bool is_held = cursor.threshold != nullptr && version != kNotFollowed;
        least = std::min(least, is_held ? cursor.threshold->safe(slot, version) : version);
      }
      passed[slot / stripes] = least == kNotFollowed ? stripe.sequences[slot / stripes] : least & kSequence;
    }
    stripe.log.pass(passed, store.versions.change_budget);
  }
}

ChangeLog::Cursor* ChangeLog::find(const std::string& name) {
  const auto found = cursors_.find(name);
  if (found == cursors_.end()) return nullptr;
  found->second.used_at = Clock::now();
  return &found->second;
}

// (slot_count) the version of the last change of each slot that some cursor may want.
std::vector<std::uint64_t> ChangeLog::touched_versions() const {
  const Store::Impl& store = *store_->impl_;
  std::vector<std::uint64_t> out(store.options.slot_count);
  const std::uint32_t stripes = store.slots.stripe_count();
  for (std::uint32_t stripe = 0; stripe < stripes; ++stripe) {
    const std::shared_lock lock(store.stripes[stripe].mutex);
    const StripeLog& log = store.stripes[stripe].log;
    if (!log.is_open()) continue;  // its follower has left
    for (std::uint32_t slot = stripe; slot < out.size(); slot += stripes) {
      out[slot] = store.versions.of_sequence(log.touched(slot / stripes));
    }
  }
  return out;
}

Result<ChangeLog::Behind> ChangeLog::behind(const std::string& name, std::uint32_t begin) {
  const std::vector<std::uint64_t> now = touched_versions();
  const MutexLock lock(cursors_mutex_);
  Cursor* cursor = find(name);
  if (cursor == nullptr) return no_cursor(name);
  if (begin == 0) cursor->parts.reset();  // they bring their slot to an older version than that of now
  const auto due = cursor->threshold != nullptr ? cursor->threshold->due() : std::unordered_set<std::uint32_t>{};
  Behind behind{.slots = {}, .tables = cursor->tables, .threshold = cursor->threshold};
  const std::uint32_t stripes = store_->impl_->slots.stripe_count();
  const auto per_stripe = static_cast<std::uint32_t>(now.size()) / stripes;
  for (std::uint32_t place = begin == 0 ? 0 : begin - 1; place < now.size(); ++place) {
    const std::uint32_t slot = place / per_stripe + place % per_stripe * stripes;
    const std::uint64_t version = cursor->versions[slot];
    if (version == kNotFollowed) continue;
    if (version < now[slot] || (!due.empty() && due.contains(slot))) {
      behind.slots.push_back({slot, version, cursor->is_read_pass[slot] != 0});
      if (cursor->parts && cursor->parts->slot == slot) behind.slots.back().begun = cursor->parts->begun;
    }
  }
  return behind;
}

std::uint32_t ChangeLog::begin_of(std::uint32_t slot) const noexcept {
  const Store::Impl& store = *store_->impl_;
  const std::uint32_t stripes = store.slots.stripe_count();
  return 1 + slot % stripes * (store.options.slot_count / stripes) + slot / stripes;
}

Result<StripeChanges> ChangeLog::read(const Behind& behind, std::span<const Behind::Slot> slots) {
  constexpr std::uint32_t kNone = UINT32_MAX;
  StripeChanges out;
  out.slots.reserve(slots.size());
  Store::Impl& store = *store_->impl_;
  const std::uint32_t stripes = store.slots.stripe_count();
  Store::Impl::Stripe& stripe = store.stripes[slots.front().slot % stripes];
  std::vector<std::uint32_t> place(stripe.sequences.size(), kNone);  // of a noted slot in `out`
  const std::unique_lock lock(stripe.mutex);
  StripeLog& log = stripe.log;
  if (!log.is_open()) return Status(Code::kNotFound, "the cursor was closed; open it again");
  const std::uint64_t last_reset = log.last_reset(behind.tables);
  out.may_repeat = log.counts();
  for (const Behind::Slot& from : slots) {
    SlotChanges& changes = out.slots.emplace_back(SlotChanges{.slot = from.slot, .since = from.since});
    const std::uint32_t in_stripe = from.slot / stripes;
    const std::uint64_t since = from.since & kSequence;
    changes.until = store.version_of(from.slot);
    const ChangeRing& erasures = log.erasures(in_stripe);
    if (from.begun && from.begun->from != SlotPlace() && can_go_on(*from.begun, since, changes.until, erasures)) {
      changes.kind = from.begun->kind;
      changes.until = from.begun->until;
      changes.from = from.begun->from;
    } else {
      out.may_repeat |= log.seen(in_stripe) != since;
      log.see(in_stripe, changes.until & kSequence);
      const bool is_lost = from.since >> 48 != changes.until >> 48 || since < std::max(last_reset, erasures.floor());
      if (is_lost) changes.kind = SlotChanges::Kind::kSnapshot;
    }
    if (changes.kind == SlotChanges::Kind::kSnapshot) {
      changes.since = 0;
      continue;
    }
    changes.is_noted = from.is_read_pass && since >= log.floor(in_stripe);
    changes.is_counted = changes.is_noted && log.counts_since(in_stripe, since);
    if (changes.is_noted) place[in_stripe] = static_cast<std::uint32_t>(out.slots.size() - 1);
    erasures.visit_after(std::max(since, changes.from.erased_after), [&](const Change& change) {
      if (change.sequence > (changes.until & kSequence) || !is_wanted(behind.tables, change.table_id)) return;
      changes.erased.push_back({change.key, changes.until >> 48 << 48 | change.sequence, change.table_id});
    });
  }
  log.visit_written([&](std::uint32_t in_stripe, const Change& change) {
    if (place[in_stripe] == kNone || !is_wanted(behind.tables, change.table_id)) return;
    SlotChanges& changes = out.slots[place[in_stripe]];
    if (change.sequence <= (changes.since & kSequence) || change.sequence > (changes.until & kSequence)) return;
    if (changes.oldest_at_ms == 0) changes.oldest_at_ms = change.at_ms;
    out.written.push_back({change.key, change.table_id, place[in_stripe]});
  });
  return out;
}

Result<std::uint64_t> ChangeLog::sent(const std::string& name, const SlotChanges& changes) {
  const MutexLock lock(cursors_mutex_);
  Cursor* cursor = find(name);
  if (cursor == nullptr) return no_cursor(name);
  cursor->parts = {.slot = changes.slot,
                   .begun = {changes.kind, changes.until, changes.from},
                   .next = *changes.to,
                   .number = ++cursor->parts_sent};
  return cursor->parts_sent;
}

Status ChangeLog::ack(const std::string& name, std::span<const std::uint32_t> slots,
                      std::span<const std::uint64_t> versions, std::uint64_t part) {
  const std::vector<std::uint64_t> now = this->versions();
  const MutexLock lock(cursors_mutex_);
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
    std::uint64_t& sent = cursor->versions[slots[i]];
    if (sent == kNotFollowed || versions[i] > now[slots[i]]) continue;
    if (cursor->threshold != nullptr ? !cursor->threshold->commit(slots[i], versions[i]) || versions[i] < sent
                                     : versions[i] <= sent) {
      continue;
    }
    sent = versions[i];
    cursor->is_read_pass[slots[i]] = 1;
    if (cursor->parts && cursor->parts->slot == slots[i]) cursor->parts.reset();
    moved.push_back(slots[i]);
  }
  if (part != 0 && cursor->parts && cursor->parts->number == part) cursor->parts->begun.from = cursor->parts->next;
  pass(moved);
  return Status::ok();
}

Status ChangeLog::passed(const std::string& name, std::span<const SlotChanges> slots) {
  const MutexLock lock(cursors_mutex_);
  Cursor* cursor = find(name);
  if (cursor == nullptr) return no_cursor(name);
  std::vector<std::uint32_t> moved;
  for (const SlotChanges& changes : slots) {
    std::uint64_t& sent = cursor->versions[changes.slot];
    if (changes.to) {
      cursor->parts = {.slot = changes.slot, .begun = {changes.kind, changes.until, *changes.to}, .next = *changes.to};
      continue;
    }
    if (cursor->parts && cursor->parts->slot == changes.slot) cursor->parts.reset();
    if (changes.until <= sent) continue;
    sent = changes.until;
    cursor->is_read_pass[changes.slot] = 1;
    moved.push_back(changes.slot);
  }
  pass(moved);
  return Status::ok();
}

ChangeLogStats ChangeLog::stats() const {
  const ChangeBudget& budget = store_->impl_->versions.change_budget;
  const MutexLock lock(cursors_mutex_);
  std::uint64_t waiting_rows = 0;
  for (const auto& [name, cursor] : cursors_)
    waiting_rows += cursor.threshold != nullptr ? cursor.threshold->rows() : 0;
  return {.cursors = cursors_.size(),
          .used_bytes = budget.used_bytes,
          .forgotten = budget.forgotten,
          .scans = scans_,
          .snapshots = snapshots_,
          .waiting_rows = waiting_rows};
}

}  // namespace sparserow
