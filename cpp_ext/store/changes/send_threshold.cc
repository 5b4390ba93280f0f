#include "store/changes/send_threshold.h"

#include <algorithm>

#include "store/changes/change_log.h"

namespace sparserow {
namespace {

constexpr std::uint64_t kNodeBytes = 96;  // of a copy beside its weights
constexpr std::uint64_t kPatience = 64;   // refusals for each copy, before a slot gives up its own

// The system's clock, low half: it goes round.
bool is_older(std::uint32_t a, std::uint32_t b) noexcept { return static_cast<std::int32_t>(a - b) < 0; }

}  // namespace

void SendThreshold::begin(SlotChanges& changes) {
  const MutexLock lock(mutex_);
  Slot& slot = slots_[changes.slot];
  if (!slot.pass || changes.from == SlotPlace()) slot.pass.emplace(Pending{});  // clang cannot make it in place
  slot.pass->is_snapshot = changes.kind == SlotChanges::Kind::kSnapshot;
  slot.pass->position = changes.until;
  if (slot.pass->is_snapshot) return;  // names every row
  for (const auto& [name, row] : slot.waiting) changes.written.push_back({.key = name.second, .table_id = name.first});
  join_rows(changes.written);
  for (const ErasedRow& row : changes.erased) slot.pass->gone.emplace(row.table_id, row.key);
}

bool SendThreshold::has_moved(const Slot& slot, const RowName& name, std::span<const float> row) const {
  const auto sent = slot.sent.find(name);
  if (sent == slot.sent.end() || sent->second.size() != row.size()) return true;
  double squares = 0.0;
  for (std::size_t c = 0; c < row.size(); ++c) {
    const double gap = double{row[c]} - double{sent->second[c]};
    squares += gap * gap;
  }
  return !(squares <= double{options_.move} * double{options_.move});  // a row that is not finite has moved
}

void SendThreshold::Pending::forget_sent(const RowName& name) {
  const auto found = sent.find(name);
  if (found == sent.end()) return;
  sent_bytes -= bytes_of(found->second);
  sent.erase(found);
}

std::vector<std::uint8_t> SendThreshold::choose(const SlotChanges& changes, std::span<const ChangedRow> names,
                                                std::uint32_t dim, std::span<const float> rows,
                                                std::span<const std::uint8_t> found) {
  const Clock::time_point now = Clock::now();
  std::vector<std::uint8_t> goes(names.size());
  const MutexLock lock(mutex_);
  Slot& slot = slots_[changes.slot];
  Pending& pass = *slot.pass;
  const bool has_all = options_.updates > 0 ? changes.is_counted : changes.is_noted;
  for (std::size_t i = 0; i < goes.size(); ++i) {
    if (found[i] == 0) continue;
    const RowName name{names[i].table_id, names[i].key};
    const std::span<const float> row = rows.subspan(i * dim, dim);
    const auto before = slot.waiting.find(name);
    WaitingRow waiting{
        .updates = 0, .at_ms = changes.oldest_at_ms, .since = changes.since, .until = now + options_.longest};
    if (before != slot.waiting.end()) waiting = before->second;
    waiting.updates += names[i].times;
    const bool is_known = !pass.is_snapshot && has_all && !pass.gone.contains(name);
    const bool is_counted = options_.updates > 0 && waiting.updates >= options_.updates;
    const bool is_far = options_.move > 0.0f && has_moved(slot, name, row);
    pass.forget_sent(name);  // a part may be read again
    if (is_known && !is_counted && !is_far && now < waiting.until) {
      pass.waiting.insert_or_assign(name, waiting);
      continue;
    }
    pass.waiting.erase(name);
    goes[i] = 1;
    if (pass.oldest_at_ms == 0 || is_older(waiting.at_ms, pass.oldest_at_ms)) pass.oldest_at_ms = waiting.at_ms;
    if (options_.move > 0.0f && pass.sent_bytes >= options_.bytes) {
      pass.has_uncopied = true;
    } else if (options_.move > 0.0f) {
      const auto copy = pass.sent.emplace(name, std::vector<float>(row.begin(), row.end())).first;
      pass.sent_bytes += bytes_of(copy->second);
    }
  }
  return goes;
}

SendThreshold::PassEnd SendThreshold::end(const SlotChanges& changes, bool is_sent) {
  const MutexLock lock(mutex_);
  const Pending& pass = *slots_[changes.slot].pass;
  PassEnd out{.safe = safe_of(pass.waiting, changes.until), .oldest_at_ms = pass.oldest_at_ms};
  if (!pass.gone.empty() || pass.is_snapshot) out.oldest_at_ms = changes.oldest_at_ms;
  if (!is_sent && !changes.to) commit_locked(changes.slot, changes.until);
  return out;
}

bool SendThreshold::commit(std::uint32_t slot, std::uint64_t position) {
  const MutexLock lock(mutex_);
  return commit_locked(slot, position);
}

bool SendThreshold::commit_locked(std::uint32_t number, std::uint64_t position) {
  const auto found = slots_.find(number);
  if (found == slots_.end() || !found->second.pass || found->second.pass->position != position) return false;
  Slot& slot = found->second;
  if (slot.pass->is_snapshot || slot.pass->has_uncopied) {
    while (!slot.sent.empty()) forget_sent(slot, slot.sent.begin()->first);
  }
  for (const RowName& name : slot.pass->gone) forget_sent(slot, name);
  slot.waiting = std::move(slot.pass->waiting);
  keep_sent(number, slot);
  slot.pass.reset();
  if (slot.waiting.empty() && slot.sent.empty()) slots_.erase(found);
  return true;
}

std::uint64_t SendThreshold::bytes_of(const std::vector<float>& row) noexcept {
  return kNodeBytes + row.size() * sizeof(float);
}

void SendThreshold::forget_sent(Slot& slot, const RowName& name) {
  const auto found = slot.sent.find(name);
  if (found == slot.sent.end()) return;
  sent_bytes_ -= bytes_of(found->second);
  slot.sent.erase(found);
}

// Where copies have no room those that are there stay, since rows of a sweep would push each other out before they are
// of use. After many refusals one slot gives up its own.
void SendThreshold::keep_sent(std::uint32_t number, Slot& slot) {
  for (auto& [name, row] : slot.pass->sent) {
    forget_sent(slot, name);
    const std::uint64_t bytes = bytes_of(row);
    if (sent_bytes_ + bytes > options_.bytes) {
      refused_bytes_ += bytes;
      if (refused_bytes_ < kPatience * sent_bytes_) continue;
      refused_bytes_ = 0;
      empty_another(number);
      if (sent_bytes_ + bytes > options_.bytes) continue;
    }
    sent_bytes_ += bytes;
    slot.sent.insert_or_assign(name, std::move(row));
  }
}

void SendThreshold::empty_another(std::uint32_t number) {
  auto other = slots_.upper_bound(emptied_);
  for (std::size_t tries = 0; tries < slots_.size(); ++tries, ++other) {
    if (other == slots_.end()) other = slots_.begin();
    if (other->first == number || other->second.sent.empty()) continue;
    emptied_ = other->first;
    while (!other->second.sent.empty()) forget_sent(other->second, other->second.sent.begin()->first);
    return;
  }
}

std::uint64_t SendThreshold::safe_of(const std::map<RowName, WaitingRow>& waiting, std::uint64_t position) noexcept {
  for (const auto& [name, row] : waiting) position = std::min(position, row.since);
  return position;
}

std::uint64_t SendThreshold::safe(std::uint32_t slot, std::uint64_t position) const {
  const MutexLock lock(mutex_);
  const auto found = slots_.find(slot);
  return found == slots_.end() ? position : safe_of(found->second.waiting, position);
}

std::unordered_set<std::uint32_t> SendThreshold::due() const {
  const Clock::time_point now = Clock::now();
  std::unordered_set<std::uint32_t> out;
  const MutexLock lock(mutex_);
  for (const auto& [number, slot] : slots_) {
    if (std::any_of(slot.waiting.begin(), slot.waiting.end(),
                    [now](const auto& each) { return each.second.until <= now; })) {
      out.insert(number);
    }
  }
  return out;
}

std::uint64_t SendThreshold::rows() const {
  std::uint64_t rows = 0;
  const MutexLock lock(mutex_);
  for (const auto& [number, slot] : slots_) rows += slot.waiting.size();
  return rows;
}

}  // namespace sparserow
